# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Every number of keys from 0 to 300, alone and packed among others.

Kernels go wrong at the edges of tiles and of splits, and where they do is not for a test to guess.
"""

from __future__ import annotations

import numpy as np
import pytest

import jaxfp8
from tests import oracle
from tests.inputs import cu_seqlens, qkv
from tests.tolerances import assert_attention

ALL_LENGTHS = range(301)
# Of the interpreted kernels only the lengths around tiles of 16, 32, 64 keys and a few between;
# alone they take a fifth of a second each.
SOME_LENGTHS = sorted(
    {n for edge in (0, 16, 32, 64, 128, 192, 256) for n in (edge, edge + 1, edge - 1)} - {-1}
    | {5, 100, 300}
)


def expected_fp8(q, k, v, cu_q, cu_k, causal):
    q, k, v = (
        oracle.through_fp8(x, "float8_e4m3fnuz", None, int(cu[-1]))
        for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k))
    )
    return oracle.attention(q, k, v, cu_q, cu_k, causal=causal)


def check(q, k, v, cu_q, cu_k, causal, precision, backend):
    state = jaxfp8.prefill_attention(
        q, k, v, cu_q, cu_k, causal=causal, precision=precision, backend=backend
    )
    if precision == "fp8":
        expected = expected_fp8(q, k, v, cu_q, cu_k, causal)
    else:
        expected = oracle.attention(q, k, v, cu_q, cu_k, causal=causal)
    assert_attention(state, expected, precision)


@pytest.mark.parametrize("backend", ["xla", "interpret"])
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize("causal", [False, True])
def test_single_sequences(backend, precision, causal):
    """One sequence in arrays of one size, so that all of it is compiled once; the rest is NaN."""
    q, k, v = qkv(np.random.default_rng(causal), 70, 304, 1)
    for len_k in ALL_LENGTHS if backend == "xla" else SOME_LENGTHS:
        for len_q in (1, 5, 70) if len_k % 7 == 0 else (3,):
            poisoned = []
            for x, length in ((q, len_q), (k, len_k), (v, len_k)):
                poisoned.append(x.copy())
                poisoned[-1][length:] = np.nan
            check(*poisoned, cu_seqlens([len_q]), cu_seqlens([len_k]), causal, precision, backend)


@pytest.mark.parametrize("backend", ["xla", "interpret"])
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_with_others(backend, precision, causal):
    """The same lengths in random order in one batch, each with 0 to 4 queries."""
    rng = np.random.default_rng(2 + causal)
    lengths_k = rng.permutation(ALL_LENGTHS if backend == "xla" else SOME_LENGTHS)
    lengths_q = rng.integers(0, 5, len(lengths_k))
    q, k, v = qkv(rng, int(lengths_q.sum()), int(lengths_k.sum()), 1)
    check(q, k, v, cu_seqlens(lengths_q), cu_seqlens(lengths_k), causal, precision, backend)
