# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The quantizers give the bits that NumPy with ml_dtypes gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jaxfp8
from tests import oracle
from tests.inputs import qkv

FORMATS = [jaxfp8.E4M3FNUZ, jaxfp8.E4M3FN]
SHAPE = (6, 3, 8)
BF16_BITS = hnp.arrays(np.uint16, SHAPE, elements=st.integers(0, 2**16 - 1))


def same_bits(actual, expected):
    np.testing.assert_array_equal(
        np.asarray(actual).view(np.uint8), np.asarray(expected).view(np.uint8)
    )


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@settings(deadline=None, max_examples=100)
@given(BF16_BITS, st.lists(st.floats(2.0**-40, 2.0**40, width=32), min_size=3, max_size=3))
def test_any_bits_any_scale(fmt, bits, descale):
    """Including NaN, infinities, subnormals and both zeros."""
    x, descale = bits.view(ml_dtypes.bfloat16), np.float32(descale)
    actual = np.asarray(jaxfp8.quantize_per_head(x, descale, fmt))
    with np.errstate(over="ignore", invalid="ignore"):
        expected = oracle.quantize(x, descale, fmt.name)
    nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(actual.astype(np.float32)), nan)
    same_bits(
        np.where(nan, 0, actual).astype(fmt.dtype), np.where(nan, 0, expected).astype(fmt.dtype)
    )


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("under_jit", [False, True])
def test_dynamic(fmt, under_jit):
    x = qkv(np.random.default_rng(0), 500, 1, 12)[0]
    quantize = lambda x: jaxfp8.dynamic_quantize_per_head(x, fmt)  # noqa: E731
    stored, descale = (jax.jit(quantize) if under_jit else quantize)(x)
    np.testing.assert_array_equal(descale, oracle.descale(x, fmt.name))
    same_bits(stored, oracle.quantize(x, descale, fmt.name))
    assert np.abs(np.asarray(stored, np.float32)).max(axis=(0, 2)) == pytest.approx(fmt.max)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_every_tie_rounds_to_even(fmt):
    values = np.arange(256, dtype=np.uint8).view(fmt.dtype).astype(np.float32)
    values = np.sort(values[np.isfinite(values)])
    ties = ((values[1:] + values[:-1]) / 2).reshape(-1, 1, 1)
    stored = jaxfp8.quantize_per_head(ties, np.float32([1]), fmt)
    same_bits(stored, ties.astype(fmt.dtype))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_saturation(fmt):
    x = np.array([fmt.max, fmt.max + 7, 1e30, np.inf, -1e30, -np.inf, np.nan], np.float32)
    stored = jaxfp8.quantize_per_head(x.reshape(-1, 1, 1), np.float32([1]), fmt)
    values = np.asarray(stored, np.float32).ravel()
    np.testing.assert_array_equal(values, fmt.max * np.float32([1, 1, 1, 1, -1, -1, np.nan]))


def test_amax():
    x = np.array([[[1, -3], [0, 0]], [[np.inf, 2], [np.nan, -0.5]]], np.float32)
    np.testing.assert_array_equal(jaxfp8.per_head_amax(x), [3, 0.5])
    assert jaxfp8.per_head_amax(x).dtype == jnp.float32
    np.testing.assert_array_equal(jaxfp8.per_head_amax(x[:0]), [0, 0])


@settings(deadline=None, max_examples=100)
@given(BF16_BITS)
def test_amax_of_any_bits(bits):
    x = bits.view(ml_dtypes.bfloat16)
    # XLA may flush subnormals, which are far below the smallest descale, to zero.
    np.testing.assert_allclose(
        jaxfp8.per_head_amax(x), oracle.amax(x), rtol=0, atol=np.finfo(np.float32).tiny
    )


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("margin", [1.0, 1.25, 3])
def test_descale(fmt, margin):
    amax = np.float32([0, 1e-20, 1, 3.7, 1e30])
    expected = np.maximum(amax * np.float32(margin) / np.float32(fmt.max), np.float32(1e-12))
    np.testing.assert_array_equal(jaxfp8.descale_from_amax(amax, fmt, margin=margin), expected)


def test_no_tokens():
    x = jnp.zeros((0, 3, 8), jnp.bfloat16)
    stored, descale = jaxfp8.dynamic_quantize_per_head(x, jaxfp8.E4M3FNUZ)
    assert stored.shape == (0, 3, 8)
    np.testing.assert_array_equal(descale, np.full(3, 1e-12, np.float32))


def test_head_slice():
    x = qkv(np.random.default_rng(1), 40, 1, 3)[0]
    part = jaxfp8.HeadSlice(x, 128, 64)
    np.testing.assert_array_equal(jaxfp8.per_head_amax(part), oracle.amax(x[:, :, 128:]))
    stored, descale = jaxfp8.dynamic_quantize_per_head(part, jaxfp8.E4M3FN)
    same_bits(stored, oracle.quantize(x[:, :, 128:], descale, "float8_e4m3fn"))
