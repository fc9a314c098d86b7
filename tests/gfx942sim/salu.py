# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Bind scalar ALU instructions (SOP1, SOP2, SOPC, SOPK); SGPR values are unsigned Python ints."""

from __future__ import annotations

from collections.abc import Callable

from jaxfp8.rocm.disassembly import Instruction, Operand, Symbolic
from tests.gfx942sim.errors import UnsupportedInstruction
from tests.gfx942sim.operands import ScalarReader, scalar_reader, sgpr_index
from tests.gfx942sim.wave import EXEC, VCC, Wave

Execute = Callable[[Wave], None]

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


def signed32(x: int) -> int:
    return x - (1 << 32) if x >> 31 & 1 else x


def signed64(x: int) -> int:
    return x - (1 << 64) if x >> 63 & 1 else x


def _signed16(x: int) -> int:
    x &= 0xFFFF
    return x - 0x10000 if x & 0x8000 else x


def bind_salu(inst: Instruction) -> Execute | None:
    """A closure that executes the instruction, or None if this module does not know it."""
    opcode = inst.opcode
    if opcode in _BINARY:
        return _bind_binary(inst, *_BINARY[opcode])
    if opcode in _UNARY:
        return _bind_unary(inst, *_UNARY[opcode])
    if opcode in _COMPARE:
        return _bind_compare(inst, *_COMPARE[opcode])
    if opcode in _SPECIAL:
        return _SPECIAL[opcode](inst)
    if opcode.endswith("_saveexec_b64") and opcode[2:-13] in _LOGIC:
        return _bind_saveexec(inst, _LOGIC[opcode[2:-13]])
    if opcode.startswith("s_cmpk_"):
        return _bind_compare_constant(inst, *_COMPARE[opcode.replace("cmpk", "cmp")])
    return None


def _writer(operand: Operand, width: int) -> Callable[[Wave, int], None]:
    index = sgpr_index(operand)
    if width == 64:
        return lambda w, value: w.set_s64(index, value)
    return lambda w, value: w.set_s32(index, value)


def _reader(operand: Operand, width: int) -> ScalarReader:
    return scalar_reader(operand, f"u{width}")


# Each entry: function of unsigned ints, operand width, how SCC is set.
# SCC rules: "keep", "nonzero", or "returned" (the function returns (value, scc)).


def _bind_binary(
    inst: Instruction, compute, width: int, scc: str, b_width: int | None = None
) -> Execute:
    write = _writer(inst.operands[0], width)
    a, b = _reader(inst.operands[1], width), _reader(inst.operands[2], b_width or width)
    mask = (1 << width) - 1

    def execute(w: Wave) -> None:
        value = compute(a(w), b(w))
        if scc == "returned":
            value, w.scc = value
        value &= mask
        if scc == "nonzero":
            w.scc = int(value != 0)
        write(w, value)

    return execute


def _bind_unary(
    inst: Instruction, compute, source_width: int, width: int, sets_scc: bool
) -> Execute:
    write = _writer(inst.operands[0], width)
    a = _reader(inst.operands[1], source_width)
    mask = (1 << width) - 1

    def execute(w: Wave) -> None:
        value = compute(a(w)) & mask
        if sets_scc:
            w.scc = int(value != 0)
        write(w, value)

    return execute


def _bind_compare(inst: Instruction, test, width: int, is_signed: bool) -> Execute:
    a, b = _reader(inst.operands[0], width), _reader(inst.operands[1], width)
    convert = {(32, True): signed32, (64, True): signed64}.get((width, is_signed), lambda x: x)

    def execute(w: Wave) -> None:
        w.scc = int(test(convert(a(w)), convert(b(w))))

    return execute


def _bind_compare_constant(inst: Instruction, test, _width: int, is_signed: bool) -> Execute:
    a = _reader(inst.operands[0], 32)
    if is_signed:
        signed_constant = _simm16(inst)
        return lambda w: setattr(w, "scc", int(test(signed32(a(w)), signed_constant)))
    constant = inst.words[0] & 0xFFFF
    return lambda w: setattr(w, "scc", int(test(a(w), constant)))


def _bind_saveexec(inst: Instruction, logic) -> Execute:
    write, read = _writer(inst.operands[0], 64), _reader(inst.operands[1], 64)

    def execute(w: Wave) -> None:
        before, source = w.exec, read(w)
        mask = logic(source, before) & _MASK64
        write(w, before)
        w.set_exec(mask)
        w.scc = int(mask != 0)

    return execute


