# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""FNUZ 8-bit floats, as gfx942 uses them: fp8 = e4m3fnuz, bf8 = e5m2fnuz.

Both formats have no infinity and no negative zero; the code 0x80 is the only NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NAN_CODE = 0x80
MAX_MAGNITUDE_CODE = 0x7F


@dataclass(frozen=True)
class Fp8Format:
    """One FNUZ format with its decode table and its encode thresholds."""

    name: str
    mantissa_bits: int
    exponent_bias: int
    decode_f32: np.ndarray
    decode_f64: np.ndarray
    thresholds: np.ndarray
    """`thresholds[c]` is the smallest f32 magnitude that rounds to a code above `c`."""

    @classmethod
    def build(cls, name: str, mantissa_bits: int, exponent_bias: int) -> Fp8Format:
        code = np.arange(0x81)  # 0x80 as a magnitude is the first value that does not fit
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        significand = np.where(exponent > 0, mantissa + (1 << mantissa_bits), mantissa)
        magnitude = np.ldexp(
            significand.astype(np.float64), np.maximum(exponent, 1) - exponent_bias - mantissa_bits
        )
        midpoint = ((magnitude[:-1] + magnitude[1:]) / 2).astype(np.float32)
        # Round to nearest even: a tie leaves an even code alone and moves an odd one up.
        thresholds = np.where(
            code[:-1] % 2 == 0, np.nextafter(midpoint, np.float32(np.inf)), midpoint
        )
        decode = np.concatenate([magnitude[:-1], -magnitude[:-1]])
        decode[NAN_CODE] = np.nan
        return cls(
            name, mantissa_bits, exponent_bias, decode.astype(np.float32), decode, thresholds
        )

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """uint8 codes to f32."""
        return self.decode_f32[codes]

    def encode(self, values: np.ndarray, saturate: bool) -> np.ndarray:
        """f32 to uint8 codes, rounding to nearest even.

        An overflow (infinity included) gives the largest finite value if `saturate`
        (MODE.FP16_OVFL = 1), else NaN.
        """
        magnitude = np.searchsorted(self.thresholds, np.abs(values), side="right")
        if saturate:
            magnitude = np.where(
                np.isnan(values), NAN_CODE, np.minimum(magnitude, MAX_MAGNITUDE_CODE)
            )
        negative = np.signbit(values) & (magnitude != 0)
        return np.where(negative, magnitude | 0x80, magnitude).astype(np.uint8)


FP8 = Fp8Format.build("e4m3fnuz", mantissa_bits=3, exponent_bias=8)
BF8 = Fp8Format.build("e5m2fnuz", mantissa_bits=2, exponent_bias=16)
