# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Attention in float64, and how far from it rounding may take a pass in BF16 or FP8."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import ml_dtypes
import numpy as np

# The largest relative rounding errors, half a unit in the last place: 3 bits of mantissa in both
# E4M3 formats, 7 in bfloat16, 23 in float32.
_FP8, _BF16, _FLOAT32 = 2.0**-4, 2.0**-8, 2.0**-24

# Scores held at once: 64 MiB in float64.
_MAX_SCORES = 1 << 23


@dataclasses.dataclass(frozen=True)
class ExactAttention:
    """Attention in float64, and how it responds to errors in what goes into it.

    A response is the change of `out`, to first order, for relative errors of +1 or -1 in every
    value: the derivative along a random direction. Equal values have equal errors, as rounding
    gives them.

    Attributes:
      out: float64 [H, Tq, Dv].
      lse: float64 [H, Tq], natural log.
      response_to_qkv: float64 [H, Tq, Dv], to errors in Q, K and V.
      response_to_p: float64 [H, Tq, Dv], to errors in the probabilities.
      score_variance: float64 [H, Tq], what errors of variance 1 in Q or in K make of the scores:
        sum_d (softmax_scale q_d k_jd)^2, the mean over the keys j by their probabilities.
      largest_score: softmax_scale times the largest |q| times the largest |k|.
      num_keys: keys that the last row sees.
      qk_head_dim: number of channels d.
    """

    out: np.ndarray
    lse: np.ndarray
    response_to_qkv: np.ndarray
    response_to_p: np.ndarray
    score_variance: np.ndarray
    largest_score: float
    num_keys: int
    qk_head_dim: int


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What a pass's errors must not exceed.

    Attributes:
      relative: of |out - exact| / |exact|, over all heads, rows and channels.
      lse: of |lse - exact|, over all heads and rows.
    """

    relative: float
    lse: float


def exact_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    softmax_scale: float,
    on_head: Callable[[], object],
) -> ExactAttention:
    """Attention of the last tokens of one sequence over all of it, causally, in float64.

    Args:
      q: bfloat16 [Tq, H, Dqk], of the last Tq of the Tk tokens.
      k: bfloat16 [Tk, H, Dqk].
      v: bfloat16 [Tk, H, Dv].
      softmax_scale: multiplies the scores.
      on_head: called after each head.
    """
    (tq, num_heads, dqk), (tk, _, dv) = q.shape, v.shape
    out, response_to_qkv, response_to_p = np.empty((3, num_heads, tq, dv))
    lse, score_variance = np.empty((2, num_heads, tq))
    largest_score = 0.0
    rng = np.random.default_rng(0)
    rows = max(1, _MAX_SCORES // tk)
    for head in range(num_heads):
        qh, kh, vh = (x[:, head].astype(np.float64) for x in (q, k, v))
        q_error, k_error, v_error = (_random_errors(x, rng) for x in (qh, kh, vh))
        norms = [np.sqrt((x**2).sum(axis=1).max()) for x in (qh, kh)]
        largest_score = max(largest_score, softmax_scale * norms[0] * norms[1])
        for start in range(0, tq, rows):
            part = slice(start, min(start + rows, tq))
            scaled = softmax_scale * qh[part]
            scores = scaled @ kh.T
            hidden = np.arange(tk) > np.arange(tk - tq + part.start, tk - tq + part.stop)[:, None]
            scores[hidden] = -np.inf
            largest = scores.max(axis=1, keepdims=True)
            p = np.exp(scores - largest)
            total = p.sum(axis=1, keepdims=True)
            p /= total
            out[head, part] = p @ vh
            lse[head, part] = (largest + np.log(total))[:, 0]

            # The derivative of sum_j p_j v_j, where p_j is proportional to exp(s_j).
            s_error = (softmax_scale * q_error[part]) @ kh.T + scaled @ k_error.T
            p_error = p * s_error
            response_to_qkv[head, part] = (
                p @ v_error + p_error @ vh - p_error.sum(axis=1, keepdims=True) * out[head, part]
            )
            response_to_p[head, part] = _random_errors(p, rng) @ vh
            score_variance[head, part] = (p * (scaled**2 @ (kh**2).T)).sum(axis=1)
        on_head()
    return ExactAttention(
        out,
        lse,
        response_to_qkv,
        response_to_p,
        score_variance,
        float(largest_score),
        num_keys=tk,
        qk_head_dim=dqk,
    )


def error_bounds(exact: ExactAttention, precision: str) -> Bounds:
    """How far rounding alone may take a pass of this precision ("fp8" or "bf16") from the truth.

    With m bits of mantissa a value x is off by at most u |x|, u = 2^-(m+1): 2^-4 in FP8. Rounding
    errors are spread evenly over a unit in the last place, so that the root of their mean square is
    at most r |x|, r = u / sqrt(3), which is reached by values just above a power of two.

    - The output moves by r times its response to relative errors of +-1 (ExactAttention): to first
      order, the mean square of many independent errors is the sum of the squares that each causes
      alone, and so is that of the response, whose signs are random. In FP8, Q, K, V and P are
      rounded, and all of them count as FP8, also the new tokens, which the pass attends to in
      BF16. In BF16, only P is.
    - A score is a sum of products q_d k_jd, both factors of which are rounded. The LSE moves by the
      mean of the scores' errors, at most by the root of their mean square (Cauchy-Schwarz; the
      errors share those of q): S = r sqrt(2 score_variance). The largest of n such errors is
      expected below max(S) sqrt(2 ln 2n), sums of evenly spread errors being sub-Gaussian.
    - In both precisions the output is rounded to BF16, and float32 sums are off by at most 2^-24 a
      term.

    FP8 numbers below the smallest normal one are rounded more coarsely; they lie a factor 2^14
    below the largest of their head, or of their row of P, and do not show.
    """
    r_p, r_qkv = (_FP8, _FP8) if precision == "fp8" else (_BF16, 0.0)
    r_p, r_qkv, r_out = (u / math.sqrt(3) for u in (r_p, r_qkv, _BF16))
    sums = _FLOAT32 * (exact.qk_head_dim * exact.largest_score + exact.num_keys)
    relative = math.hypot(
        r_qkv * _norm(exact.response_to_qkv) / _norm(exact.out),
        r_p * _norm(exact.response_to_p) / _norm(exact.out),
        r_out,
    )
    score_error = r_qkv * math.sqrt(2 * exact.score_variance.max())
    return Bounds(
        relative=relative + sums,
        lse=score_error * math.sqrt(2 * math.log(2 * exact.lse.size)) + sums,
    )


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x))


def _random_errors(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """x with signs that are a random function of the value, and of the column."""
    bits = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    signs = rng.choice(np.array([-1.0, 1.0]), 1 << 16)
    column = rng.integers(1 << 16, size=x.shape[1], dtype=np.uint16)
    return x * signs[bits ^ column]