_LOGIC = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
    "andn1": lambda a, b: ~a & b,
    "orn1": lambda a, b: ~a | b,
}


def _overflow(exact: int) -> tuple[int, int]:
    return exact, int(not -(1 << 31) <= exact < 1 << 31)


def _field(x: int, spec: int, offset_mask: int) -> int:
    return x >> (spec & offset_mask) & (1 << (spec >> 16 & 0x7F)) - 1


def _signed_field(x: int, spec: int, offset_mask: int, width_limit: int) -> int:
    width = min(spec >> 16 & 0x7F, width_limit)
    if width == 0:
        return 0
    field = (x >> (spec & offset_mask)) & (1 << width) - 1
    return field - (1 << width) if field >> (width - 1) else field


def _pack(a: int, b: int) -> int:
    return a & 0xFFFF | (b & 0xFFFF) << 16


_BINARY: dict[str, tuple] = {
    "s_add_u32": (lambda a, b: (a + b, int(a + b > _MASK32)), 32, "returned"),
    "s_sub_u32": (lambda a, b: (a - b, int(a < b)), 32, "returned"),
    "s_add_i32": (lambda a, b: _overflow(signed32(a) + signed32(b)), 32, "returned"),
    "s_sub_i32": (lambda a, b: _overflow(signed32(a) - signed32(b)), 32, "returned"),
    "s_min_u32": (lambda a, b: (min(a, b), int(a < b)), 32, "returned"),
    "s_max_u32": (lambda a, b: (max(a, b), int(a > b)), 32, "returned"),
    "s_min_i32": (
        lambda a, b: (min(signed32(a), signed32(b)), int(signed32(a) < signed32(b))),
        32,
        "returned",
    ),
    "s_max_i32": (
        lambda a, b: (max(signed32(a), signed32(b)), int(signed32(a) > signed32(b))),
        32,
        "returned",
    ),
    "s_mul_i32": (lambda a, b: a * b, 32, "keep"),
    "s_mul_hi_u32": (lambda a, b: a * b >> 32, 32, "keep"),
    "s_mul_hi_i32": (lambda a, b: signed32(a) * signed32(b) >> 32, 32, "keep"),
    "s_absdiff_i32": (lambda a, b: abs(signed32(a) - signed32(b)), 32, "nonzero"),
    "s_lshl_b32": (lambda a, b: a << (b & 31), 32, "nonzero"),
    "s_lshr_b32": (lambda a, b: a >> (b & 31), 32, "nonzero"),
    "s_ashr_i32": (lambda a, b: signed32(a) >> (b & 31), 32, "nonzero"),
    "s_lshl_b64": (lambda a, b: a << (b & 63), 64, "nonzero", 32),
    "s_lshr_b64": (lambda a, b: a >> (b & 63), 64, "nonzero", 32),
    "s_ashr_i64": (lambda a, b: signed64(a) >> (b & 63), 64, "nonzero", 32),
    "s_bfe_u32": (lambda a, b: _field(a, b, 31), 32, "nonzero"),
    "s_bfe_i32": (lambda a, b: _signed_field(a, b, 31, 32), 32, "nonzero"),
    "s_bfe_u64": (lambda a, b: _field(a, b, 63), 64, "nonzero", 32),
    "s_bfe_i64": (lambda a, b: _signed_field(a, b, 63, 64), 64, "nonzero", 32),
    "s_bfm_b32": (lambda a, b: ((1 << (a & 31)) - 1) << (b & 31), 32, "keep"),
    "s_pack_ll_b32_b16": (_pack, 32, "keep"),
    "s_pack_lh_b32_b16": (lambda a, b: _pack(a, b >> 16), 32, "keep"),
    "s_pack_hh_b32_b16": (lambda a, b: _pack(a >> 16, b >> 16), 32, "keep"),
}
for _shift in range(1, 5):
    _BINARY[f"s_lshl{_shift}_add_u32"] = (
        lambda a, b, shift=_shift: ((a << shift) + b, int((a << shift) + b > _MASK32)),
        32,
        "returned",
    )
for _name in ("and", "or", "xor", "andn2", "orn2", "nand", "nor", "xnor"):
    _BINARY[f"s_{_name}_b32"] = (_LOGIC[_name], 32, "nonzero")
    _BINARY[f"s_{_name}_b64"] = (_LOGIC[_name], 64, "nonzero")


def _first_set(x: int) -> int:
    return (x & -x).bit_length() - 1


def _leading_zeros(x: int, width: int) -> int:
    return width - x.bit_length() if x else -1


