# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The Pallas Triton attention kernel, in interpret mode, with the tiles that gfx942 runs."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

import jaxfp8
from jaxfp8.ops.attention.base import AttentionSpec, QuantizedContext, QuantizedQuery
from jaxfp8.ops.attention.heuristics import Device, default_config
from jaxfp8.ops.attention.pallas_triton import BACKEND, PallasTritonBackend
from jaxfp8.targets import target_of_arch
from tests import oracle
from tests.inputs import cu_seqlens, qkv, with_tail
from tests.tolerances import assert_attention

GFX942 = {
    precision: PallasTritonBackend("interpret", True, default_config("gfx942", precision))
    for precision in ("fp8", "bf16")
}
FMT = {"fp8": jaxfp8.E4M3FNUZ, "bf16": None}


@functools.partial(jax.jit, static_argnames=("backend", "spec", "causal", "softmax_scale"))
def call(q, k, v, cu_q, cu_k, descales, *, backend, spec, causal, softmax_scale):
    """Packs and attends."""
    query = QuantizedQuery(
        backend.pack_query(q, cu_q, descales[0], spec),
        cu_q, descales[0], backend.name, spec, q.shape[0],
    )  # fmt: skip
    context = QuantizedContext(
        backend.pack_context(k, v, cu_k, *descales[1:], spec),
        cu_k, *descales[1:], backend.name, spec, k.shape[0],
    )  # fmt: skip
    return backend.attend(query, context, causal=causal, softmax_scale=softmax_scale)


def check(backend, q, k, v, lengths_q, lengths_k, *, causal, fmt, softmax_scale=192**-0.5):
    """Compares with the oracle on the values that the kernel was given."""
    cu_q, cu_k = cu_seqlens(lengths_q), cu_seqlens(lengths_k)
    heads, qk_size, v_size = q.shape[1], q.shape[2], v.shape[2]
    operands, descales = (q, k, v), (np.ones(heads, np.float32),) * 3
    if fmt:
        ends = (cu_q[-1], cu_k[-1], cu_k[-1])
        descales = tuple(
            oracle.descale(x[:end], fmt.name) for x, end in zip(operands, ends, strict=True)
        )
        operands = (
            oracle.through_fp8(x, fmt.name, d) for x, d in zip((q, k, v), descales, strict=True)
        )
    precision = "fp8" if fmt else "bf16"
    state = call(
        q, k, v, cu_q, cu_k, descales,
        backend=backend, spec=AttentionSpec(precision, fmt, heads, qk_size, v_size),
        causal=causal, softmax_scale=softmax_scale,
    )  # fmt: skip
    expected = oracle.attention(*operands, cu_q, cu_k, causal=causal, softmax_scale=softmax_scale)
    assert_attention(state, expected, precision)
    return state


# Each batch has four sequences within 264 rows and 400 keys, so that one compilation serves all.
BATCHES = [
    # The edges of the tiles, 128 rows and 64 or 32 keys.
    ([1, 128, 127, 2], [1, 64, 63, 0]),
    ([129, 3, 100, 0], [65, 193, 31, 33]),
    # Empty on either side, Lk < Lq, Lk much over Lq.
    ([128, 0, 1, 130], [0, 64, 200, 31]),
    ([0, 40, 0, 127], [5, 256, 0, 129]),
    ([0, 0, 0, 0], [100, 0, 0, 0]),
    ([200, 0, 0, 0], [0, 0, 0, 0]),
]


def batch_inputs(lengths_q, lengths_k, seed):
    """q, k, v that end in NaN past the last sequence."""
    q, k, v = qkv(np.random.default_rng(seed), sum(lengths_q), sum(lengths_k))
    return with_tail(q, 264), with_tail(k, 400), with_tail(v, 400)


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_lengths(precision, causal):
    for seed, (lengths_q, lengths_k) in enumerate(BATCHES):
        check(
            GFX942[precision], *batch_inputs(lengths_q, lengths_k, seed), lengths_q, lengths_k,
            causal=causal, fmt=FMT[precision],
        )  # fmt: skip


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_splits(causal):
    config = dataclasses.replace(default_config("gfx942", "fp8"), splits=3)
    backend = PallasTritonBackend("interpret", True, config, Device(slots=1, dies=8))
    for seed, (lengths_q, lengths_k) in enumerate(BATCHES):
        check(
            backend, *batch_inputs(lengths_q, lengths_k, seed), lengths_q, lengths_k,
            causal=causal, fmt=jaxfp8.E4M3FNUZ,
        )  # fmt: skip


