# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Turn parsed operands into closures that read them from a wave, or that write results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxfp8.rocm.disassembly import Immediate, Operand, Register, Symbolic
from tests.gfx942sim.alu import DTYPES, join64
from tests.gfx942sim.errors import SimulationError, UnsupportedInstruction
from tests.gfx942sim.memory import PRIVATE_APERTURE, SHARED_APERTURE
from tests.gfx942sim.wave import EXEC, VCC, Wave, lanes_of

# Readers return 64 lanes, or a numpy scalar for an SGPR or a constant.
VectorReader = Callable[[Wave], Any]
ScalarReader = Callable[[Wave], int]
LaneFetch = Callable[[Wave, np.ndarray], np.ndarray]

_APERTURES = {"src_shared_base": SHARED_APERTURE, "src_private_base": PRIVATE_APERTURE}
_STATUS_BITS: dict[str, ScalarReader] = {
    "src_scc": lambda w: w.scc,
    "src_vccz": lambda w: int(w.get_s64(VCC) == 0),
    "src_execz": lambda w: int(w.get_s64(EXEC) == 0),
}


@dataclass(frozen=True)
class RegisterFile:
    """Layout of the vector register file that a kernel's descriptor asks for."""

    rows: int
    accum_offset: int

    def first_row(self, operand: Operand, count: int | None = None) -> int:
        """Row of a VGPR or AGPR operand; checks that the wave owns it."""
        register = operand.value
        if not isinstance(register, Register) or register.file not in ("v", "a"):
            raise UnsupportedInstruction(f"{register} is not a vector register")
        offset = self.accum_offset if register.file == "a" else 0
        limit = self.rows if register.file == "a" else min(self.accum_offset, self.rows)
        row = offset + register.index
        if row + (count or register.count) > limit:
            raise SimulationError(
                f"{register.file}{register.index} is beyond the registers that the kernel allocates"
            )
        return row


def is_vector(operand: Operand) -> bool:
    return isinstance(operand.value, Register) and operand.value.file in ("v", "a")


def sgpr_index(operand: Operand) -> int:
    register = operand.value
    if not isinstance(register, Register) or register.file != "s":
        raise UnsupportedInstruction(f"{register} is not a scalar register")
    return register.index


# ---------------------------------------------------------------- constants


def immediate_bits(immediate: Immediate, kind: str) -> int:
    """Bit pattern of a constant operand for a source of type `kind`, such as "f32"."""
    dtype = DTYPES[kind]
    width = 8 * dtype.itemsize
    if isinstance(immediate.value, float):
        float_type = np.dtype(f"f{dtype.itemsize}")
        bits = int(np.array(immediate.value, float_type).view(f"u{dtype.itemsize}"))
    elif immediate.is_literal and kind == "f64":
        bits = immediate.value << 32
    elif immediate.is_literal and kind == "i64" and immediate.value >> 31:
        bits = immediate.value - (1 << 32)
    else:
        bits = immediate.value
    return bits & ((1 << width) - 1)


def _immediate_value(immediate: Immediate, kind: str) -> Any:
    dtype = DTYPES[kind]
    return np.array(immediate_bits(immediate, kind), f"u{dtype.itemsize}").view(dtype)[()]


# ---------------------------------------------------------------- scalar operands


def scalar_reader(operand: Operand, kind: str) -> ScalarReader:
    """Read a 32-bit or 64-bit scalar operand as an unsigned Python int."""
    value = operand.value
    if isinstance(value, Immediate):
        bits = immediate_bits(value, kind)
        return lambda w: bits
    if isinstance(value, Symbolic):
        if value.text in _APERTURES:
            base = _APERTURES[value.text]
            return lambda w: base
        if value.text in _STATUS_BITS:
            return _STATUS_BITS[value.text]
        raise UnsupportedInstruction(f"scalar operand {value.text}")
    index = sgpr_index(operand)
    if DTYPES[kind].itemsize == 8:
        return lambda w: w.get_s64(index)
    return lambda w: w.sgpr[index]


# ---------------------------------------------------------------- vector operands


def vector_reader(
    operand: Operand,
    kind: str,
    registers: RegisterFile,
    half: int = 0,
    select: str | None = None,
    fetch: LaneFetch | None = None,
) -> VectorReader:
    """Read a VALU source as type `kind` ("u32", "f16", "mask", ...).

    `half` picks the 16-bit half (op_sel), `select` is an SDWA source selection, and `fetch`
    moves lanes (DPP). Sign modifiers of the operand are applied last.
    """
    if kind == "mask":
        read_mask = scalar_reader(operand, "u64")
        return lambda w: lanes_of(read_mask(w))
    if select is not None and select != "DWORD":
        read = _selected_reader(operand, kind, registers, select)
    else:
        read = _plain_reader(operand, kind, registers, half)
    if fetch is not None:
        read_lanes = read

        def read(w):
            return fetch(w, read_lanes(w))

    return _with_modifiers(read, operand, kind)


