# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Inputs of tests: random, with the outliers of real activations, never zeros."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np


def cu_seqlens(lengths: Sequence[int]) -> np.ndarray:
    """int32 [B + 1] from B lengths."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def qkv(
    rng: np.random.Generator,
    tokens_q: int,
    tokens_k: int,
    num_heads: int = 2,
    qk_head_dim: int = 192,
    v_head_dim: int = 128,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """bfloat16 q, k, v; heads differ in scale, and one column of each has outliers."""

    def draw(tokens: int, head_dim: int) -> np.ndarray:
        x = rng.standard_normal((tokens, num_heads, head_dim))
        x *= rng.uniform(0.3, 3.0, num_heads)[:, None]
        x[:, :, rng.integers(head_dim)] *= 4
        return x.astype(ml_dtypes.bfloat16)

    return draw(tokens_q, qk_head_dim), draw(tokens_k, qk_head_dim), draw(tokens_k, v_head_dim)


CAPACITY_Q, CAPACITY_K, MAX_SEQUENCES = 192, 704, 6


def with_capacity(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, lengths_q: Sequence[int], lengths_k: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v, cu_seqlens_q, cu_seqlens_k of one size for all batches: sequences that are empty at
    the end, and tokens that are NaN past the end. One size compiles once.
    """
    empty = [0] * (MAX_SEQUENCES - len(lengths_q))
    return (
        with_tail(q, CAPACITY_Q),
        with_tail(k, CAPACITY_K),
        with_tail(v, CAPACITY_K),
        cu_seqlens([*lengths_q, *empty]),
        cu_seqlens([*lengths_k, *empty]),
    )


def with_tail(x: np.ndarray, capacity: int) -> np.ndarray:
    """x [T, H, D] in front of NaN, [capacity, H, D]."""
    tail = np.full((capacity - x.shape[0], *x.shape[1:]), np.nan, x.dtype)
    return np.concatenate([x, tail])
