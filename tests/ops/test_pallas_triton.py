# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The Pallas Triton attention kernel, in interpret mode, with the tiles that gfx942 runs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8.ops.attention.base import AttentionSpec, QuantizedContext, QuantizedQuery
from jaxfp8.ops.attention.heuristics import default_config
from jaxfp8.ops.attention.pallas_triton import BACKEND, PallasTritonBackend
from jaxfp8.targets import target_of_arch
from tests import oracle
from tests.inputs import cu_seqlens, qkv, with_tail
from tests.tolerances import assert_attention

GFX942 = {
    precision: PallasTritonBackend("interpret", True, default_config("gfx942", precision))
    for precision in ("fp8", "bf16")
}


def run(backend, q, k, v, cu_q, cu_k, *, causal, fmt, softmax_scale, descales=None):
    """Packs and attends. Returns the state."""
    precision = "fp8" if fmt else "bf16"
    heads, qk_size, v_size = q.shape[1], q.shape[2], v.shape[2]
    spec = AttentionSpec(precision, fmt, heads, qk_size, v_size)
    ones = np.ones(heads, np.float32)
    descales = descales or (ones, ones, ones)

    @jax.jit
    def call(q, k, v, cu_q, cu_k, q_descale, k_descale, v_descale):
        query = QuantizedQuery(
            backend.pack_query(q, cu_q, q_descale, spec),
            cu_q, q_descale, backend.name, spec, q.shape[0],
        )  # fmt: skip
        context = QuantizedContext(
            backend.pack_context(k, v, cu_k, k_descale, v_descale, spec),
            cu_k, k_descale, v_descale, backend.name, spec, k.shape[0],
        )  # fmt: skip
        return backend.attend(query, context, causal=causal, softmax_scale=softmax_scale)

    return call(q, k, v, cu_q, cu_k, *descales)


def check(backend, q, k, v, lengths_q, lengths_k, *, causal, fmt, softmax_scale=192**-0.5):
    """Compares with the oracle on the values that the kernel was given."""
    cu_q, cu_k = cu_seqlens(lengths_q), cu_seqlens(lengths_k)
    descales = None
    operands = q, k, v
    if fmt:
        ends = (cu_q[-1], cu_k[-1], cu_k[-1])
        descales = tuple(
            oracle.descale(x[:end], fmt.name) for x, end in zip(operands, ends, strict=True)
        )
        operands = (
            oracle.through_fp8(x, fmt.name, d) for x, d in zip((q, k, v), descales, strict=True)
        )
    state = run(
        backend, q, k, v, cu_q, cu_k,
        causal=causal, fmt=fmt, softmax_scale=softmax_scale, descales=descales,
    )  # fmt: skip
    expected = oracle.attention(*operands, cu_q, cu_k, causal=causal, softmax_scale=softmax_scale)
    assert_attention(state, expected, "fp8" if fmt else "bf16")
    return state


FMT = {"fp8": jaxfp8.E4M3FNUZ, "bf16": None}


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "lengths_q, lengths_k",
    [
        # One sequence at a time around the edges of the tiles: 128 rows, 64 or 32 keys.
        ([1], [1]),
        ([128], [64]),
        ([127], [63]),
        ([129], [65]),
        ([2], [0]),
        ([3], [193]),
        # Mixes: empty on either side, Lk < Lq, Lk much over Lq.
        ([128, 0, 1, 130], [0, 64, 200, 31]),
        ([0, 40, 0, 127], [5, 256, 0, 129]),
    ],
)
def test_lengths(precision, causal, lengths_q, lengths_k):
    rng = np.random.default_rng(sum(lengths_q) + causal)
    q, k, v = (with_tail(x, x.shape[0] + 3) for x in qkv(rng, sum(lengths_q), sum(lengths_k)))
    check(GFX942[precision], q, k, v, lengths_q, lengths_k, causal=causal, fmt=FMT[precision])


@pytest.mark.parametrize("heads, qk_size", [(1, 192), (5, 128), (12, 192)])
@pytest.mark.parametrize("fmt", [jaxfp8.E4M3FNUZ, jaxfp8.E4M3FN, None], ids=str)
def test_heads_dims_and_formats(heads, qk_size, fmt):
    rng = np.random.default_rng(heads)
    q, k, v = qkv(rng, 30, 90, heads, qk_size)
    backend = GFX942["fp8" if fmt else "bf16"]
    check(backend, q, k, v, [10, 20], [70, 20], causal=True, fmt=fmt)


