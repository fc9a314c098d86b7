# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Read-modify-write operations shared by global, buffer and LDS atomics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.gfx942sim.alu import fmax, fmin


@dataclass(frozen=True)
class AtomicOp:
    """One atomic on a value of type `dtype`.

    `combine(old, operand)` gives the new value. A compare-and-swap has two operands, the new
    value first and the expected old value second.
    """

    dtype: np.dtype
    combine: Callable[..., np.ndarray]
    operands: int = 1

    @property
    def nbytes(self) -> int:
        return max(self.dtype.itemsize, 4)

    @property
    def result_registers(self) -> int:
        return self.nbytes // 4

    @property
    def data_registers(self) -> int:
        return self.operands * self.result_registers

    def apply(self, old: np.ndarray, data: np.ndarray) -> np.ndarray:
        """New value as rows of dwords, for one lane; arguments are [dwords, 1] columns."""
        values = [self._typed(old)]
        for i in range(self.operands):
            values.append(
                self._typed(data[i * self.result_registers : (i + 1) * self.result_registers])
            )
        return (
            np.ascontiguousarray(self.combine(*values), self.dtype).view(np.uint32).reshape(-1, 1)
        )

    def _typed(self, column: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(column.ravel()).view(self.dtype)


def _replace(_old, new):
    return new


def _compare_and_swap(old, new, expected):
    return np.where(old == expected, new, old)


def _increment(old, limit):
    return np.where(old >= limit, 0, old + 1)


def _decrement(old, limit):
    return np.where((old == 0) | (old > limit), limit, old - 1)


def _add_bf16(old, data):
    """Two bf16 sums, rounded to nearest even, on uint16 pairs."""
    total = (_bf16_to_f32(old) + _bf16_to_f32(data)).view(np.uint32)
    rounded = (total + np.uint32(0x7FFF) + (total >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(total.view(np.float32)), 0x7FC0, rounded)


def _bf16_to_f32(bits):
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


GLOBAL_ATOMICS: dict[str, AtomicOp] = {
    "add_f32": AtomicOp(np.dtype(np.float32), np.add),
    "add_f64": AtomicOp(np.dtype(np.float64), np.add),
    "max_f64": AtomicOp(np.dtype(np.float64), fmax),
    "min_f64": AtomicOp(np.dtype(np.float64), fmin),
    "pk_add_f16": AtomicOp(np.dtype(np.float16), np.add),
    "pk_add_bf16": AtomicOp(np.dtype(np.uint16), _add_bf16),
}
for _suffix, _unsigned, _signed in (("", np.uint32, np.int32), ("_x2", np.uint64, np.int64)):
    for _name, _dtype, _combine, _operands in (
        ("add", _unsigned, np.add, 1),
        ("sub", _unsigned, np.subtract, 1),
        ("umax", _unsigned, np.maximum, 1),
        ("umin", _unsigned, np.minimum, 1),
        ("smax", _signed, np.maximum, 1),
        ("smin", _signed, np.minimum, 1),
        ("and", _unsigned, np.bitwise_and, 1),
        ("or", _unsigned, np.bitwise_or, 1),
        ("xor", _unsigned, np.bitwise_xor, 1),
        ("swap", _unsigned, _replace, 1),
        ("inc", _unsigned, _increment, 1),
        ("dec", _unsigned, _decrement, 1),
        ("cmpswap", _unsigned, _compare_and_swap, 2),
    ):
        GLOBAL_ATOMICS[_name + _suffix] = AtomicOp(np.dtype(_dtype), _combine, _operands)

# LDS mnemonics (without `ds_` and `rtn`) in terms of the same operations.
LDS_ATOMICS: dict[str, AtomicOp] = {
    "add_f32": GLOBAL_ATOMICS["add_f32"],
    "add_f64": GLOBAL_ATOMICS["add_f64"],
    "max_f32": AtomicOp(np.dtype(np.float32), fmax),
    "min_f32": AtomicOp(np.dtype(np.float32), fmin),
    "max_f64": GLOBAL_ATOMICS["max_f64"],
    "min_f64": GLOBAL_ATOMICS["min_f64"],
    "pk_add_f16": GLOBAL_ATOMICS["pk_add_f16"],
    "pk_add_bf16": GLOBAL_ATOMICS["pk_add_bf16"],
}
for _bits, _suffix in (("32", ""), ("64", "_x2")):
    for _name, _global_name in (
        (f"add_u{_bits}", "add"),
        (f"sub_u{_bits}", "sub"),
        (f"max_u{_bits}", "umax"),
        (f"min_u{_bits}", "umin"),
        (f"max_i{_bits}", "smax"),
        (f"min_i{_bits}", "smin"),
        (f"and_b{_bits}", "and"),
        (f"or_b{_bits}", "or"),
        (f"xor_b{_bits}", "xor"),
        (f"wrxchg_b{_bits}", "swap"),
        (f"inc_u{_bits}", "inc"),
        (f"dec_u{_bits}", "dec"),
    ):
        LDS_ATOMICS[_name] = GLOBAL_ATOMICS[_global_name + _suffix]
    LDS_ATOMICS[f"cmpst_b{_bits}"] = AtomicOp(
        np.dtype(f"u{int(_bits) // 8}"),
        lambda old, expected, new: np.where(old == expected, new, old),
        2,
    )
