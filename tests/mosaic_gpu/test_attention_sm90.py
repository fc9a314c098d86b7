# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The Hopper backend against float64, on a Hopper GPU.

The arrays have a fixed capacity and only the lengths vary, so that one compiled kernel serves all
mixes of lengths of a case; what lies past the last sequence is NaN.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxfp8
from jaxfp8.ops.attention import pallas_mosaic_gpu_kernel
from tests import oracle
from tests.inputs import cu_seqlens
from tests.tolerances import assert_attention, hopper_fp8_slack, relative_error

pytestmark = pytest.mark.skipif(
    jaxfp8.detect_target().arch != "sm90", reason="needs an NVIDIA Hopper GPU"
)

BACKEND = "pallas_mosaic_gpu"
FMT = "float8_e4m3fn"
TQ, TK = 700, 2100

# (query lengths, key lengths) of five sequences: empty, one, around tiles of 64 and 128 rows and
# blocks of 128, 160 and 192 keys, starts off the copy engine's 8 rows, fewer keys than queries,
# full capacity.
MIXES = [
    ((0, 1, 63, 64, 65), (1, 1, 191, 192, 193)),
    ((1, 127, 128, 129, 0), (0, 1, 31, 33, 700)),
    ((192, 193, 191, 1, 2), (160, 159, 161, 320, 1)),
    ((300, 0, 200, 100, 100), (100, 50, 300, 0, 1650)),
    ((700, 0, 0, 0, 0), (2100, 0, 0, 0, 0)),
    ((0, 0, 0, 0, 0), (0, 0, 0, 0, 0)),
    ((0, 0, 0, 0, 5), (7, 0, 13, 0, 385)),
    ((64, 64, 64, 64, 64), (64, 128, 256, 512, 1024)),
    ((3, 250, 5, 129, 300), (999, 2, 576, 130, 300)),
]


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)


def poisoned(x: np.ndarray, end: int) -> Any:
    """x with NaN past the last sequence."""
    x = x.copy()
    x[end:] = np.nan
    return jnp.asarray(x)


def static_scales(*arrays: np.ndarray) -> tuple[Any, list[np.ndarray]]:
    """Scales from the data, and the float64 values that the FP8 data stand for."""
    descales = [oracle.descale(x, FMT) for x in arrays]
    values = [oracle.through_fp8(x, FMT, d) for x, d in zip(arrays, descales, strict=True)]
    return jaxfp8.LayerScales(*map(jnp.asarray, descales)), values


def check(
    state: Any, values: list[np.ndarray], cu_q: Any, cu_k: Any, causal: bool, precision: str
) -> None:
    """Every element within its bound, and the whole much closer: errors have either sign."""
    expected = oracle.attention(*values, cu_q, cu_k, causal=causal)
    fp8 = precision == "fp8"
    slack = hopper_fp8_slack(*values, cu_q, cu_k, causal=causal) if fp8 else None
    assert_attention(state, expected, precision, slack)
    finite = np.isfinite(expected.lse)
    if not finite.any():
        return
    error = np.abs(np.asarray(state.lse, np.float64)[finite] - expected.lse[finite])
    assert error.mean() < (2e-4 if fp8 else 1e-6)
    out = np.asarray(state.out, np.float64)
    assert relative_error(out, expected.out) < (0.032 if fp8 else 0.004)


def check_mixes(heads: int, dqk: int, causal: bool, precision: Any) -> None:
    """All mixes of lengths, in arrays of one capacity."""
    rng = np.random.default_rng(heads)
    q, k, v = normal(rng, TQ, heads, dqk), normal(rng, TK, heads, dqk), normal(rng, TK, heads, 128)
    scales, values = (None, [q, k, v])
    if precision == "fp8":
        scales, values = static_scales(q, k, v)
    for lengths_q, lengths_k in MIXES:
        cu_q, cu_k = cu_seqlens(lengths_q), cu_seqlens(lengths_k)
        state = jaxfp8.prefill_attention(
            poisoned(q, cu_q[-1]),
            poisoned(k, cu_k[-1]),
            poisoned(v, cu_k[-1]),
            jnp.asarray(cu_q),
            jnp.asarray(cu_k),
            causal=causal,
            precision=precision,
            scales=scales,
            fmt=jaxfp8.E4M3FN if precision == "fp8" else None,
            backend=BACKEND,
        )
        check(state, values, cu_q, cu_k, causal, precision)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dqk", [192, 128])
