# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Attention in float64 NumPy for a sample of rows and heads, and how far from it a result may be.

The whole output of a long context would take the host hours; a few rows of a few heads say as much
about an implementation, since each is computed as the others are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from common.inputs import Batch
from common.result import Check

# Root mean square of the relative error of rounding to a format whose half unit is 2^-4 (e4m3) or
# 2^-8 (bfloat16) of the leading bit, for values spread evenly in the logarithm: uniform within half
# a unit, which is (1 - 1/4) / (2 ln 2) of its square on average.
_EVENLY_SPREAD = math.sqrt(0.75 / (2 * math.log(2)) / 3)
_FP8, _BF16 = 2.0**-4 * _EVENLY_SPREAD, 2.0**-8 * _EVENLY_SPREAD

# Half as much again: a sample has finitely many rows, and its values are not spread quite evenly.
_SLACK = 1.5

ROUNDING_LIMIT = _SLACK * _FP8
"""Largest relative error of values in FP8, over many."""

# LSE error that float32 sums leave at ordinary scores, on any backend.
_LSE_FLOOR = 1e-3

_MOST_KEYS_AT_ONCE = 1 << 16


@dataclasses.dataclass(frozen=True)
class Sample:
    """Which rows of which heads are checked, both in order."""

    rows: np.ndarray
    heads: np.ndarray


class Exact(NamedTuple):
    """float64 attention of a sample.

    Attributes:
      out: [R, H, Dv].
      lse: [H, R]; -inf for a row that sees no key.
      score_norm: see the function of that name.
    """

    out: np.ndarray
    lse: np.ndarray
    score_norm: float


def sample(batch: Batch, num_heads: int, rows: int = 32, heads: int = 4) -> Sample:
    """First and last row of each sequence as far as they go, others at random."""
    ends = np.cumsum(batch.lengths_q)
    edges = [(e - n, e - 1) for n, e in zip(batch.lengths_q, ends, strict=True) if n]
    chosen = list(dict.fromkeys(int(row) for pair in edges for row in pair))[: rows // 2]
    rng = np.random.default_rng(0)
    others = rng.permutation(batch.tokens_q)[: rows - len(chosen)]
    every = np.linspace(0, num_heads - 1, min(heads, num_heads)).round().astype(int)
    return Sample(np.unique([*chosen, *others.tolist()]).astype(int), np.unique(every))


def attention_rows(
    q: np.ndarray,
    chunks: Iterable[tuple[np.ndarray, np.ndarray]],
    visible: np.ndarray | None,
    softmax_scale: float,
) -> Exact:
    """Attention of some rows over keys that come in chunks.

    Args:
      q: [R, H, Dqk].
      chunks: k [n, H, Dqk] and v [n, H, Dv] of consecutive keys.
      visible: int [R], how many of the first keys each row sees; None: all.
      softmax_scale: of the scores.
    """
    queries = heads_first(q)
    top = np.full(queries.shape[:2], -np.inf)  # [H, R]
    total = np.zeros_like(top)
    out: Any = 0.0
    norms, first = [], 0
    for k, v in chunks:
        keys, values = heads_first(k), heads_first(v)
        scores = softmax_scale * queries @ keys.transpose(0, 2, 1)
        if visible is not None:
            hidden = np.arange(first, first + len(k)) >= np.asarray(visible)[:, None]
            scores = np.where(hidden, -np.inf, scores)
        first += len(k)
        new_top = np.maximum(top, scores.max(axis=2, initial=-np.inf))
        shift = np.where(np.isneginf(new_top), 0.0, new_top)
        weights = np.exp(scores - shift[:, :, None])
        rescale = np.exp(top - shift)
        total = total * rescale + weights.sum(axis=2)
        out = out * rescale[:, :, None] + weights @ values
        top = new_top
        norms.append(score_norm(queries, keys, softmax_scale))
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, top + np.log(total), -np.inf)
    out = out / np.where(total > 0, total, 1.0)[:, :, None]
    return Exact(out.transpose(1, 0, 2), lse, math.sqrt(float(np.mean(np.square(norms)))))


