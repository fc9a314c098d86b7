# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""merge_states against float64, and at every combination of infinities."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxfp8

T, H, D = 5, 3, 8
LSE = st.one_of(st.sampled_from([-np.inf, np.inf, 0.0]), st.floats(-1e4, 1e4, width=32))


def state(rng, lse):
    out = rng.standard_normal((T, H, D)).astype(ml_dtypes.bfloat16)
    return jaxfp8.AttentionState(jnp.asarray(out), jnp.asarray(lse, jnp.float32))


def merged_float64(a, b):
    """The definition: each output weighted by exp(lse), +inf counting as -inf."""
    lse = [np.where(np.isposinf(s.lse), -np.inf, np.asarray(s.lse, np.float64)) for s in (a, b)]
    total = np.logaddexp(*lse)
    with np.errstate(invalid="ignore"):
        weights = [np.where(np.isneginf(x), 0, np.exp(x - total)) for x in lse]
    out = sum(
        w.T[:, :, None] * np.asarray(s.out, np.float64)
        for w, s in zip(weights, (a, b), strict=True)
    )
    return out, total


def check(a, b):
    merged = jaxfp8.merge_states(a, b)
    out, lse = merged_float64(a, b)
    np.testing.assert_allclose(merged.lse, lse, rtol=2**-20, atol=2**-20)
    # Half a unit of bfloat16, and float32 weights.
    np.testing.assert_allclose(
        np.asarray(merged.out, np.float64), out, rtol=2**-8 + 2**-12, atol=2**-12
    )
    return merged


@settings(deadline=None, max_examples=60)
@given(st.lists(LSE, min_size=2 * T * H, max_size=2 * T * H), st.integers(0, 100))
def test_against_float64(values, seed):
    rng = np.random.default_rng(seed)
    lse = np.reshape(values, (2, H, T))
    a, b = state(rng, lse[0]), state(rng, lse[1])
    check(a, b)
    forth, back = jaxfp8.merge_states(a, b), jaxfp8.merge_states(b, a)
    np.testing.assert_array_equal(forth.out, back.out)
    np.testing.assert_array_equal(forth.lse, back.lse)


@pytest.mark.parametrize("lse_a, lse_b", itertools.product([-np.inf, np.inf, 2.5], repeat=2))
def test_infinities(lse_a, lse_b):
    rng = np.random.default_rng(0)
    a, b = (state(rng, np.full((H, T), lse)) for lse in (lse_a, lse_b))
    merged = check(a, b)
    if np.isinf(lse_a) and np.isinf(lse_b):
        assert not np.asarray(merged.out).any()
        assert np.isneginf(merged.lse).all()
    elif np.isinf(lse_b):
        np.testing.assert_array_equal(merged.out, a.out)
        np.testing.assert_array_equal(merged.lse, a.lse)
    elif np.isinf(lse_a):
        np.testing.assert_array_equal(merged.out, b.out)


def test_an_empty_state_may_hold_anything():
    rng = np.random.default_rng(1)
    full = state(rng, rng.standard_normal((H, T)))
    for lse in (-np.inf, np.inf):
        empty = jaxfp8.AttentionState(
            jnp.full((T, H, D), jnp.nan, jnp.bfloat16), jnp.full((H, T), lse, jnp.float32)
        )
        np.testing.assert_array_equal(jaxfp8.merge_states(full, empty).out, full.out)
        np.testing.assert_array_equal(jaxfp8.merge_states(empty, full).out, full.out)


def test_nan_lse_makes_its_row_nan_and_no_other():
    rng = np.random.default_rng(2)
    lse = rng.standard_normal((H, T))
    lse[1, 3] = np.nan
    merged = jaxfp8.merge_states(state(rng, lse), state(rng, np.zeros((H, T))))
    nan = np.isnan(np.asarray(merged.out, np.float32))
    assert nan[3, 1].all()
    assert nan.sum() == D


def test_float32_outputs_stay_float32():
    rng = np.random.default_rng(3)
    a = state(rng, rng.standard_normal((H, T)))
    a = a._replace(out=a.out.astype(jnp.float32))
    assert jaxfp8.merge_states(a, a).out.dtype == jnp.float32
