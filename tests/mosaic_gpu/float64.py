# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Attention in float64 NumPy, and data to compare with."""

from __future__ import annotations

import numpy as np


def attention(q, k, v, cu_q, cu_k, causal, softmax_scale):
    """(out [Tq, H, Dv], lse [H, Tq]) of token-major arrays, bottom-right causal."""
    tq, heads, _ = q.shape
    out = np.zeros((tq, heads, v.shape[2]))
    lse = np.full((heads, tq), -np.inf)
    for b in range(len(cu_q) - 1):
        qs, ks = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        lq, lk = cu_q[b + 1] - cu_q[b], cu_k[b + 1] - cu_k[b]
        if lq == 0 or lk == 0:
            continue
        seen = np.ones((lq, lk), bool)
        if causal:
            seen = np.arange(lk)[None] <= np.arange(lq)[:, None] + lk - lq
        for h in range(heads):
            s = q[qs, h].astype(np.float64) @ k[ks, h].astype(np.float64).T * softmax_scale
            s = np.where(seen, s, -np.inf)
            top = s.max(axis=1, keepdims=True)
            top = np.where(np.isneginf(top), 0.0, top)
            p = np.exp(s - top)
            total = p.sum(axis=1, keepdims=True)
            # A key that a row does not see has no say, NaN or not.
            values = np.nan_to_num(v[ks, h].astype(np.float64))
            mean = p @ values / np.where(total == 0, 1.0, total)
            nan = np.isnan(v[ks, h].astype(np.float64))
            mean[(seen.astype(np.float64) @ nan) > 0] = np.nan
            out[qs, h] = mean
            with np.errstate(divide="ignore"):
                lse[h, qs] = (top + np.log(total))[:, 0]
    return out, lse


def rel_error(got, want):
    """Relative error in the Frobenius norm over what is finite in `want`."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    finite = np.isfinite(want)
    return np.linalg.norm((got - want)[finite]) / max(np.linalg.norm(want[finite]), 1e-30)
