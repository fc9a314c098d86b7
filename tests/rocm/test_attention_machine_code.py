# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The attention kernels as compiled for gfx942, run in the simulator.

Compared with the float64 oracle within the bounds of the formats; with the same program in
interpret mode, which rounds at the same places, almost bit for bit; and with the XLA backend.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxfp8
from jaxfp8 import packing
from jaxfp8.ops.attention import pallas_triton_kernel
from jaxfp8.ops.attention.heuristics import default_config
from tests import oracle
from tests.inputs import cu_seqlens, qkv, with_tail
from tests.rocm.simulate import simulate
from tests.rocm.tools import needs_rocm_compiler
from tests.tolerances import assert_attention, assert_close, lse_bound, relative_error

pytestmark = needs_rocm_compiler

FNUZ = "float8_e4m3fnuz"
ATTENTION = ("jaxfp8_attention",)
NUM_HEADS = 2

# One size of arrays for all batches, so that each kernel is compiled once. What is past the end of
# the last sequence is NaN.
QUERIES, KEYS = 330, 600

# Lengths around the tiles' 128 rows and 64 keys, and the key counts that go wrong elsewhere.
BATCHES = {
    "tile edges": ([127, 1, 128, 0], [65, 64, 63, 128]),
    "fewer keys than queries": ([129, 65, 2, 130], [64, 0, 1, 129]),
    "193 to 256 keys": ([1, 33, 64, 0], [193, 256, 129, 5]),
    "one long sequence": ([330, 0, 0, 0], [600, 0, 0, 0]),
    "nothing to see": ([5, 0, 0, 200], [0, 300, 0, 0]),
}

# Against the same program in interpret mode: float32 sums in another order, a last bit of exp2,
# and the few roundings of P and of the output that those turn the other way.
INTERPRET_RELATIVE = 2.0**-10
# Against the XLA backend, whose blocks of keys, and so the running maxima by which P is scaled
# before it is rounded, are others.
XLA_RELATIVE = {"fp8": 2.0**-6, "bf16": 2.0**-8}


def batch(
    rng: np.random.Generator, lengths_q: Sequence[int], lengths_k: Sequence[int], qk: int = 192
) -> list[np.ndarray]:
    """q, k, v, cu_seqlens_q, cu_seqlens_k with NaN past the last sequence."""
    q, k, v = qkv(rng, sum(lengths_q), sum(lengths_k), NUM_HEADS, qk)
    arrays = [with_tail(x, n) for x, n in ((q, QUERIES), (k, KEYS), (v, KEYS))]
    return [*arrays, cu_seqlens(lengths_q), cu_seqlens(lengths_k)]


def expected_attention(arrays: Sequence[np.ndarray], precision: str, causal: bool) -> Any:
    q, k, v, cu_q, cu_k = arrays
    if precision == "fp8":
        q, k, v = (
            oracle.through_fp8(x, FNUZ, None, int(cu[-1]))
            for x, cu in zip((q, k, v), (cu_q, cu_k, cu_k), strict=True)
        )
    return oracle.attention(q, k, v, cu_q, cu_k, causal=causal)


def attention(precision: str, causal: bool, splits: int | None) -> Callable[..., Any]:
    """A call; splits: parts into which the keys are split, None takes what the library does."""

    def function(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any) -> jaxfp8.AttentionState:
        query = packing.pack_query(q, cu_q, None, precision, None, None, v_head_dim=128)
        context = packing.pack_context(k, v, cu_k, None, None, precision, None, None)
        config = dataclasses.replace(context.data.config, splits=splits)
        data = dataclasses.replace(context.data, config=config)
        return jaxfp8.attend(query, dataclasses.replace(context, data=data), causal=causal)

    return function


def check(
    arrays: Sequence[np.ndarray],
    precision: str,
    causal: bool,
    splits: int | None = None,
    reverse_waves: bool = False,
) -> jaxfp8.AttentionState:
    """Simulates a call, compares it with everything it is compared with, and returns it."""
    function = attention(precision, causal, splits)
    simulated = simulate(function, *arrays, only=ATTENTION, reverse_waves=reverse_waves)
    assert_attention(simulated, expected_attention(arrays, precision, causal), precision)
    assert_alike(simulated, simulate(function, *arrays, only=()), INTERPRET_RELATIVE)
    by_xla = jaxfp8.prefill_attention(*arrays, causal=causal, precision=precision, backend="xla")
    assert_alike(simulated, by_xla, XLA_RELATIVE[precision])
    return simulated


def assert_alike(state: Any, other: Any, relative: float) -> None:
    one, out = (np.asarray(x.out).astype(np.float64) for x in (state, other))
    finite = np.isfinite(out)
    np.testing.assert_array_equal(one[~finite], out[~finite])
    if out[finite].any():
        assert relative_error(one[finite], out[finite]) < relative
    lse = np.asarray(other.lse)
    assert_close(state.lse, lse, lse_bound(lse), "lse")


@pytest.mark.parametrize("name", list(BATCHES))
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_ragged_batches(precision, causal, name):
    rng = np.random.default_rng(len(name))
    check(batch(rng, *BATCHES[name]), precision, causal, reverse_waves=causal)


