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
"""

from __future__ import annotations

import math
from typing import Any

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


def assert_attention(state: Any, expected: Expected, precision: str) -> None:
    """Every element of out and lse is within its bound; zeros, -inf and NaN where due."""
    out, lse = np.asarray(state.out).astype(np.float64), np.asarray(state.lse).astype(np.float64)
    assert str(state.out.dtype) == "bfloat16"
    assert str(state.lse.dtype) == "float32"
    assert out.shape == expected.out.shape
    assert lse.shape == expected.lse.shape
    assert_close(lse, expected.lse, lse_bound(expected.lse), "lse")
    assert_close(out, expected.out, out_bound(expected, precision), "out")
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