def _leading_sign_bits(x: int, width: int) -> int:
    flipped = ~x & (1 << width) - 1 if x >> (width - 1) else x
    return _leading_zeros(flipped, width)


def _reverse(x: int, width: int) -> int:
    return int(f"{x:0{width}b}"[::-1], 2)


# opcode: (function, source width, result width, sets SCC to "result is not zero")
_UNARY: dict[str, tuple] = {
    "s_mov_b32": (lambda a: a, 32, 32, False),
    "s_mov_b64": (lambda a: a, 64, 64, False),
    "s_not_b32": (lambda a: ~a, 32, 32, True),
    "s_not_b64": (lambda a: ~a, 64, 64, True),
    "s_brev_b32": (lambda a: _reverse(a, 32), 32, 32, False),
    "s_brev_b64": (lambda a: _reverse(a, 64), 64, 64, False),
    "s_bcnt0_i32_b32": (lambda a: 32 - a.bit_count(), 32, 32, True),
    "s_bcnt0_i32_b64": (lambda a: 64 - a.bit_count(), 64, 32, True),
    "s_bcnt1_i32_b32": (lambda a: a.bit_count(), 32, 32, True),
    "s_bcnt1_i32_b64": (lambda a: a.bit_count(), 64, 32, True),
    "s_ff1_i32_b32": (_first_set, 32, 32, False),
    "s_ff1_i32_b64": (_first_set, 64, 32, False),
    "s_ff0_i32_b32": (lambda a: _first_set(~a & _MASK32), 32, 32, False),
    "s_ff0_i32_b64": (lambda a: _first_set(~a & _MASK64), 64, 32, False),
    "s_flbit_i32_b32": (lambda a: _leading_zeros(a, 32), 32, 32, False),
    "s_flbit_i32_b64": (lambda a: _leading_zeros(a, 64), 64, 32, False),
    "s_flbit_i32": (lambda a: _leading_sign_bits(a, 32), 32, 32, False),
    "s_flbit_i32_i64": (lambda a: _leading_sign_bits(a, 64), 64, 32, False),
    "s_sext_i32_i8": (lambda a: (a & 0xFF) - ((a & 0x80) << 1), 32, 32, False),
    "s_sext_i32_i16": (_signed16, 32, 32, False),
    "s_abs_i32": (lambda a: abs(signed32(a)), 32, 32, True),
}

_TESTS = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}

# opcode: (test, operand width, signed)
_COMPARE: dict[str, tuple] = {
    "s_cmp_eq_u64": (_TESTS["eq"], 64, False),
    "s_cmp_lg_u64": (_TESTS["lg"], 64, False),
    "s_bitcmp0_b32": (lambda a, b: not a >> (b & 31) & 1, 32, False),
    "s_bitcmp1_b32": (lambda a, b: a >> (b & 31) & 1, 32, False),
}
for _name, _test in _TESTS.items():
    _COMPARE[f"s_cmp_{_name}_i32"] = (_test, 32, True)
    _COMPARE[f"s_cmp_{_name}_u32"] = (_test, 32, False)


def _bind_carry(sign: int):
    """s_addc_u32 and s_subb_u32."""

    def bind(inst: Instruction) -> Execute:
        write = _writer(inst.operands[0], 32)
        a, b = _reader(inst.operands[1], 32), _reader(inst.operands[2], 32)

        def execute(w: Wave) -> None:
            total = a(w) + sign * (b(w) + w.scc)
            w.scc = int(not 0 <= total <= _MASK32)
            write(w, total & _MASK32)

        return execute

    return bind


def _bind_cselect(width: int):
    def bind(inst: Instruction) -> Execute:
        write = _writer(inst.operands[0], width)
        a, b = _reader(inst.operands[1], width), _reader(inst.operands[2], width)
        return lambda w: write(w, a(w) if w.scc else b(w))

    return bind


def _bind_cmov(width: int):
    def bind(inst: Instruction) -> Execute:
        write, read = _writer(inst.operands[0], width), _reader(inst.operands[1], width)

        def execute(w: Wave) -> None:
            if w.scc:
                write(w, read(w))

        return execute

    return bind


def _simm16(inst: Instruction) -> int:
    return _signed16(inst.words[0])


def _bind_movk(inst: Instruction) -> Execute:
    write, value = _writer(inst.operands[0], 32), _simm16(inst) & _MASK32
    return lambda w: write(w, value)


