# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The Hopper backend against float64, on a Hopper GPU.

The arrays have a fixed capacity and only the lengths vary, so that one compiled kernel serves all
mixes of lengths of a case; what lies past the last sequence is NaN.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8.ops.quantize import reference as quantize
from tests.mosaic_gpu import float64

on_hopper = pytest.mark.skipif(
    jaxfp8.detect_target().arch != "sm90", reason="needs an NVIDIA Hopper GPU"
)

TQ, TK = 700, 2100

# (query lengths, key lengths) of five sequences: empty, one, around tiles of 64, 128 and 192 rows
# and blocks of 128, 160 and 192 keys, fewer keys than queries, full capacity.
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


def cu(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def poisoned(x, end):
    x = np.array(x)
    x[end:] = np.nan
    return jnp.asarray(x)


def check(out, lse, want_out, want_lse, tolerance, lse_tolerance=1e-3):
    out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(want_out))
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    assert not np.any(out[np.isneginf(want_lse).T])
    finite = np.isfinite(want_lse)
    if finite.any():
        assert np.abs(lse - want_lse)[finite].max() < lse_tolerance
        assert float64.rel_error(out, want_out) < tolerance


@on_hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dqk", [192, 128])
@pytest.mark.parametrize("heads", [1, 5, 12])
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_lengths(precision, heads, dqk, causal):
    rng = np.random.default_rng(heads)
    q, k, v = (
        rng.standard_normal(s, np.float32).astype(jnp.bfloat16)
        for s in ((TQ, heads, dqk), (TK, heads, dqk), (TK, heads, 128))
    )
    amaxes = [np.abs(np.asarray(x, np.float32)).max(axis=(0, 2)) for x in (q, k, v)]
    scales = None
    dequantized = [np.asarray(x, np.float64) for x in (q, k, v)]
    if precision == "fp8":
        scales = jaxfp8.LayerScales(
            *(quantize.descale_from_amax(jnp.asarray(a), jaxfp8.E4M3FN) for a in amaxes)
        )
        dequantized = [
            np.asarray(quantize.quantize_per_head(jnp.asarray(x), d, jaxfp8.E4M3FN), np.float64)
            * np.asarray(d, np.float64)[None, :, None]
            for x, d in zip((q, k, v), (scales.q, scales.k, scales.v), strict=True)
        ]
    for lengths_q, lengths_k in MIXES:
        cu_q, cu_k = cu(lengths_q), cu(lengths_k)
        out, lse = jaxfp8.prefill_attention(
            poisoned(q, cu_q[-1]),
            poisoned(k, cu_k[-1]),
            poisoned(v, cu_k[-1]),
            jnp.asarray(cu_q),
            jnp.asarray(cu_k),
            causal=causal,
            precision=precision,
            scales=scales,
            backend="pallas_mosaic_gpu",
        )
        want = float64.attention(*dequantized, cu_q, cu_k, causal, dqk**-0.5)
        check(out, lse, *want, 0.032 if precision == "fp8" else 0.004)


@on_hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_nan_stays_in_the_rows_that_see_it(precision, causal):
    rng = np.random.default_rng(0)
    heads = 2
    q, k, v = (
        rng.standard_normal(s, np.float32).astype(jnp.bfloat16)
        for s in ((TQ, heads, 192), (TK, heads, 192), (TK, heads, 128))
    )
    cu_q, cu_k = cu((300, 200, 200)), cu((600, 250, 400))
    q[7, 0, 3] = np.nan
    q[450, 1, 100] = np.inf
    k[500, 1, 5] = np.nan
    v[760, 0, 17] = np.nan
    v[1180, 1, 3] = np.nan
    v[20, 1, 9] = -np.inf
    out, lse = jaxfp8.prefill_attention(
        *map(jnp.asarray, (q, k, v, cu_q, cu_k)),
        causal=causal,
        precision=precision,
        scales=jaxfp8.LayerScales(*[jnp.full(heads, 0.01)] * 3) if precision == "fp8" else None,
        backend="pallas_mosaic_gpu",
    )
    clean = [np.nan_to_num(np.asarray(x, np.float64), nan=0, posinf=4, neginf=-4) for x in (q, k)]
    values = np.asarray(v, np.float64)
    values[np.isinf(values)] = -4
    want_out, want_lse = float64.attention(*clean, values, cu_q, cu_k, causal, 192**-0.5)
    want_out[7, 0], want_lse[0, 7] = np.nan, np.nan
    rows = np.arange(300)
    sees = (500 <= rows + 600 - 300) if causal else rows >= 0
    want_out[:300, 1][sees], want_lse[1, :300][sees] = np.nan, np.nan
    np.testing.assert_array_equal(np.isnan(np.asarray(out, np.float32)), np.isnan(want_out))
    np.testing.assert_array_equal(np.isnan(lse), np.isnan(want_lse))