@pytest.mark.parametrize(
    "heads, qk_size, fmt",
    [
        (1, 192, jaxfp8.E4M3FNUZ),
        (12, 128, jaxfp8.E4M3FNUZ),
        (5, 192, jaxfp8.E4M3FN),
        (12, 128, None),
    ],
)
def test_heads_dims_and_formats(heads, qk_size, fmt):
    rng = np.random.default_rng(heads)
    q, k, v = qkv(rng, 30, 90, heads, qk_size)
    backend = GFX942["fp8" if fmt else "bf16"]
    check(backend, q, k, v, [10, 20], [70, 20], causal=True, fmt=fmt)


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_nan_reaches_the_rows_that_see_it_and_no_other(precision, causal, operand):
    lengths_q, lengths_k = [100, 60, 0, 0], [150, 70, 0, 0]

    def attend(operands):
        return check(
            GFX942[precision], *operands.values(), lengths_q, lengths_k,
            causal=causal, fmt=FMT[precision],
        )  # fmt: skip

    clean = dict(zip("qkv", batch_inputs(lengths_q, lengths_k, 7), strict=True))
    dirty = dict(clean, **{operand: clean[operand].copy()})
    dirty[operand][90, 1, 5] = np.nan  # of the first sequence: its row 90, or key 90 of 150
    expected = np.zeros((264, 2, 128), bool)
    first_row = {"q": 90, "k": 40, "v": 40}[operand] if causal or operand == "q" else 0
    last_row = 91 if operand == "q" else 100
    expected[first_row:last_row, 1, 5 if operand == "v" else slice(None)] = True
    out, reference = (np.asarray(attend(x).out, np.float32) for x in (dirty, clean))
    np.testing.assert_array_equal(np.isnan(out), expected)
    np.testing.assert_array_equal(out[~expected], reference[~expected])


def test_infinities_of_bfloat16_values():
    lengths = [50, 0, 0, 0]
    q, k, v = batch_inputs(lengths, lengths, 8)
    v[20, 0, 3] = np.inf
    v[30, 0, 3] = -np.inf
    v[10, 1, 7] = -np.inf
    with np.errstate(invalid="ignore"):
        state = check(GFX942["bf16"], q, k, v, lengths, lengths, causal=True, fmt=None)
    out = np.asarray(state.out, np.float32)[:50]
    assert np.isfinite(out[:20, 0, 3]).all()
    assert (out[20:30, 0, 3] == np.inf).all()
    assert np.isnan(out[30:, 0, 3]).all()
    assert (out[10:, 1, 7] == -np.inf).all()


def test_nothing_is_compiled_again_for_other_cu_seqlens():
    lengths = BATCHES[0]
    check(GFX942["fp8"], *batch_inputs(*lengths, 0), *lengths, causal=True, fmt=jaxfp8.E4M3FNUZ)
    compiled = call._cache_size()
    for lengths in BATCHES[1:3]:
        check(GFX942["fp8"], *batch_inputs(*lengths, 1), *lengths, causal=True, fmt=jaxfp8.E4M3FNUZ)
    assert call._cache_size() == compiled


@pytest.mark.parametrize("lengths_q, lengths_k", [([], []), ([0, 0], [5, 0])])
def test_no_rows_or_no_keys(lengths_q, lengths_k):
    q, k, v = qkv(np.random.default_rng(10), sum(lengths_q) + 200, sum(lengths_k) + 100)
    ones = np.ones(2, np.float32)
    state = call(
        q, k, v, cu_seqlens(lengths_q), cu_seqlens(lengths_k), (ones, ones, ones),
        backend=GFX942["fp8"], spec=AttentionSpec("fp8", jaxfp8.E4M3FNUZ, 2, 192, 128),
        causal=False, softmax_scale=0.07,
    )  # fmt: skip
    assert not np.asarray(state.out, np.float32).any()
    assert (np.asarray(state.lse) == -np.inf).all()


def test_what_is_not_supported_is_said():
    spec = AttentionSpec("fp8", jaxfp8.E4M3FNUZ, 12, 192, 128)
    bf16 = dataclasses.replace(spec, precision="bf16", fmt=None)
    fn = dataclasses.replace(spec, fmt=jaxfp8.E4M3FN)

    def reason(spec, arch):
        return BACKEND.unsupported(spec, target_of_arch(arch))

    assert reason(spec, "gfx942") is None
    assert reason(bf16, "gfx942") is None
    assert reason(fn, "sm90") is None
    assert reason(dataclasses.replace(spec, v_head_dim=None), "gfx942") is None
    assert "computes in float8_e4m3fnuz" in reason(fn, "gfx942")
    assert "computes in float8_e4m3fn" in reason(spec, "sm90")
    assert "not on sm80" in reason(bf16, "sm80")
    assert "not on gfx90a" in reason(bf16, "gfx90a")
    assert "backend='interpret'" in reason(spec, "cpu")
    odd = dataclasses.replace(spec, v_head_dim=64)
    assert "not (192, 64)" in reason(odd, "gfx942")
    assert GFX942["fp8"].unsupported(spec, target_of_arch("cpu")) is None
    assert "not (192, 64)" in GFX942["fp8"].unsupported(odd, target_of_arch("cpu"))
