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


def poison(x: np.ndarray, from_token: int) -> np.ndarray:
    """x with NaN in every row from `from_token` on: what lies past cu_seqlens[-1]."""
    x = x.copy()
    x[from_token:] = np.nan
    return x
