# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The Pallas Triton kernels on a GPU, through the public API. Not run where there is none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8.ops.attention.base import AttentionSpec
from jaxfp8.ops.attention.pallas_triton import BACKEND
from jaxfp8.ops.quantize import pallas_triton as packing
from tests import oracle
from tests.inputs import cu_seqlens, qkv, with_tail
from tests.tolerances import assert_attention

TARGET = jaxfp8.detect_target()
NOT_SERVED = BACKEND.unsupported(AttentionSpec("fp8", TARGET.fp8_format, 2, 192, 128), TARGET) or (
    TARGET.fp8_format is None and "no FP8 format"
)
pytestmark = pytest.mark.skipif(bool(NOT_SERVED), reason=f"pallas_triton: {NOT_SERVED}")

BATCHES = [
    ([1, 128, 127, 2], [1, 64, 63, 0]),
    ([129, 3, 100, 0], [65, 193, 31, 33]),
    ([128, 0, 1, 130], [0, 64, 200, 31]),
    ([0, 40, 0, 127], [5, 256, 0, 129]),
    ([200, 0, 0, 0], [0, 0, 0, 0]),
]


def check(q, k, v, cu_q, cu_k, causal, precision):
    """Compares with the oracle on the values that the kernel was given."""
    state = jaxfp8.prefill_attention(
        q, k, v, cu_q, cu_k, causal=causal, precision=precision, backend="pallas_triton"
    )
    operands = q, k, v
    if precision == "fp8":
        operands = (
            oracle.through_fp8(x, TARGET.fp8_format.name, num_tokens=cu[-1])
            for x, cu in zip(operands, (cu_q, cu_k, cu_k), strict=True)
        )
    assert_attention(state, oracle.attention(*operands, cu_q, cu_k, causal=causal), precision)


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_lengths(precision, causal):
    for seed, (lengths_q, lengths_k) in enumerate(BATCHES):
        q, k, v = qkv(np.random.default_rng(seed), sum(lengths_q), sum(lengths_k))
        q, k, v = with_tail(q, 264), with_tail(k, 400), with_tail(v, 400)
        if seed == 1:  # seen by some rows under a causal mask, by all of the sequence without
            k[100, 0, 7], v[120, 1, 9] = np.nan, np.nan
        cu_q, cu_k = cu_seqlens(lengths_q), cu_seqlens(lengths_k)
        check(q, k, v, cu_q, cu_k, causal, precision)


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("heads, qk_size", [(3, 192), (2, 128)])
def test_long_contexts(precision, causal, heads, qk_size):
    """Few rows and many keys, so that the keys are split."""
    lengths_q, lengths_k = [130, 33, 0, 40], [5000, 2000, 100, 400]
    q, k, v = qkv(np.random.default_rng(heads), 203, 7500, heads, qk_size)
    check(q, k, v, cu_seqlens(lengths_q), cu_seqlens(lengths_k), causal, precision)


def test_the_bits_of_packed_values():
    fmt = TARGET.fp8_format
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((300, 3, 192)) * np.exp2(rng.integers(-9, 9, (300, 1, 1)))).astype(
        jnp.bfloat16
    )
    x[7, 1, :3] = [np.inf, -np.inf, np.nan]
    descale = np.asarray([0.37, 1e-3, 11.0], np.float32)
    expected = oracle.quantize(x, descale, fmt.name).view(np.uint8)
    cu = cu_seqlens([300])
    rows = packing.pack_rows(jnp.asarray(x), cu, descale, fmt, block=128)
    rows = np.asarray(rows).view(np.uint8)
    np.testing.assert_array_equal(rows[:, :300].swapaxes(0, 1), expected)
    assert not rows[:, 300:].any()

    v = x[:, :, :128]
    _, packed, nonfinite = packing.pack_keys_and_values(
        jnp.asarray(x), jnp.asarray(v), cu, descale, descale, fmt, block=64
    )
    values = np.asarray(packed).view(np.uint8).swapaxes(2, 3).reshape(3, -1, 128)
    expected = np.where(np.isnan(v.astype(np.float32)), 0, expected[:, :, :128])
    np.testing.assert_array_equal(values[:, :300].swapaxes(0, 1), expected)
    assert np.argwhere(np.isfinite(np.asarray(nonfinite))).tolist() == [[0, 1, 0, 2]]
    assert nonfinite[0, 1, 0, 2] == 7

    np.testing.assert_array_equal(
        packing.amax(jnp.asarray(x), jnp.int32(200)), oracle.amax(x[:200])
    )
    plain = jax.jit(jaxfp8.quantize_per_head, static_argnums=2)(jnp.asarray(x), descale, fmt)
    np.testing.assert_array_equal(
        np.asarray(plain).view(np.uint8), oracle.quantize(x, descale, fmt.name).view(np.uint8)
    )