def _plain_reader(operand: Operand, kind: str, registers: RegisterFile, half: int) -> VectorReader:
    dtype = DTYPES[kind]
    if is_vector(operand):
        return _row_reader(registers.first_row(operand, max(dtype.itemsize // 4, 1)), kind, half)
    if isinstance(operand.value, Immediate):
        constant = _immediate_value(operand.value, kind)
        return lambda w: constant
    if dtype.itemsize == 8:
        read64 = scalar_reader(operand, kind)
        return lambda w: np.uint64(read64(w)).view(dtype)
    read32 = scalar_reader(operand, "u32")
    if dtype.itemsize == 2:
        return lambda w: np.uint16(read32(w) >> 16 * half & 0xFFFF).view(dtype)
    if kind == "u32":
        return lambda w: np.uint32(read32(w))
    return lambda w: np.uint32(read32(w)).view(dtype)


def _row_reader(row: int, kind: str, half: int) -> VectorReader:
    dtype = DTYPES[kind]
    if kind == "u32":
        return lambda w: w.u32[row]
    if kind == "i32":
        return lambda w: w.i32[row]
    if kind == "f32":
        return lambda w: w.f32[row]
    if dtype.itemsize == 2:
        return lambda w: w.vgpr16[row, half::2].view(dtype)
    return lambda w: join64(w.u32[row], w.u32[row + 1]).view(dtype)


_SELECTIONS = {f"BYTE_{i}": (8 * i, 8) for i in range(4)} | {
    f"WORD_{i}": (16 * i, 16) for i in range(2)
}


def _selected_reader(
    operand: Operand, kind: str, registers: RegisterFile, select: str
) -> VectorReader:
    dtype = DTYPES[kind]
    low, width = _SELECTIONS[select]
    read = _plain_reader(operand, "u32", registers, 0)
    if operand.sign_extend:
        up, down = np.int32(32 - low - width), np.int32(32 - width)
        return lambda w: (
            ((read(w).view(np.int32) << up) >> down).astype(f"i{dtype.itemsize}").view(dtype)
        )
    shift, mask = np.uint32(low), np.uint32((1 << width) - 1)
    return lambda w: (read(w) >> shift & mask).astype(f"u{dtype.itemsize}").view(dtype)


def _with_modifiers(read: VectorReader, operand: Operand, kind: str) -> VectorReader:
    if not (operand.absolute or operand.negate):
        return read
    if kind.startswith("f"):
        if operand.absolute and operand.negate:
            return lambda w: np.negative(np.abs(read(w)))
        return (lambda w: np.abs(read(w))) if operand.absolute else (lambda w: np.negative(read(w)))
    if kind != "u32":
        raise UnsupportedInstruction(f"sign modifier on a source of type {kind}")
    sign = np.uint32(0x80000000)
    keep = ~sign if operand.absolute else np.uint32(0xFFFFFFFF)
    flip = sign if operand.negate else np.uint32(0)
    return lambda w: read(w) & keep ^ flip


# ---------------------------------------------------------------- vector results

VectorWriter = Callable[[Wave, np.ndarray], None]


def vector_writer(
    operand: Operand,
    kind: str,
    registers: RegisterFile,
    half: int = 0,
    keep_other_half: bool = False,
):
    """Write the active lanes of a VALU destination of type `kind`."""
    dtype = DTYPES[kind]
    row = registers.first_row(operand, max(dtype.itemsize // 4, 1))
    if kind == "u32":
        return lambda w, value: w.write(w.u32[row], value)
    if kind == "i32":
        return lambda w, value: w.write(w.i32[row], value)
    if kind == "f32":
        return lambda w, value: w.write(w.f32[row], value)
    if dtype.itemsize == 2:
        if keep_other_half or half:
            return lambda w, value: w.write(w.vgpr16[row, half::2].view(dtype), value)
        return lambda w, value: w.write(w.u32[row], value.view(np.uint16))

    def write64(w: Wave, value: np.ndarray) -> None:
        bits = value.view(np.uint64)
        w.write(w.u32[row], bits.astype(np.uint32))
        w.write(w.u32[row + 1], (bits >> np.uint64(32)).astype(np.uint32))

    return write64