def _bind_cmovk(inst: Instruction) -> Execute:
    write, value = _writer(inst.operands[0], 32), _simm16(inst) & _MASK32

    def execute(w: Wave) -> None:
        if w.scc:
            write(w, value)

    return execute


def _bind_addk(inst: Instruction) -> Execute:
    write, read, value = _writer(inst.operands[0], 32), _reader(inst.operands[0], 32), _simm16(inst)

    def execute(w: Wave) -> None:
        total, w.scc = _overflow(signed32(read(w)) + value)
        write(w, total & _MASK32)

    return execute


def _bind_mulk(inst: Instruction) -> Execute:
    write, read, value = _writer(inst.operands[0], 32), _reader(inst.operands[0], 32), _simm16(inst)
    return lambda w: write(w, read(w) * value & _MASK32)


def _bind_bitset(bit: int):
    def bind(inst: Instruction) -> Execute:
        write, old = _writer(inst.operands[0], 32), _reader(inst.operands[0], 32)
        position = _reader(inst.operands[1], 32)

        def execute(w: Wave) -> None:
            selected = 1 << (position(w) & 31)
            write(w, old(w) | selected if bit else old(w) & ~selected)

        return execute

    return bind


def _bind_wrexec(logic):
    """s_and{n1,n2}_wrexec_b64: the same value into EXEC and the destination."""

    def bind(inst: Instruction) -> Execute:
        write, read = _writer(inst.operands[0], 64), _reader(inst.operands[1], 64)

        def execute(w: Wave) -> None:
            mask = logic(read(w), w.exec) & _MASK64
            w.set_exec(mask)
            write(w, mask)
            w.scc = int(mask != 0)

        return execute

    return bind


_HWREG_MODE = "HW_REG_MODE"


def _mode_field(operand: Operand) -> tuple[int, int]:
    """(offset, width) of a `hwreg(HW_REG_MODE, offset, width)` operand."""
    if not isinstance(operand.value, Symbolic) or not operand.value.text.startswith(
        f"hwreg({_HWREG_MODE}"
    ):
        raise UnsupportedInstruction(f"hardware register {operand.value}")
    fields = operand.value.text.removeprefix("hwreg(").removesuffix(")").split(",")
    if len(fields) == 1:
        return 0, 32
    return int(fields[1]), int(fields[2])


def _bind_setreg(inst: Instruction) -> Execute:
    offset, width = _mode_field(inst.operands[0])
    read = _reader(inst.operands[1], 32)
    mask = (1 << width) - 1

    def execute(w: Wave) -> None:
        w.set_mode(w.mode & ~(mask << offset) | (read(w) & mask) << offset)

    return execute


def _bind_getreg(inst: Instruction) -> Execute:
    write = _writer(inst.operands[0], 32)
    offset, width = _mode_field(inst.operands[1])
    return lambda w: write(w, w.mode >> offset & (1 << width) - 1)


_SPECIAL: dict[str, Callable[[Instruction], Execute]] = {
    "s_addc_u32": _bind_carry(+1),
    "s_subb_u32": _bind_carry(-1),
    "s_cselect_b32": _bind_cselect(32),
    "s_cselect_b64": _bind_cselect(64),
    "s_cmov_b32": _bind_cmov(32),
    "s_cmov_b64": _bind_cmov(64),
    "s_movk_i32": _bind_movk,
    "s_cmovk_i32": _bind_cmovk,
    "s_addk_i32": _bind_addk,
    "s_mulk_i32": _bind_mulk,
    "s_bitset0_b32": _bind_bitset(0),
    "s_bitset1_b32": _bind_bitset(1),
    "s_andn1_wrexec_b64": _bind_wrexec(_LOGIC["andn1"]),
    "s_andn2_wrexec_b64": _bind_wrexec(_LOGIC["andn2"]),
    "s_setreg_b32": _bind_setreg,
    "s_setreg_imm32_b32": _bind_setreg,
    "s_getreg_b32": _bind_getreg,
}

# Conditional branches: whether the branch is taken.
BRANCH_CONDITIONS: dict[str, Callable[[Wave], bool]] = {
    "s_branch": lambda w: True,
    "s_cbranch_scc0": lambda w: not w.scc,
    "s_cbranch_scc1": lambda w: bool(w.scc),
    "s_cbranch_vccz": lambda w: w.get_s64(VCC) == 0,
    "s_cbranch_vccnz": lambda w: w.get_s64(VCC) != 0,
    "s_cbranch_execz": lambda w: w.get_s64(EXEC) == 0,
    "s_cbranch_execnz": lambda w: w.get_s64(EXEC) != 0,
}