@pytest.mark.parametrize("heads", [1, 5, 12])
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_lengths(precision, heads, dqk, causal):
    check_mixes(heads, dqk, causal, precision)


def test_tasks_dealt_out_beforehand(monkeypatch):
    """As before JAX 0.11. With 7 heads: what was compiled for other tests takes tasks in turns."""
    monkeypatch.setattr(pallas_mosaic_gpu_kernel, "UPDATES_OPERANDS", False)
    check_mixes(7, 192, True, "fp8")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_nan_stays_in_the_rows_that_see_it(precision, causal):
    rng = np.random.default_rng(0)
    q, k, v = normal(rng, TQ, 2, 192), normal(rng, TK, 2, 192), normal(rng, TK, 2, 128)
    cu_q, cu_k = cu_seqlens((300, 200, 200)), cu_seqlens((600, 250, 400))
    scales, _ = static_scales(q, k, v)
    q[7, 0, 3] = np.nan
    k[500, 1, 5] = np.nan
    v[760, 0, 17] = np.nan
    v[1180, 1, 3] = np.nan
    state = jaxfp8.prefill_attention(
        *map(jnp.asarray, (q, k, v, cu_q, cu_k)),
        causal=causal,
        precision=precision,
        scales=scales if precision == "fp8" else None,
        fmt=jaxfp8.E4M3FN if precision == "fp8" else None,
        backend=BACKEND,
    )
    expected = oracle.attention(q, k, v, cu_q, cu_k, causal=causal)
    out, lse = np.asarray(state.out, np.float64), np.asarray(state.lse)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(expected.out))
    np.testing.assert_array_equal(np.isnan(lse), np.isnan(expected.lse))


def one_sequence(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[Any, oracle.Expected, Any]:
    """Attention with static scales, what it should be, and what the matrix unit may add to that."""
    scales, values = static_scales(q, k, v)
    cu_q, cu_k = cu_seqlens((len(q),)), cu_seqlens((len(k),))
    state = jaxfp8.prefill_attention(
        *map(jnp.asarray, (q, k, v, cu_q, cu_k)),
        causal=False,
        scales=scales,
        fmt=jaxfp8.E4M3FN,
        backend=BACKEND,
    )
    expected = oracle.attention(*values, cu_q, cu_k, causal=False)
    return state, expected, hopper_fp8_slack(*values, cu_q, cu_k, causal=False)


def test_values_of_nonzero_mean_do_not_shrink_with_the_number_of_keys():
    """The FP8 accumulator truncates: summed in it, 16,384 such values come out 18 % short."""
    rng = np.random.default_rng(1)
    keys = 16384
    q, k = normal(rng, 64, 1, 192), normal(rng, keys, 1, 192)
    v = (normal(rng, keys, 1, 128) + 1).astype(ml_dtypes.bfloat16)
    state, expected, _ = one_sequence(q, k, v)
    ratio = np.asarray(state.out, np.float64).mean() / expected.out.mean()
    assert abs(ratio - 1) < 0.004


def test_scores_that_jump_between_blocks():
    """Exponentials use the maxima of the blocks before; where these are low, they are redone."""
    rng = np.random.default_rng(2)
    keys = 2048
    q, k, v = normal(rng, 128, 1, 192), normal(rng, keys, 1, 192), normal(rng, keys, 1, 128)
    k[:900] = (k[:900].astype(np.float32) * 4).astype(ml_dtypes.bfloat16)
    k[900:1200] = (k[900:1200].astype(np.float32) * 0.01).astype(ml_dtypes.bfloat16)
    state, expected, slack = one_sequence(q, k, v)
    assert_attention(state, expected, "fp8", slack)
    assert relative_error(np.asarray(state.out, np.float64), expected.out) < 0.04


def test_lse_at_ordinary_scales_is_good_to_a_thousandth():
    """Segments are merged by it. Q, K and V of variance 1, over many key blocks."""
    rng = np.random.default_rng(5)
    keys = 8192
    q, k, v = normal(rng, 256, 2, 192), normal(rng, keys, 2, 192), normal(rng, keys, 2, 128)
    state, expected, _ = one_sequence(q, k, v)
    assert np.abs(np.asarray(state.lse, np.float64) - expected.lse).max() < 1e-3