def exact_attention(
    q: Any, k: Any, v: Any, batch: Batch, sampled: Sample, softmax_scale: float
) -> Exact:
    """Attention of a sample of a batch: q [Tq, H, Dqk], k [Tk, H, Dqk], v [Tk, H, Dv]."""
    q, k, v = q[sampled.rows][:, sampled.heads], k[:, sampled.heads], v[:, sampled.heads]
    # float32 where the arrays lie: NumPy is slow with bfloat16.
    q, k, v = (np.asarray(x.astype(np.float32)) for x in (q, k, v))
    num_heads, v_size = len(sampled.heads), v.shape[2]
    out = np.zeros((len(sampled.rows), num_heads, v_size))
    lse = np.full((num_heads, len(sampled.rows)), -np.inf)
    norms, end_q, end_k = [], 0, 0
    for len_q, len_k in zip(batch.lengths_q, batch.lengths_k, strict=True):
        first_q, end_q = end_q, end_q + len_q
        first_k, end_k = end_k, end_k + len_k
        own = np.flatnonzero((sampled.rows >= first_q) & (sampled.rows < end_q))
        if not len(own) or not len_k:
            continue
        visible = None
        if batch.causal:
            visible = sampled.rows[own] - first_q + 1 + len_k - len_q
        starts = range(first_k, end_k, _MOST_KEYS_AT_ONCE)
        parts = [slice(at, min(at + _MOST_KEYS_AT_ONCE, end_k)) for at in starts]
        chunks = ((k[part], v[part]) for part in parts)
        exact = attention_rows(q[own], chunks, visible, softmax_scale)
        out[own], lse[:, own] = exact.out, exact.lse
        norms.append(exact.score_norm)
    return Exact(out, lse, max(norms, default=0.0))


def score_norm(queries: np.ndarray, keys: np.ndarray, softmax_scale: float) -> float:
    """Root mean square over queries [H, R, D] and keys [H, n, D] of scale |q * k|, the norm of the
    elementwise product: what a relative error of q or k, different in each element, moves a score
    by.
    """
    squares = queries**2 @ (keys**2).mean(axis=1)[:, :, None]
    return softmax_scale * math.sqrt(float(np.mean(squares)))


def first_rows_norm(q: Any, k: Any, softmax_scale: float, rows: int = 256) -> float:
    """`score_norm` of the first rows of q and k, [T, H, D] each."""
    return score_norm(heads_first(q[:rows]), heads_first(k[:rows]), softmax_scale)


def compare(out: Any, lse: Any, exact: Exact, sampled: Sample, precision: str) -> tuple[Check, ...]:
    """The checks of a result: out [Tq, H, Dv] and lse [H, Tq], or None where there is none."""
    ours = np.asarray(out[sampled.rows][:, sampled.heads]).astype(np.float64)
    limit = out_limit(precision, exact.score_norm)
    checks = [Check("relative error", relative_error(ours, exact.out), limit)]
    if lse is not None:
        ours = np.asarray(lse[sampled.heads][:, sampled.rows]).astype(np.float64)
        seen = np.isfinite(exact.lse)
        difference = np.where(seen, ours - np.where(seen, exact.lse, 0.0), 0.0)
        if not np.isneginf(ours[~seen]).all():
            difference = np.full_like(difference, np.nan)  # a row without keys has an LSE of -inf
        error = float(np.sqrt(np.mean(difference**2)))
        checks.append(Check("LSE error", error, lse_limit(precision, exact.score_norm)))
    return tuple(checks)


def out_limit(precision: str, score_norm: float) -> float:
    """Largest relative error of an output whose inputs were bfloat16.

    A relative error of each element of size e, independent of the others', is of size e in a
    weighted sum of V. FP8 rounds V, P, and Q and K, whose error moves a score by sqrt(2) e |q * k|
    and so the weight by that part of it. bfloat16 rounds P, the output and, in the plainest
    implementations, the scores.
    """
    if precision == "fp8":
        return _SLACK * _FP8 * math.sqrt(2 + 2 * score_norm**2)
    return _SLACK * _BF16 * math.sqrt(2 + score_norm**2)


def lse_limit(precision: str, score_norm: float) -> float:
    """Largest root mean square of the LSE's error."""
    if precision == "fp8":
        return _LSE_FLOOR + _SLACK * _FP8 * math.sqrt(2) * score_norm
    return _LSE_FLOOR


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Norm of the difference over the norm of what was expected; 0 for nothing."""
    norm = float(np.linalg.norm(expected))
    difference = float(np.linalg.norm(actual - expected))
    return difference / norm if norm else (0.0 if difference == 0 else math.inf)


def heads_first(x: Any) -> np.ndarray:
    """float64 [H, T, D] of x [T, H, D]."""
    return np.asarray(x).astype(np.float64).transpose(1, 0, 2)
