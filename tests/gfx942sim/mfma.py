# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Matrix fused multiply-add (MFMA) for the single-block shapes.

The products and their sum with C are formed in f64 and rounded to f32 once. The hardware's
internal summation order is not documented, so its last bits can differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxfp8.rocm.disassembly import Immediate, Instruction
from tests.gfx942sim.errors import UnsupportedInstruction
from tests.gfx942sim.fp8 import BF8, FP8
from tests.gfx942sim.operands import RegisterFile, immediate_bits, is_vector
from tests.gfx942sim.wave import WAVE_SIZE, Wave


def _decode_bf16(registers: np.ndarray) -> np.ndarray:
    return (
        (registers.view(np.uint16).astype(np.uint32) << np.uint32(16))
        .view(np.float32)
        .astype(np.float64)
    )


@dataclass(frozen=True)
class _ElementType:
    bytes: int
    decode: Callable[[np.ndarray], np.ndarray]
    """[64, registers] contiguous uint32 to [64, elements] f64."""


_ELEMENT_TYPES = {
    "fp8": _ElementType(1, lambda registers: FP8.decode_f64.take(registers.view(np.uint8))),
    "bf8": _ElementType(1, lambda registers: BF8.decode_f64.take(registers.view(np.uint8))),
    "i8": _ElementType(1, lambda registers: registers.view(np.int8).astype(np.float64)),
    "bf16": _ElementType(2, _decode_bf16),
    "f16": _ElementType(2, lambda registers: registers.view(np.float16).astype(np.float64)),
    "f32": _ElementType(4, lambda registers: registers.view(np.float32).astype(np.float64)),
}

_OPCODE = re.compile(
    r"v_mfma_(?P<result>f32|i32)_(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)_(?P<a>fp8|bf8|bf16|f16|f32|i8)(?:_(?P<b>fp8|bf8))?$"
)


@dataclass(frozen=True)
class MfmaShape:
    """Shape and types of one MFMA opcode: D[m,n] = sum over k of A[m,k]*B[k,n] + C[m,n]."""

    m: int
    n: int
    k: int
    a: str
    b: str
    result: str

    @classmethod
    def parse(cls, opcode: str) -> MfmaShape:
        match = _OPCODE.match(opcode)
        if match is None or match["m"] not in ("16", "32"):
            raise UnsupportedInstruction(opcode)
        m, n, k = (int(match[name]) for name in "mnk")
        return cls(m, n, k, match["a"], match["b"] or match["a"], match["result"])

    @property
    def k_per_lane(self) -> int:
        return self.k * self.m // WAVE_SIZE

    @property
    def result_registers(self) -> int:
        return self.m * self.n // WAVE_SIZE


def bind_mfma(inst: Instruction, registers: RegisterFile) -> Callable[[Wave], None] | None:
    if not inst.opcode.startswith("v_mfma_"):
        return None
    shape = MfmaShape.parse(inst.opcode)
    if inst.modifiers:
        raise UnsupportedInstruction(f"{inst.text}: MFMA modifiers {inst.modifiers}")
    destination, a, b, c = inst.operands
    read_a = _bind_input(registers.first_row(a), shape, shape.a)
    read_b = _bind_input(registers.first_row(b), shape, shape.b)
    rows = shape.result_registers
    d_row = registers.first_row(destination, rows)
    result_type = np.dtype(np.float32 if shape.result == "f32" else np.int32)
    # Result register 4*g + r of lane n + N*h holds row 4*(64//N)*g + 4*h + r of column n.
    layout = (rows // 4, 4, WAVE_SIZE // shape.n, shape.n)

    if is_vector(c):
        c_row = registers.first_row(c, rows)

        def read_c(w: Wave) -> np.ndarray:
            block = w.vgpr[c_row : c_row + rows].view(result_type).reshape(layout)
            return block.transpose(0, 2, 1, 3).reshape(shape.m, shape.n)

    elif isinstance(c.value, Immediate):
        bits = np.array([[immediate_bits(c.value, shape.result)]], np.uint32)
        constant = bits.view(result_type).astype(np.float64)

        def read_c(w: Wave) -> np.ndarray:
            return constant

    else:
        raise UnsupportedInstruction(inst.text)

    def execute(w: Wave) -> None:
        total = read_a(w) @ read_b(w).T + read_c(w)
        if result_type == np.int32:
            total = total.astype(np.int64)
        block = (
            total.astype(result_type)
            .reshape(layout[0], layout[2], layout[1], layout[3])
            .transpose(0, 2, 1, 3)
        )
        w.vgpr[d_row : d_row + rows] = (
            np.ascontiguousarray(block).reshape(rows, WAVE_SIZE).view(np.uint32)
        )

    return execute


def _bind_input(row: int, shape: MfmaShape, kind: str) -> Callable[[Wave], np.ndarray]:
    """Read A (or B transposed) as an [m, k] f64 matrix.

    Lane i + M*h holds elements k = h*k_per_lane ... of row i, packed from the lowest byte up.
    """
    element = _ELEMENT_TYPES[kind]
    count = shape.k_per_lane * element.bytes // 4

    def read(w: Wave) -> np.ndarray:
        values = element.decode(np.ascontiguousarray(w.vgpr[row : row + count].T))
        return (
            values.reshape(WAVE_SIZE // shape.m, shape.m, -1)
            .transpose(1, 0, 2)
            .reshape(shape.m, shape.k)
        )

    return read
