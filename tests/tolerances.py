# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""How far a result may be from the oracle: bounds that follow from the formats, in one place.

An FP8 result is compared with the float64 attention of the dequantized inputs, so that the error
of quantizing Q, K and V is not in it and what remains can be bounded element by element:

- The output is bfloat16: with 7 bits after the leading one, half a unit is at most 2^-8 of it.
- P is rounded. FP8 e4m3 has 3 bits after the leading one: at most 2^-4 of each weight, hence of
  `spread`. Below the smallest normal the spacing is fixed: P is stored times 2^7 over the running
  maximum and the smallest subnormal is 2^-10 (fnuz) or 2^-9 (fn), so half of it is at most 2^-17
  of p_max for each key, hence of `reach`. A bfloat16 kernel may round P to bfloat16: 2^-8.
- Everything else is float32. Scores of magnitude up to ~50 with a relative error of 2^-20 (sums of
  192 products) move a weight by 2^-14.

Hopper's FP8 matrix unit sums less exactly than float32: `hopper_fp8_slack` has what it adds.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from tests.oracle import Expected

OUT_ROUNDING = 2.0**-8
P_ROUNDING = {"fp8": 2.0**-4, "bf16": 2.0**-8}
P_FLOOR = {"fp8": 2.0**-17, "bf16": 0.0}
FLOAT32 = 2.0**-14

# Root mean square of the relative rounding error of P: uniform within +-half a unit, mean square a
# third of its square at the start of a binade and, for values spread evenly in the logarithm,
# (1 - 1/4) / (2 ln 2) of that on average. With V of both signs the relative error of a long row's
# output is the same. A fifth on top, because a row has finitely many keys.
P_RMS = {
    precision: 1.2 * half_unit * math.sqrt(0.75 / (2 * math.log(2)) / 3)
    for precision, half_unit in P_ROUNDING.items()
}


HOPPER_STEP = 32
HOPPER_UNIT = 2.0**-13
HOPPER_P_BLOCK = 192
HOPPER_P_FLOOR = 2.0**-15


class Slack(NamedTuple):
    """Absolute error that a matrix unit adds to the bounds of the formats."""

    lse: np.ndarray  # [H, Tq]
    out: np.ndarray  # [Tq, H, Dv]


def lse_bound(lse: Any) -> np.ndarray:
    """Absolute error allowed for an LSE."""
    return 2.0**-17 * (1 + np.abs(lse))


def out_bound(expected: Expected, precision: str) -> np.ndarray:
    """Absolute error allowed for each element of the output."""
    return (
        OUT_ROUNDING * np.abs(expected.out)
        + (P_ROUNDING[precision] + FLOAT32) * expected.spread
        + P_FLOOR[precision] * expected.reach
        + 1e-30
    )


