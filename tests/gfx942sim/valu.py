# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Bind vector ALU instructions: operands, modifiers, SDWA, DPP and packed forms."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxfp8.rocm.disassembly import Immediate, Instruction, Operand
from tests.gfx942sim.alu import (
    DTYPES,
    PACKED_16_OPS,
    PACKED_F32_OPS,
    VECTOR_OPS,
    VectorOp,
    div_scale,
    flush_denormals,
    fma_f32,
    pack16,
)  # fmt: skip
from tests.gfx942sim.errors import UnsupportedInstruction
from tests.gfx942sim.fp8 import BF8, FP8, Fp8Format
from tests.gfx942sim.operands import (
    LaneFetch,
    RegisterFile,
    VectorReader,
    VectorWriter,
    immediate_bits,
    is_vector,
    scalar_reader,
    sgpr_index,
    vector_reader,
    vector_writer,
)  # fmt: skip
from tests.gfx942sim.wave import LANE_IDS, WAVE_SIZE, Wave, lanes_of, mask_of

Execute = Callable[[Wave], None]

_OUTPUT_MULTIPLIERS = {"mul:2": 2.0, "mul:4": 4.0, "div:2": 0.5}
_F16_MAX = np.float16(65504)


def bind_valu(inst: Instruction, registers: RegisterFile) -> Execute | None:
    """A closure that executes the instruction, or None if this module does not know it."""
    if inst.opcode in _SPECIAL_BINDERS:
        if (inst.is_sdwa and inst.opcode not in _SDWA_SPECIALS) or inst.is_dpp:
            raise UnsupportedInstruction(f"{inst.mnemonic}: SDWA or DPP form")
        return _SPECIAL_BINDERS[inst.opcode](inst, registers)
    if inst.opcode in PACKED_F32_OPS:
        return _bind_packed_f32(inst, registers)
    if inst.opcode in PACKED_16_OPS:
        return _bind_packed_16(inst, registers)
    if inst.opcode in VECTOR_OPS:
        return _bind_generic(inst, registers, VECTOR_OPS[inst.opcode])
    return None


# ---------------------------------------------------------------- generic VOP1/2/3/C


def _bind_generic(inst: Instruction, registers: RegisterFile, op: VectorOp) -> Execute:
    halves = inst.modifier_bits("op_sel", (0,) * (len(op.sources) + 1))
    fetch = _dpp_fetch(inst) if inst.is_dpp else None
    readers = []
    for i, (operand, kind) in enumerate(zip(inst.operands[1:], op.sources, strict=True)):
        select = inst.modifiers.get(f"src{i}_sel")
        readers.append(
            vector_reader(operand, kind, registers, halves[i], select, fetch if i == 0 else None)
        )
    if op.implicit == "dst":
        readers.append(vector_reader(inst.operands[0], op.result, registers))
    elif op.implicit == "vcc":
        readers.append(lambda w: w.vcc_lanes)
    evaluate = _evaluate_in_mode(op, _compute_with_modifiers(inst, op), readers)
    if op.result == "mask":
        return _mask_result(inst, evaluate)
    if inst.is_sdwa:
        write = _sdwa_writer(inst, op.result, registers)
    elif inst.is_dpp:
        write = _dpp_writer(inst, op.result, registers)
    else:
        write = vector_writer(
            inst.operands[0], op.result, registers, halves[len(op.sources)], op.keeps_other_half
        )

    def execute(w: Wave) -> None:
        write(w, evaluate(w))

    return execute


def _evaluate(compute: Callable[..., np.ndarray], readers: list[VectorReader]) -> VectorReader:
    if len(readers) == 1:
        (a,) = readers
        return lambda w: compute(a(w))
    if len(readers) == 2:
        a, b = readers
        return lambda w: compute(a(w), b(w))
    if len(readers) == 3:
        a, b, c = readers
        return lambda w: compute(a(w), b(w), c(w))
    return lambda w: compute(*[read(w) for read in readers])


