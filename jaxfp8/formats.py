# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The FP8 formats the library speaks.

Both have 4 exponent and 3 mantissa bits, no infinity, and differ in the exponent bias: the same
bits read as e4m3fn are twice the value they are as e4m3fnuz, and 0x80, negative zero in e4m3fn, is
the NaN of e4m3fnuz. AMD gfx942 computes in e4m3fnuz, NVIDIA sm89 and later in e4m3fn.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

MIN_DESCALE = 1e-12
"""Smallest descale ever produced: it keeps x / descale finite for a head that is all zeros."""


@dataclasses.dataclass(frozen=True)
class Fp8Format:
    """An 8-bit floating-point format.

    Attributes:
      name: the dtype's name, as written into scale artifacts.
      dtype: the NumPy dtype (from ml_dtypes); JAX arrays report the same one.
      max: the largest finite value.
    """

    name: str
    dtype: np.dtype
    max: float

    def __str__(self) -> str:
        return self.name


E4M3FNUZ = Fp8Format("float8_e4m3fnuz", np.dtype(ml_dtypes.float8_e4m3fnuz), 240.0)
E4M3FN = Fp8Format("float8_e4m3fn", np.dtype(ml_dtypes.float8_e4m3fn), 448.0)

FORMATS = {fmt.name: fmt for fmt in (E4M3FNUZ, E4M3FN)}