def hopper_fp8_slack(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    causal: bool,
    softmax_scale: float | None = None,
) -> Slack:
    """What Hopper's FP8 matrix unit adds to the error of the kernel that pallas_mosaic_gpu runs.

    The unit adds 32 products to its accumulator at a time: it shifts all 33 terms to the exponent E
    of the largest, cuts off what lies below u = 2^(E - 13), and keeps as many bits of the result
    (the DeepSeek-V3 report, 2024, section 3.5.2, found so many; nothing official says it). With M
    the largest magnitude among products, accumulator and result, u <= 2^-13 M. So a step

    - shrinks the accumulator by up to 2 u: a bias, which adds up over the steps;
    - shrinks each product by less than u, a mean square of at most u^2 / 3. The products of random
      inputs have either sign, and the errors are summed as independent ones: 32 u^2 / 3 a step.

    Six standard deviations of the latter are allowed: 2 in 10^9 are past that.

    - A score is a sum of Dqk / 32 steps. The accumulators are known; a step's largest product is
      taken to be that of the largest |q| and the largest |k| in its columns.
    - An error e_j of score j moves weight p_j by p_j e_j and the LSE by sum p_j e_j; the output by
      sum p_j e_j v_j, less out times the error of the LSE.
    - P V is summed in blocks of up to 192 keys, six steps, and outside of the unit from there on. M
      is at most the block's sum of p |v|, and the blocks' add up to `spread`.
    - P is stored times 2^5 or more, not 2^7: half the smallest subnormal is 2^-15 of p_max.

    The arguments are those of `oracle.attention`, with the values that FP8 holds.
    """
    q, k, v = (np.asarray(x).astype(np.float32) for x in (q, k, v))
    scale = np.float32(q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale)
    slack = Slack(np.zeros((q.shape[1], q.shape[0])), np.zeros((*q.shape[:2], v.shape[2])))
    steps = HOPPER_P_BLOCK // HOPPER_STEP
    p_v_error = np.float32(HOPPER_UNIT * (2 * steps + 6 * math.sqrt(HOPPER_P_BLOCK / 3)))
    for first_q, end_q, first_k, end_k in zip(
        cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:], strict=True
    ):
        rows, keys = slice(first_q, end_q), slice(first_k, end_k)
        seen = np.ones((end_q - first_q, end_k - first_k), bool)
        if causal:
            seen = np.tril(seen, seen.shape[1] - seen.shape[0])
        if not seen.any():
            continue
        for head in range(q.shape[1]):
            scores, bias, variance = _hopper_scores(scale * q[rows, head], k[keys, head])
            scores = np.where(seen, scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-1e30))
            p = weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-30)
            variance *= p**2
            bias *= p
            magnitudes = np.abs(v[keys, head])
            out = np.abs(p @ v[keys, head])
            lse = bias.sum(axis=1) + 6 * np.sqrt(variance.sum(axis=1))
            slack.lse[head, rows] = lse
            slack.out[rows, head] = (
                bias @ magnitudes
                + 6 * np.sqrt(variance @ magnitudes**2)
                + lse[:, None] * out
                + p_v_error * (p @ magnitudes)
                + HOPPER_P_FLOOR * p.max(axis=1, keepdims=True) * (seen @ magnitudes)
            )
    return slack


def _hopper_scores(q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q k^T of q [Lq, D] and k [Lk, D]; and the bias and the variance of its error."""
    score, bias, variance = np.zeros((3, len(q), len(k)), np.float32)
    for first in range(0, q.shape[1], HOPPER_STEP):
        q_step, k_step = (x[:, first : first + HOPPER_STEP] for x in (q, k))
        before, score = np.abs(score), score + q_step @ k_step.T
        product = np.outer(np.abs(q_step).max(axis=1), np.abs(k_step).max(axis=1))
        unit = np.float32(HOPPER_UNIT) * np.maximum(np.maximum(before, np.abs(score)), product)
        bias += 2 * unit
        variance += np.float32(HOPPER_STEP / 3) * unit**2
    return score, bias, variance


def assert_attention(
    state: Any, expected: Expected, precision: str, slack: Slack | None = None
) -> None:
    """Every element of out and lse is within its bound; zeros, -inf and NaN where due."""
    more_lse, more_out = (0, 0) if slack is None else slack
    out, lse = np.asarray(state.out).astype(np.float64), np.asarray(state.lse).astype(np.float64)
    assert str(state.out.dtype) == "bfloat16"
    assert str(state.lse.dtype) == "float32"
    assert out.shape == expected.out.shape
    assert lse.shape == expected.lse.shape
    assert_close(lse, expected.lse, lse_bound(expected.lse) + more_lse, "lse")
    assert_close(out, expected.out, out_bound(expected, precision) + more_out, "out")
    unseen = np.isneginf(expected.lse.T)
    assert not out[unseen].any(), "rows that see no key must be zero"


def assert_close(actual: Any, expected: Any, bound: Any, what: str) -> None:
    """|actual - expected| <= bound where expected is finite, equal elsewhere."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(
        np.where(finite, 0, actual), np.where(finite, 0, expected), err_msg=f"{what}: non-finite"
    )
    bound = np.where(finite, bound, 0)
    difference = np.abs(np.where(finite, actual, 0) - np.where(finite, expected, 0))
    excess = np.where(np.isfinite(difference), difference - bound, np.inf)
    if excess.size and excess.max() > 0:
        at = np.unravel_index(excess.argmax(), excess.shape)
        raise AssertionError(
            f"{what}: {(excess > 0).sum()} of {excess.size} past their bound; at "
            f"{tuple(map(int, at))} expected {expected[at]}, got {actual[at]}, bound "
            f"{bound[at]}"
        )


def relative_error(actual: Any, expected: Any) -> float:
    """Norm of the difference over the norm of what was expected."""
    actual, expected = np.asarray(actual).astype(np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