def _compute_with_modifiers(inst: Instruction, op: VectorOp) -> Callable[..., np.ndarray]:
    """The operation followed by its output modifiers: omod, then clamp."""
    compute = op.compute
    for name, value in inst.modifiers.items():
        if factor := _OUTPUT_MULTIPLIERS.get(f"{name}:{value}"):
            compute = _then(compute, _multiply_by(factor))
    if "clamp" not in inst.modifiers or op.result == "mask":
        return compute
    if op.result.startswith("f"):
        return _then(compute, _clamp_unit)
    if op.saturating is None:
        raise UnsupportedInstruction(f"{inst.mnemonic} with clamp")
    return op.saturating


def _then(
    first: Callable[..., np.ndarray], second: Callable[[np.ndarray], np.ndarray]
) -> Callable[..., np.ndarray]:
    return lambda *args: second(first(*args))


def _multiply_by(factor: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: x * x.dtype.type(factor)


def _clamp_unit(x: np.ndarray) -> np.ndarray:
    """Clamp to [0, 1]; NaN becomes 0 (DX10_CLAMP)."""
    one = x.dtype.type(1)
    return np.where(np.isnan(x), x.dtype.type(0), np.clip(x, 0 * one, one))


def _evaluate_in_mode(
    op: VectorOp, compute: Callable[..., np.ndarray], readers: list[VectorReader]
) -> VectorReader:
    """Evaluate under MODE: f32 denormal flushing and FP16_OVFL clamping of f16 results."""
    evaluate = _evaluate(compute, readers)
    if "f32" in op.sources and op.result in ("f32", "mask"):
        flushes_result = op.result == "f32"

        def evaluate_f32(w: Wave) -> np.ndarray:
            if not w.flushes_f32:
                return evaluate(w)
            value = compute(*[_flush_if_f32(read(w)) for read in readers])
            return flush_denormals(value) if flushes_result else value

        return evaluate_f32
    if op.result == "f16":

        def evaluate_f16(w: Wave) -> np.ndarray:
            value = evaluate(w)
            return _clamp_overflow(value, [read(w) for read in readers]) if w.fp16_ovfl else value

        return evaluate_f16
    return evaluate


def _flush_if_f32(x: np.ndarray) -> np.ndarray:
    return flush_denormals(x) if x.dtype == np.float32 else x


def _clamp_overflow(value: np.ndarray, sources: list[np.ndarray]) -> np.ndarray:
    """FP16_OVFL: an infinity made from finite sources becomes the largest f16."""
    overflow = np.isinf(value)
    for x in sources:
        overflow = overflow & np.isfinite(x)
    return np.where(overflow, np.copysign(_F16_MAX, value), value)


def _mask_result(inst: Instruction, evaluate: VectorReader) -> Execute:
    """Comparisons: inactive lanes give 0; v_cmpx also sets EXEC."""
    destination = sgpr_index(inst.operands[0])
    sets_exec = inst.opcode.startswith("v_cmpx")

    def execute(w: Wave) -> None:
        mask = mask_of(evaluate(w) & w.exec_lanes)
        w.set_s64(destination, mask)
        if sets_exec:
            w.set_exec(mask)

    return execute


# ---------------------------------------------------------------- SDWA


def _sdwa_writer(inst: Instruction, kind: str, registers: RegisterFile) -> VectorWriter:
    select = inst.modifiers.get("dst_sel", "DWORD")
    if select == "DWORD":
        return vector_writer(inst.operands[0], kind, registers)
    row = registers.first_row(inst.operands[0], 1)
    width = 8 if select.startswith("BYTE") else 16
    shift = np.uint32(width * int(select[-1]))
    field = np.uint32((1 << width) - 1)
    unused = inst.modifiers.get("dst_unused", "UNUSED_PAD")
    unsigned = np.dtype(f"u{DTYPES[kind].itemsize}")

    def write(w: Wave, value: np.ndarray) -> None:
        bits = value.view(unsigned).astype(np.uint32) & field
        placed = bits << shift
        if unused == "UNUSED_PRESERVE":
            placed = placed | w.u32[row] & ~(field << shift)
        elif unused == "UNUSED_SEXT":
            negative = bits >> np.uint32(width - 1) != 0
            above = ~np.uint32((1 << (int(shift) + width)) - 1 & 0xFFFFFFFF)
            placed = np.where(negative, placed | above, placed)
        w.write(w.u32[row], placed)

    return write


# ---------------------------------------------------------------- DPP


def _dpp_source_lanes(inst: Instruction) -> tuple[np.ndarray, np.ndarray]:
    """(source lane per lane, whether that lane exists) of a DPP control."""
    lane = LANE_IDS.astype(np.int64)
    row, position = lane // 16, lane % 16
    modifiers = inst.modifiers
    if "quad_perm" in modifiers:
        order = np.array(inst.modifier_bits("quad_perm", ()))
        return lane // 4 * 4 + order[lane % 4], np.ones(WAVE_SIZE, np.bool_)
    for name, value in modifiers.items():
        amount = int(value, 0) if value.isdigit() else 0
        if name in ("row_shl", "row_shr"):
            source = position + (amount if name == "row_shl" else -amount)
            return row * 16 + source % 16, (source >= 0) & (source < 16)
        if name == "row_ror":
            return row * 16 + (position - amount) % 16, np.ones(WAVE_SIZE, np.bool_)
        if name == "row_newbcast":
            return row * 16 + amount, np.ones(WAVE_SIZE, np.bool_)
        if name in ("wave_shl", "wave_shr"):
            source = lane + (amount if name == "wave_shl" else -amount)
            return source % WAVE_SIZE, (source >= 0) & (source < WAVE_SIZE)
        if name in ("wave_rol", "wave_ror"):
            return (lane + (amount if name == "wave_rol" else -amount)) % WAVE_SIZE, np.ones(
                WAVE_SIZE, np.bool_
            )
        if name == "row_mirror":
            return row * 16 + 15 - position, np.ones(WAVE_SIZE, np.bool_)
        if name == "row_half_mirror":
            return lane // 8 * 8 + 7 - lane % 8, np.ones(WAVE_SIZE, np.bool_)
        if name == "row_bcast" and amount == 15:
            return np.maximum(row * 16 - 1, 0), row > 0
        if name == "row_bcast" and amount == 31:
            return np.full(WAVE_SIZE, 31), row >= 2
    raise UnsupportedInstruction(f"{inst.text}: DPP control")


def _dpp_fetch(inst: Instruction) -> LaneFetch:
    source, exists = _dpp_source_lanes(inst)
    zero_fill = "bound_ctrl" in inst.modifiers

    def fetch(w: Wave, values: np.ndarray) -> np.ndarray:
        moved = values[source]
        return (
            np.where(exists & w.exec_lanes[source], moved, moved.dtype.type(0))
            if zero_fill
            else moved
        )

    return fetch


def _dpp_writer(inst: Instruction, kind: str, registers: RegisterFile) -> VectorWriter:
    source, exists = _dpp_source_lanes(inst)
    zero_fill = "bound_ctrl" in inst.modifiers
    row_mask, bank_mask = inst.modifier_int("row_mask", 0xF), inst.modifier_int("bank_mask", 0xF)
    lane = LANE_IDS
    selected = (row_mask >> lane // 16 & 1 != 0) & (bank_mask >> lane % 16 // 4 & 1 != 0)
    row = registers.first_row(inst.operands[0], 1)
    size = DTYPES[kind].itemsize
    if size not in (2, 4):
        raise UnsupportedInstruction(f"{inst.mnemonic}: DPP on {kind}")
    bits = np.uint32 if size == 4 else np.uint16  # the upper half becomes zero

    def write(w: Wave, value: np.ndarray) -> None:
        lanes = w.exec_lanes & selected
        if not zero_fill:
            lanes = lanes & exists & w.exec_lanes[source]
        np.copyto(w.u32[row], value.view(bits), where=lanes)

    return write


# ---------------------------------------------------------------- packed


def _packed_f32_reader(inst: Instruction, index: int, registers: RegisterFile) -> VectorReader:
    """Source `index` of a v_pk_*_f32 as an array broadcastable to [2, 64]."""
    operand = inst.operands[1 + index]
    low = inst.modifier_bits("op_sel", (0, 0, 0))[index]
    high = inst.modifier_bits("op_sel_hi", (1, 1, 1))[index]
    if is_vector(operand):
        row = registers.first_row(operand, 2)
        if (low, high) == (0, 1):

            def read(w):
                return w.vgpr_f32[row : row + 2]
        elif low == high:

            def read(w):
                return w.f32[row + low]
        else:

            def read(w):
                return w.vgpr_f32[row : row + 2][::-1]
    elif isinstance(operand.value, Immediate):
        bits = immediate_bits(operand.value, "f32")
        constant = np.array([[bits * (1 - half)] for half in (low, high)], np.uint32).view(
            np.float32
        )

        def read(w):
            return constant
    else:
        first = sgpr_index(operand)

        def read(w):
            return np.array([[w.sgpr[first + low]], [w.sgpr[first + high]]], np.uint32).view(
                np.float32
            )

    negations = [inst.modifier_bits(name, (0, 0, 0))[index] for name in ("neg_lo", "neg_hi")]
    if not any(negations):
        return read
    flips = np.array([[bit << 31] for bit in negations], np.uint32)
    return lambda w: (read(w).view(np.uint32) ^ flips).view(np.float32)


def _bind_packed_f32(inst: Instruction, registers: RegisterFile) -> Execute:
    if "clamp" in inst.modifiers:
        raise UnsupportedInstruction(f"{inst.mnemonic} with clamp")
    compute = PACKED_F32_OPS[inst.opcode]
    readers = [_packed_f32_reader(inst, i, registers) for i in range(len(inst.operands) - 1)]
    evaluate = _evaluate(compute, readers)
    row = registers.first_row(inst.operands[0], 2)

    def execute(w: Wave) -> None:
        if w.flushes_f32:
            value = flush_denormals(compute(*[flush_denormals(read(w)) for read in readers]))
        else:
            value = evaluate(w)
        w.write(w.vgpr_f32[row : row + 2], value)

    return execute


def _bind_packed_16(inst: Instruction, registers: RegisterFile) -> Execute:
    op = PACKED_16_OPS[inst.opcode]
    if "clamp" in inst.modifiers:
        raise UnsupportedInstruction(f"{inst.mnemonic} with clamp")
    results = []
    for half_name, negate_name, default in (("op_sel", "neg_lo", 0), ("op_sel_hi", "neg_hi", 1)):
        halves = inst.modifier_bits(half_name, (default,) * 3)
        negations = inst.modifier_bits(negate_name, (0, 0, 0))
        readers = []
        for i, kind in enumerate(op.sources):
            operand = inst.operands[1 + i]
            signed = Operand(operand.value, negate=bool(negations[i]))
            if isinstance(operand.value, Immediate):
                readers.append(_packed_16_immediate(operand.value, signed.negate, kind, halves[i]))
            else:
                readers.append(vector_reader(signed, kind, registers, half=halves[i]))
        results.append(_evaluate_in_mode(op, op.compute, readers))
    row = registers.first_row(inst.operands[0], 1)
    low, high = results

    def execute(w: Wave) -> None:
        w.write(w.u32[row], pack16(low(w), high(w)))

    return execute


def _packed_16_immediate(immediate: Immediate, negate: bool, kind: str, half: int) -> VectorReader:
    """One half of a 32-bit constant: an inline float sits in the low half."""
    source = "f16" if isinstance(immediate.value, float) else "u32"
    bits = immediate_bits(immediate, source) >> 16 * half & 0xFFFF
    if negate:
        bits ^= 0x8000
    constant = np.uint16(bits).view(DTYPES[kind])
    return lambda w: constant


# ---------------------------------------------------------------- special opcodes


def _bind_carry(add: bool, reverse: bool = False, carry_in: bool = False):
    """v_{add,sub,subrev}[_c]_co_u32: a carry or borrow per lane in an SGPR pair."""

    def bind(inst: Instruction, registers: RegisterFile) -> Execute:
        write = vector_writer(inst.operands[0], "u32", registers)
        carry_out = sgpr_index(inst.operands[1])
        a, b = (vector_reader(operand, "u32", registers) for operand in inst.operands[2:4])
        if reverse:
            a, b = b, a
        carry_source = scalar_reader(inst.operands[4], "u64") if carry_in else None

        def execute(w: Wave) -> None:
            x, y = a(w).astype(np.int64), b(w).astype(np.int64)
            carry = lanes_of(carry_source(w)).astype(np.int64) if carry_source else 0
            wide = x + y + carry if add else x - y - carry
            carried = np.broadcast_to((wide >> 32) != 0, (WAVE_SIZE,))
            write(w, wide.astype(np.uint32))
            w.set_s64(carry_out, mask_of(carried & w.exec_lanes))

        return execute

    return bind


def _bind_mad_64(signed: bool):
    def bind(inst: Instruction, registers: RegisterFile) -> Execute:
        kind, wide_kind = ("i32", "i64") if signed else ("u32", "u64")
        wide = DTYPES[wide_kind]
        write = vector_writer(inst.operands[0], wide_kind, registers)
        carry_out = sgpr_index(inst.operands[1])
        a, b = (vector_reader(operand, kind, registers) for operand in inst.operands[2:4])
        c = vector_reader(inst.operands[4], wide_kind, registers)

        def execute(w: Wave) -> None:
            product, addend = a(w).astype(wide) * b(w).astype(wide), c(w)
            total = np.broadcast_to(product + addend, (WAVE_SIZE,))
            overflow = (total < product) != (addend < 0) if signed else total < product
            write(w, total)
            w.set_s64(carry_out, mask_of(overflow & w.exec_lanes))

        return execute

    return bind


def _bind_div_scale(inst: Instruction, registers: RegisterFile) -> Execute:
    kind = inst.opcode[-3:]
    write = vector_writer(inst.operands[0], kind, registers)
    flag = sgpr_index(inst.operands[1])
    readers = [vector_reader(operand, kind, registers) for operand in inst.operands[2:5]]

    def execute(w: Wave) -> None:
        value, scaled = div_scale(*[read(w) for read in readers])
        write(w, value)
        w.set_s64(flag, mask_of(scaled & w.exec_lanes))

    return execute


def _bind_readfirstlane(inst: Instruction, registers: RegisterFile) -> Execute:
    destination = sgpr_index(inst.operands[0])
    row = registers.first_row(inst.operands[1])

    def execute(w: Wave) -> None:
        active = w.exec
        lane = (active & -active).bit_length() - 1 if active else 0
        w.set_s32(destination, int(w.u32[row][lane]))

    return execute


def _bind_readlane(inst: Instruction, registers: RegisterFile) -> Execute:
    destination = sgpr_index(inst.operands[0])
    row = registers.first_row(inst.operands[1])
    lane = scalar_reader(inst.operands[2], "u32")

    def execute(w: Wave) -> None:
        w.set_s32(destination, int(w.u32[row][lane(w) % WAVE_SIZE]))

    return execute


def _bind_writelane(inst: Instruction, registers: RegisterFile) -> Execute:
    row = registers.first_row(inst.operands[0])
    value = scalar_reader(inst.operands[1], "u32")
    lane = scalar_reader(inst.operands[2], "u32")

    def execute(w: Wave) -> None:
        w.u32[row][lane(w) % WAVE_SIZE] = value(w)

    return execute


def _bind_swap(inst: Instruction, registers: RegisterFile) -> Execute:
    first, second = (registers.first_row(operand) for operand in inst.operands)

    def execute(w: Wave) -> None:
        kept = w.u32[first].copy()
        w.write(w.u32[first], w.u32[second])
        w.write(w.u32[second], kept)

    return execute


def _bind_accvgpr(inst: Instruction, registers: RegisterFile) -> Execute:
    """v_accvgpr_{read,write,mov}_b32: a move in the unified register file."""
    write = vector_writer(inst.operands[0], "u32", registers)
    read = vector_reader(inst.operands[1], "u32", registers)
    return lambda w: write(w, read(w))


def _bind_pk_mov(inst: Instruction, registers: RegisterFile) -> Execute:
    low_half, high_half = inst.modifier_bits("op_sel", (0, 0))[:2]
    row = registers.first_row(inst.operands[0], 2)
    low = _pair_element_reader(inst.operands[1], low_half, registers)
    high = _pair_element_reader(inst.operands[2], high_half, registers)

    def execute(w: Wave) -> None:
        value = np.empty((2, WAVE_SIZE), np.uint32)
        value[0], value[1] = low(w), high(w)
        w.write(w.vgpr[row : row + 2], value)

    return execute


def _pair_element_reader(operand: Operand, element: int, registers: RegisterFile) -> VectorReader:
    if is_vector(operand):
        row = registers.first_row(operand, 2) + element
        return lambda w: w.u32[row]
    if isinstance(operand.value, Immediate):
        bits = np.uint32(immediate_bits(operand.value, "f32") if element == 0 else 0)
        return lambda w: bits
    index = sgpr_index(operand) + element
    return lambda w: np.uint32(w.sgpr[index])


def _bind_encode_fp8(fp8: Fp8Format):
    """v_cvt_pk_{fp8,bf8}_f32: two codes into one half of the destination (op_sel[2])."""

    def bind(inst: Instruction, registers: RegisterFile) -> Execute:
        half = inst.modifier_bits("op_sel", (0, 0, 0))[2]
        a, b = (vector_reader(operand, "f32", registers) for operand in inst.operands[1:3])
        write = vector_writer(inst.operands[0], "u16", registers, half, keep_other_half=True)

        def execute(w: Wave) -> None:
            saturate = w.fp16_ovfl
            low, high = fp8.encode(a(w), saturate), fp8.encode(b(w), saturate)
            write(w, low.astype(np.uint16) | high.astype(np.uint16) << np.uint16(8))

        return execute

    return bind


def _bind_decode_fp8(fp8: Fp8Format):
    """v_cvt_f32_{fp8,bf8}: one code, byte 0 unless SDWA selects another."""

    def bind(inst: Instruction, registers: RegisterFile) -> Execute:
        write = vector_writer(inst.operands[0], "f32", registers)
        read = vector_reader(
            inst.operands[1], "u32", registers, select=inst.modifiers.get("src0_sel", "BYTE_0")
        )
        return lambda w: write(w, fp8.decode(read(w) & np.uint32(0xFF)))

    return bind


def _bind_decode_pk_fp8(fp8: Fp8Format):
    """v_cvt_pk_f32_{fp8,bf8}: two codes, of the low half unless SDWA selects the high one."""

    def bind(inst: Instruction, registers: RegisterFile) -> Execute:
        row = registers.first_row(inst.operands[0], 2)
        read = vector_reader(
            inst.operands[1], "u32", registers, select=inst.modifiers.get("src0_sel")
        )

        def execute(w: Wave) -> None:
            codes = np.broadcast_to(read(w), (WAVE_SIZE,))
            pair = np.stack([codes & np.uint32(0xFF), codes >> np.uint32(8) & np.uint32(0xFF)])
            w.write(w.vgpr_f32[row : row + 2], fp8.decode(pair))

        return execute

    return bind


def _bind_fma_mix(half: int | None):
    """v_fma_mix_f32 and v_fma_mix{lo,hi}_f16: each source is f32, or an f16 half (op_sel_hi)."""

    def bind(inst: Instruction, registers: RegisterFile) -> Execute:
        is_f16 = inst.modifier_bits("op_sel_hi", (0, 0, 0))
        halves = inst.modifier_bits("op_sel", (0, 0, 0))
        readers = [
            vector_reader(
                operand,
                "f16" if is_f16[i] else "f32",
                registers,
                half=halves[i] if is_f16[i] else 0,
            )
            for i, operand in enumerate(inst.operands[1:4])
        ]
        clamp = "clamp" in inst.modifiers

        def evaluate(w: Wave) -> np.ndarray:
            value = fma_f32(*[read(w).astype(np.float32) for read in readers])
            return _clamp_unit(value) if clamp else value

        if half is None:
            write = vector_writer(inst.operands[0], "f32", registers)
            return lambda w: write(w, evaluate(w))
        write = vector_writer(inst.operands[0], "f16", registers, half, keep_other_half=True)
        return lambda w: write(w, evaluate(w).astype(np.float16))

    return bind


def _bind_nop(inst: Instruction, registers: RegisterFile) -> Execute:
    return lambda w: None


_SPECIAL_BINDERS: dict[str, Callable[[Instruction, RegisterFile], Execute]] = {
    "v_nop": _bind_nop,
    "v_add_co_u32": _bind_carry(add=True),
    "v_sub_co_u32": _bind_carry(add=False),
    "v_subrev_co_u32": _bind_carry(add=False, reverse=True),
    "v_addc_co_u32": _bind_carry(add=True, carry_in=True),
    "v_subb_co_u32": _bind_carry(add=False, carry_in=True),
    "v_subbrev_co_u32": _bind_carry(add=False, reverse=True, carry_in=True),
    "v_mad_u64_u32": _bind_mad_64(signed=False),
    "v_mad_i64_i32": _bind_mad_64(signed=True),
    "v_div_scale_f32": _bind_div_scale,
    "v_div_scale_f64": _bind_div_scale,
    "v_readfirstlane_b32": _bind_readfirstlane,
    "v_readlane_b32": _bind_readlane,
    "v_writelane_b32": _bind_writelane,
    "v_swap_b32": _bind_swap,
    "v_accvgpr_read_b32": _bind_accvgpr,
    "v_accvgpr_write_b32": _bind_accvgpr,
    "v_accvgpr_mov_b32": _bind_accvgpr,
    "v_pk_mov_b32": _bind_pk_mov,
    "v_cvt_pk_fp8_f32": _bind_encode_fp8(FP8),
    "v_cvt_pk_bf8_f32": _bind_encode_fp8(BF8),
    "v_cvt_f32_fp8": _bind_decode_fp8(FP8),
    "v_cvt_f32_bf8": _bind_decode_fp8(BF8),
    "v_cvt_pk_f32_fp8": _bind_decode_pk_fp8(FP8),
    "v_cvt_pk_f32_bf8": _bind_decode_pk_fp8(BF8),
    "v_fma_mix_f32": _bind_fma_mix(None),
    "v_fma_mixlo_f16": _bind_fma_mix(0),
    "v_fma_mixhi_f16": _bind_fma_mix(1),
}
_SDWA_SPECIALS = ("v_cvt_f32_fp8", "v_cvt_f32_bf8", "v_cvt_pk_f32_fp8", "v_cvt_pk_f32_bf8")