@pytest.mark.parametrize(("precision", "causal"), [("fp8", False), ("bf16", True)])
def test_many_key_counts(precision, causal):
    """A sequence of one new token, or of three, for each of many numbers of keys."""
    lengths_k = [0, 1, 2, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, *range(193, 257, 3)]
    lengths_q = [1] * (len(lengths_k) - 1) + [3]
    q, k, v = qkv(np.random.default_rng(5), sum(lengths_q), sum(lengths_k), 1)
    check([q, k, v, cu_seqlens(lengths_q), cu_seqlens(lengths_k)], precision, causal)


@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_splits_of_the_keys(precision, splits):
    """Most parts of the short sequences get no key at all. The order of the waves is no matter."""
    arrays = batch(np.random.default_rng(splits), [130, 1, 64, 0], [256, 193, 65, 1])
    forward = check(arrays, precision, splits == 1, splits)
    backward = check(arrays, precision, splits == 1, splits, reverse_waves=True)
    for one, other in zip(forward, backward, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_parts_of_a_split(precision):
    """What each part writes before the merge: the attention over its own keys; zeros and -inf
    where it has none, also where a value of the sequence is NaN."""
    splits, lengths_q, lengths_k = 3, [5, 1, 2], [70, 9, 0]
    config = default_config("gfx942", precision)
    fmt = jaxfp8.E4M3FNUZ if precision == "fp8" else None
    q, k, v = qkv(np.random.default_rng(6), sum(lengths_q), sum(lengths_k), 1)
    v[70, 0, 3] = np.nan  # the second sequence's first key
    cu_q, cu_k = cu_seqlens(lengths_q), cu_seqlens(lengths_k)

    def function(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any) -> Any:
        query = packing.pack_query(q, cu_q, None, precision, None, None, v_head_dim=128)
        context = packing.pack_context(k, v, cu_k, None, None, precision, None, None)
        factor = query.descale * context.k_descale * (192**-0.5 * np.log2(np.e))
        work = pallas_triton_kernel.work_table(cu_q, cu_k, q.shape[0], causal=False, config=config)
        return pallas_triton_kernel.attend(
            query.data.values, context.data.k, context.data.v, context.data.nonfinite, work,
            jnp.stack([factor, context.v_descale]),
            num_tokens=q.shape[0], causal=False, fmt=fmt, config=config, splits=splits,
        )  # fmt: skip

    # The outputs start as NaN.
    out, lse = simulate(function, q, k, v, cu_q, cu_k, only=ATTENTION)
    if fmt:
        q, k, v = (oracle.through_fp8(x, FNUZ) for x in (q, k, v))
    empty = 0
    for rows, begin, end in zip(
        np.split(np.arange(len(q)), cu_q[1:-1]), cu_k[:-1], cu_k[1:], strict=True
    ):
        tiles = -(-(end - begin) // config.block_k)
        edges = [begin + config.block_k * (tiles * i // splits) for i in range(splits)] + [end]
        for split, (first, last) in enumerate(itertools.pairwise(np.minimum(edges, end))):
            part = jaxfp8.AttentionState(
                out[split, rows].astype(ml_dtypes.bfloat16), lse[split][:, rows]
            )
            if first == last:
                empty += 1
                assert not part.out.any()
                assert np.isneginf(part.lse).all()
                continue
            expected = oracle.attention(
                q[rows], k[first:last], v[first:last],
                cu_seqlens([len(rows)]), cu_seqlens([last - first]), causal=False,
            )  # fmt: skip
            assert_attention(part, expected, precision)
    assert empty == (6 if precision == "fp8" else 5)


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_head_dim_128(precision):
    arrays = batch(np.random.default_rng(1), *BATCHES["tile edges"], qk=128)
    check(arrays, precision, True)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_nan_stays_in_the_rows_that_see_it(precision, causal):
    """NaN in one query, one key and one value, each in a sequence of its own."""
    q, k, v, cu_q, cu_k = batch(np.random.default_rng(3), [70, 70, 70, 70], [130, 130, 130, 130])
    q[30, 0, 5] = np.nan
    k[int(cu_k[1]) + 100, 1, 7] = np.nan
    v[int(cu_k[2]) + 90, 0, 3] = np.nan
    check([q, k, v, cu_q, cu_k], precision, causal)


def test_values_that_saturate():
    """Scales far too small: every format limit is reached, infinities saturate."""
    rng = np.random.default_rng(4)
    q, k, v, cu_q, cu_k = batch(rng, *BATCHES["193 to 256 keys"])
    v[17, 0, :4] = np.inf
    v[18, 1, :4] = -np.inf
    scales = jaxfp8.LayerScales(*(np.full(NUM_HEADS, s, np.float32) for s in (0.01, 0.01, 0.004)))
    scale = 0.01

    def function(*arrays: Any, backend: str | None = None) -> Any:
        return jaxfp8.prefill_attention(
            *arrays, causal=False, scales=scales, softmax_scale=scale, backend=backend
        )

    arrays = [q, k, v, cu_q, cu_k]
    simulated = simulate(function, *arrays, only=ATTENTION)
    stored = (oracle.through_fp8(x, FNUZ, d) for x, d in zip((q, k, v), scales, strict=True))
    expected = oracle.attention(*stored, cu_q, cu_k, causal=False, softmax_scale=scale)
    assert_attention(simulated, expected, "fp8")
    assert_alike(simulated, simulate(function, *arrays, only=()), INTERPRET_RELATIVE)