@pytest.mark.parametrize("softmax_scale", [0.0, -0.07, 1.0])
def test_any_softmax_scale(softmax_scale):
    rng = np.random.default_rng(6)
    q, k, v = qkv(rng, 20, 100)
    for precision, backend in GFX942.items():
        check(
            backend, q, k, v, [20], [100],
            causal=True, fmt=FMT[precision], softmax_scale=softmax_scale,
        )  # fmt: skip


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_nan_reaches_the_rows_that_see_it_and_no_other(precision, causal, operand):
    rng = np.random.default_rng(7)
    lengths_q, lengths_k = [100, 60], [150, 70]
    q, k, v = qkv(rng, 160, 220)
    arrays = {"q": q, "k": k, "v": v}
    clean = check(
        GFX942[precision], q, k, v, lengths_q, lengths_k, causal=causal, fmt=FMT[precision]
    )
    dirty = dict(arrays)
    dirty[operand] = arrays[operand].copy()
    dirty[operand][90, 1, 5] = np.nan  # of the first sequence: row 90, or the key 90 of 150
    state = check(
        GFX942[precision], dirty["q"], dirty["k"], dirty["v"], lengths_q, lengths_k,
        causal=causal, fmt=FMT[precision],
    )  # fmt: skip
    expected = np.zeros((160, 2, 128), bool)
    first_row = {"q": 90, "k": 40, "v": 40}[operand] if causal or operand == "q" else 0
    last_row = 91 if operand == "q" else 100
    expected[first_row:last_row, 1, 5 if operand == "v" else slice(None)] = True
    out, reference = (np.asarray(s.out, np.float32) for s in (state, clean))
    np.testing.assert_array_equal(np.isnan(out), expected)
    np.testing.assert_array_equal(out[~expected], reference[~expected])


def test_infinities_of_bfloat16_values():
    rng = np.random.default_rng(8)
    q, k, v = qkv(rng, 50, 50)
    v[20, 0, 3] = np.inf
    v[30, 0, 3] = -np.inf
    v[10, 1, 7] = -np.inf
    out = np.asarray(
        check(GFX942["bf16"], q, k, v, [50], [50], causal=True, fmt=None).out, np.float32
    )
    assert np.isfinite(out[:20, 0, 3]).all()
    assert (out[20:30, 0, 3] == np.inf).all()
    assert np.isnan(out[30:, 0, 3]).all()
    assert (out[10:, 1, 7] == -np.inf).all()


def test_nothing_is_compiled_again_for_other_cu_seqlens():
    rng = np.random.default_rng(9)
    q, k, v = qkv(rng, 200, 200, 1)
    backend = GFX942["fp8"]
    spec = AttentionSpec("fp8", jaxfp8.E4M3FNUZ, 1, 192, 128)
    traces = []

    @jax.jit
    def call(q, k, v, cu_q, cu_k):
        traces.append(1)
        ones = jnp.ones(1)
        query = QuantizedQuery(
            backend.pack_query(q, cu_q, ones, spec), cu_q, ones, backend.name, spec, 200
        )
        context = QuantizedContext(
            backend.pack_context(k, v, cu_k, ones, ones, spec),
            cu_k, ones, ones, backend.name, spec, 200,
        )  # fmt: skip
        return backend.attend(query, context, causal=True, softmax_scale=0.07)

    for lengths_q, lengths_k in (([200, 0, 0], [1, 150, 0]), ([3, 70, 9], [65, 64, 63])):
        call(q, k, v, cu_seqlens(lengths_q), cu_seqlens(lengths_k))
    assert len(traces) == 1


@pytest.mark.parametrize("lengths_q, lengths_k", [([], []), ([0, 0], [5, 0]), ([3], [0])])
def test_no_rows_or_no_keys(lengths_q, lengths_k):
    q, k, v = qkv(np.random.default_rng(10), sum(lengths_q) + 2, sum(lengths_k))
    state = run(
        GFX942["fp8"], q, k, v, cu_seqlens(lengths_q), cu_seqlens(lengths_k),
        causal=False, fmt=jaxfp8.E4M3FNUZ, softmax_scale=0.07,
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
