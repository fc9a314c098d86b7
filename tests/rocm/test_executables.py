# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Whole executables in the simulator: what XLA makes of the parts that are no Pallas kernels."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import jaxfp8
from jaxfp8.ops.attention.pallas_triton_kernel import merge_splits
from tests import oracle
from tests.inputs import cu_seqlens, qkv
from tests.rocm.run_executable import run_executable
from tests.rocm.tools import needs_rocm_compiler
from tests.tolerances import assert_attention, assert_close, lse_bound

pytestmark = needs_rocm_compiler


def state(rng: np.random.Generator, tokens: int, heads: int) -> jaxfp8.AttentionState:
    out = rng.standard_normal((tokens, heads, 128)).astype(ml_dtypes.bfloat16)
    lse = (3 * rng.standard_normal((heads, tokens))).astype(np.float32)
    return jaxfp8.AttentionState(out, lse)


@pytest.mark.parametrize("reverse_waves", [False, True], ids=["forward", "backward"])
def test_merge_states(reverse_waves):
    rng = np.random.default_rng(0)
    a, b = state(rng, 5, 2), state(rng, 5, 2)
    a.lse[0, 1] = -np.inf
    b.lse[0, 2] = -np.inf
    a.lse[1, 3] = b.lse[1, 3] = -np.inf
    a.lse[1, 4] = np.inf
    for one in (a, b):
        one.out[np.isneginf(one.lse.T)] = 0

    merged = run_executable(jaxfp8.merge_states, a, b, reverse_waves=reverse_waves)

    expected = jaxfp8.merge_states(a, b)
    np.testing.assert_allclose(merged.lse, expected.lse, rtol=1e-6, atol=1e-6)
    out, expected_out = (np.asarray(x.out).astype(np.float64) for x in (merged, expected))
    np.testing.assert_allclose(out, expected_out, rtol=2.0**-8, atol=1e-6)
    assert not out[3, 1].any()
    assert np.isneginf(merged.lse[1, 3])


@pytest.mark.parametrize("reverse_waves", [False, True], ids=["forward", "backward"])
def test_merge_of_key_splits(reverse_waves):
    """Parts without keys, which may hold an infinity, and rows that no part has seen."""
    rng = np.random.default_rng(2)
    out = rng.standard_normal((3, 5, 2, 128)).astype(np.float32)
    lse = (3 * rng.standard_normal((3, 2, 5))).astype(np.float32)
    lse[1, 0, :2] = lse[:, 1, 4] = -np.inf
    out[1, :2, 0] = np.inf
    out[:, 4, 1] = 0

    merged, merged_lse = run_executable(merge_splits, out, lse, reverse_waves=reverse_waves)

    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.exp(lse.astype(np.float64))
        expected_lse = np.log(weights.sum(axis=0))
        shares = np.nan_to_num(weights / weights.sum(axis=0)).swapaxes(1, 2)[..., None]
    expected = (np.where(shares == 0, 0, out) * shares).sum(axis=0)
    assert_close(merged_lse, expected_lse, lse_bound(expected_lse), "lse")
    assert_close(merged, expected, 2.0**-8 * np.abs(expected) + 1e-6, "out")


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_a_whole_call(precision):
    """Everything that a call launches: scales, tables of tiles, quantizers, attention, merge."""
    lengths_q, lengths_k = [3, 0, 20], [70, 5, 33]
    q, k, v = qkv(np.random.default_rng(1), sum(lengths_q), sum(lengths_k), 1)
    args = (q, k, v, cu_seqlens(lengths_q), cu_seqlens(lengths_k))

    def function(*arrays: Any) -> Any:
        return jaxfp8.prefill_attention(*arrays, causal=True, precision=precision)

    if precision == "fp8":
        q, k, v = (oracle.through_fp8(x, "float8_e4m3fnuz") for x in (q, k, v))
    expected = oracle.attention(q, k, v, *args[3:], causal=True)
    assert_attention(run_executable(function, *args, detect_races=True), expected, precision)
