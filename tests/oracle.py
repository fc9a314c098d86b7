# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""What the library is compared with: attention in float64 NumPy, one row at a time, from its
definition and from nothing of the library.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

FP8_MAX = {"float8_e4m3fnuz": 240.0, "float8_e4m3fn": 448.0}


class Expected(NamedTuple):
    """Attention, and what its rounding errors are measured against.

    With p the softmax weights of a row over the keys it sees, and p_max the largest of them:
    """

    out: np.ndarray  # [Tq, H, Dv]: sum of p v
    lse: np.ndarray  # [H, Tq]
    spread: np.ndarray  # [Tq, H, Dv]: sum of p |v|
    reach: np.ndarray  # [Tq, H, Dv]: p_max times the sum of |v|


def attention(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    causal: bool,
    softmax_scale: float | None = None,
) -> Expected:
    """Varlen attention, causal aligned bottom right; zeros and -inf for rows that see no key."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    (tq, num_heads, dqk), dv = q.shape, v.shape[2]
    scale = dqk**-0.5 if softmax_scale is None else softmax_scale
    expected = Expected(
        out=np.zeros((tq, num_heads, dv)),
        lse=np.full((num_heads, tq), -np.inf),
        spread=np.zeros((tq, num_heads, dv)),
        reach=np.zeros((tq, num_heads, dv)),
    )
    cu_seqlens_q, cu_seqlens_k = (np.asarray(cu).tolist() for cu in (cu_seqlens_q, cu_seqlens_k))
    for b in range(len(cu_seqlens_q) - 1):
        first_q, end_q = cu_seqlens_q[b : b + 2]
        first_k, end_k = cu_seqlens_k[b : b + 2]
        len_q, len_k = end_q - first_q, end_k - first_k
        for i in range(len_q):
            visible = min(max(i + 1 + len_k - len_q, 0), len_k) if causal else len_k
            if visible == 0:
                continue
            keys = slice(first_k, first_k + visible)
            row = first_q + i
            with np.errstate(invalid="ignore", over="ignore"):
                scores = scale * np.einsum("hd,khd->hk", q[row], k[keys])
                largest = scores.max(axis=1, keepdims=True)
                weights = np.exp(scores - largest)
                total = weights.sum(axis=1, keepdims=True)
                p = weights / total
                expected.out[row] = np.einsum("hk,khd->hd", p, v[keys])
                expected.lse[:, row] = (largest + np.log(total))[:, 0]
                expected.spread[row] = np.einsum("hk,khd->hd", p, np.abs(v[keys]))
                expected.reach[row] = np.abs(v[keys]).sum(axis=0) / total
    return expected


def amax(x: Any) -> np.ndarray:
    """Largest finite magnitude per head of x [T, H, D]; 0 where there is none."""
    x = np.asarray(x).astype(np.float64)
    return np.where(np.isfinite(x), np.abs(x), 0).max(axis=(0, 2), initial=0)


def descale(x: Any, fmt_name: str, margin: float = 1.0) -> np.ndarray:
    """float32 [H], in the float32 arithmetic of the contract."""
    scaled = np.float32(amax(x)) * np.float32(margin) / np.float32(FP8_MAX[fmt_name])
    return np.maximum(scaled, np.float32(1e-12)).astype(np.float32)


def quantize(x: Any, descale: Any, fmt_name: str) -> np.ndarray:
    """x / descale, clipped, rounded to nearest even, in the format."""
    limit = np.float32(FP8_MAX[fmt_name])
    scaled = np.asarray(x).astype(np.float32) / np.asarray(descale, np.float32)[:, None]
    return np.clip(scaled, -limit, limit).astype(getattr(ml_dtypes, fmt_name))


def dequantize(stored: Any, descale: Any) -> np.ndarray:
    """The float64 values that FP8 data stand for."""
    return np.asarray(stored).astype(np.float64) * np.asarray(descale, np.float64)[:, None]


def through_fp8(x: Any, fmt_name: str, descale_: Any = None, num_tokens: int | None = None) -> Any:
    """x as FP8 holds it; a dynamic scale is taken over the first num_tokens rows."""
    if descale_ is None:
        descale_ = descale(np.asarray(x)[:num_tokens], fmt_name)
    return dequantize(quantize(x, descale_, fmt_name), descale_)
