# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""MFMA shapes, element types, and register placements."""

from __future__ import annotations

from itertools import product

import ml_dtypes
import numpy as np
import pytest

from tests.gfx942sim import Kernel, UnsupportedInstruction
from tests.gfx942sim.assembly import assemble
from tests.gfx942sim.tools import needs_assembler

pytestmark = needs_assembler

FP8, BF8 = ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz
DTYPES = {
    "fp8": FP8,
    "bf8": BF8,
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "f32": np.float32,
    "i8": np.int8,
}


def pack_input(matrix: np.ndarray, rows: int) -> np.ndarray:
    """[rows, k] to registers [count, 64]: lane i + rows*h holds a contiguous run of k in row i."""
    k = matrix.shape[1]
    per_lane = k * rows // 64
    lanes = np.stack(
        [matrix[lane % rows, lane // rows * per_lane :][:per_lane] for lane in range(64)]
    )
    return np.ascontiguousarray(np.ascontiguousarray(lanes).view(np.uint32).T)


def result_position(register: int, lane: int, columns: int) -> tuple[int, int]:
    """Row and column of D that a result register of a lane holds."""
    blocks = 64 // columns
    return 4 * blocks * (register // 4) + 4 * (lane // columns) + register % 4, lane % columns


def run_mfma(
    opcode: str, a: np.ndarray, b: np.ndarray, c: np.ndarray | None, rows: int, agpr: bool = False
) -> np.ndarray:
    packed_a, packed_b = pack_input(a, rows), pack_input(np.ascontiguousarray(b.T), rows)
    registers = rows * rows // 64
    columns = rows
    packed_c = np.zeros((registers, 64), np.uint32)
    if c is not None:
        for register in range(registers):
            for lane in range(64):
                packed_c[register, lane] = c[result_position(register, lane, columns)].view(
                    np.uint32
                )
    source = np.concatenate([packed_a, packed_b, packed_c])
    result = np.zeros((registers, 64), np.uint32)
    count = packed_a.shape[0]

    def span(file: str, first: int, size: int) -> str:
        return f"{file}[{first}:{first + size - 1}]" if size > 1 else f"{file}{first}"

    file = "a" if agpr else "v"
    inputs = [
        f"global_load_dword {file}{10 + i}, v4, s[4:5]\nv_add_u32 v4, 0x100, v4"
        for i in range(source.shape[0])
    ]
    outputs = [
        f"global_store_dword v5, {file}{100 + i}, s[6:7]\nv_add_u32 v5, 0x100, v5"
        for i in range(registers)
    ]
    c_text = (
        span(file, 10 + 2 * count, registers)
        if c is not None
        else "1.0"
        if "i32" not in opcode
        else "1"
    )
    a_text, b_text = span(file, 10, count), span(file, 10 + count, count)
    body = f"""
      s_load_dwordx2 s[4:5], s[0:1], 0x0
      s_load_dwordx2 s[6:7], s[0:1], 0x8
      v_lshlrev_b32 v4, 2, v0
      v_mov_b32 v5, v4
      s_waitcnt lgkmcnt(0)
      {chr(10).join(inputs)}
      s_waitcnt vmcnt(0)
      {opcode} {span(file, 100, registers)}, {a_text}, {b_text}, {c_text}
      s_nop 15
      {chr(10).join(outputs)}
    """
    Kernel.from_hsaco(assemble(body)).launch(1, 64, [source, result])
    dtype = np.int32 if "i32_" in opcode else np.float32
    matrix = np.zeros((rows, columns), dtype)
    for register in range(registers):
        for lane in range(64):
            matrix[result_position(register, lane, columns)] = result[register, lane].view(dtype)
    return matrix


EIGHT_BIT = ("fp8", "bf8")
CASES = [
    *(
        (f"v_mfma_f32_{shape}_{a}_{b}", a, b)
        for shape, a, b in product(("32x32x16", "16x16x32"), EIGHT_BIT, EIGHT_BIT)
    ),
    *(
        (f"v_mfma_f32_{shape}_{kind}", kind, kind)
        for shape, kind in product(("32x32x8", "16x16x16"), ("bf16", "f16"))
    ),
    ("v_mfma_f32_32x32x2_f32", "f32", "f32"),
    ("v_mfma_f32_16x16x4_f32", "f32", "f32"),
    ("v_mfma_i32_32x32x16_i8", "i8", "i8"),
    ("v_mfma_i32_16x16x32_i8", "i8", "i8"),
]


@pytest.mark.parametrize("agpr", [False, True], ids=["vgpr", "agpr"])
@pytest.mark.parametrize(("opcode", "a_kind", "b_kind"), CASES, ids=[case[0] for case in CASES])
def test_mfma(rng, opcode, a_kind, b_kind, agpr):
    rows, _, k = (int(x) for x in opcode.split("_")[3].split("x"))
    integer = a_kind == "i8"
    scale = 50 if integer else 1
    a = (rng.standard_normal((rows, k)) * scale).astype(DTYPES[a_kind])
    b = (rng.standard_normal((k, rows)) * scale).astype(DTYPES[b_kind])
    c = (rng.standard_normal((rows, rows)) * scale).astype(np.int32 if integer else np.float32)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_array_equal(
        run_mfma(opcode, a, b, c, rows, agpr), (exact + c).astype(c.dtype)
    )
    np.testing.assert_array_equal(
        run_mfma(opcode, a, b, None, rows, agpr), (exact + 1).astype(c.dtype)
    )


def test_nan_of_fp8_reaches_its_row_and_ignores_exec(rng):
    a = rng.standard_normal((32, 16)).astype(FP8)
    a.view(np.uint8)[5, 3] = 0x80
    b = rng.standard_normal((16, 32)).astype(FP8)
    result = run_mfma("v_mfma_f32_32x32x16_fp8_fp8", a, b, None, 32)
    np.testing.assert_array_equal(np.isnan(result).all(axis=1), np.arange(32) == 5)


def test_other_shapes_are_rejected():
    kernel = Kernel.from_hsaco(assemble("v_mfma_f32_4x4x4_16b_f16 v[4:7], v[2:3], v[2:3], 0"))
    assert "v_mfma_f32_4x4x4_16b_f16" in kernel.unsupported
    with pytest.raises(UnsupportedInstruction, match="v_mfma_f32_4x4x4_16b_f16"):
        kernel.launch(1, 64, [None, None])
