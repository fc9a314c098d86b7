# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Bind LDS (DS) instructions, including the cross-lane ones that only use its crossbar."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from jaxfp8.rocm.disassembly import Instruction
from tests.gfx942sim.atomics import LDS_ATOMICS
from tests.gfx942sim.operands import RegisterFile
from tests.gfx942sim.vmem import Access
from tests.gfx942sim.wave import LANE_IDS, WAVE_SIZE, Wave

Execute = Callable[[Wave], None]

_ACCESS_NAMES = {
    "b8": "byte", "u8": "ubyte", "i8": "sbyte", "b16": "short", "u16": "ushort", "i16": "sshort",
    "b32": "dword", "b64": "dwordx2", "b96": "dwordx3", "b128": "dwordx4",
}  # fmt: skip


def bind_lds(inst: Instruction, registers: RegisterFile) -> Execute | None:
    """A closure that executes the instruction, or None if this module does not know it."""
    opcode = inst.opcode
    if match := re.fullmatch(r"ds_(read|write)2(st64)?_b(32|64)", opcode):
        return _bind_two(inst, registers, match[1], int(match[3]) // 8, stride_64=bool(match[2]))
    if match := re.fullmatch(r"ds_(read|write)_([bui]\d+)((?:_d16)?(?:_hi)?)", opcode):
        access = Access.parse(_ACCESS_NAMES[match[2]] + match[3])
        return _bind_one(inst, registers, match[1], access)
    if opcode in ("ds_bpermute_b32", "ds_permute_b32"):
        return _bind_permute(inst, registers, push=opcode == "ds_permute_b32")
    if opcode == "ds_swizzle_b32":
        return _bind_swizzle(inst, registers)
    if match := re.fullmatch(r"ds_(\w+?)(_rtn)?(_\w\d+|_f16|_bf16)", opcode):
        name = match[1] + match[3]
        if name in LDS_ATOMICS:
            return _bind_atomic(inst, registers, name, returns=bool(match[2]) or "wrxchg" in name)
    return None


def _offsets(w: Wave, row: int, constant: int) -> np.ndarray:
    """LDS byte offsets of the active lanes."""
    base = w.u32[row] if w.exec_full else w.u32[row][w.exec_lanes]
    return base.astype(np.int64) + constant


def _bind_one(inst: Instruction, registers: RegisterFile, action: str, access: Access) -> Execute:
    vdata, vaddr = inst.operands if action == "read" else inst.operands[::-1]
    data_row, address_row = (
        registers.first_row(vdata, access.registers),
        registers.first_row(vaddr, 1),
    )
    offset, nbytes = inst.modifier_int("offset"), access.nbytes

    def read(w: Wave) -> None:
        offsets = _offsets(w, address_row, offset)
        if offsets.size:
            access.write_registers(w, data_row, w.workgroup.lds.load(w.index, offsets, nbytes))
            w.workgroup.traffic.lds_load_bytes += nbytes * offsets.size

    def write(w: Wave) -> None:
        offsets = _offsets(w, address_row, offset)
        if offsets.size:
            w.workgroup.lds.store(w.index, offsets, access.read_registers(w, data_row), nbytes)
            w.workgroup.traffic.lds_store_bytes += nbytes * offsets.size

    return read if action == "read" else write


def _bind_two(
    inst: Instruction, registers: RegisterFile, action: str, nbytes: int, stride_64: bool
) -> Execute:
    """ds_read2/write2: two elements per lane, at offsets in units of the element (times 64)."""
    access = Access(nbytes)
    count = access.registers
    unit = nbytes * (64 if stride_64 else 1)
    constants = [inst.modifier_int(name) * unit for name in ("offset0", "offset1")]
    if action == "read":
        first = registers.first_row(inst.operands[0], 2 * count)
        data_rows = [first, first + count]
        address_row = registers.first_row(inst.operands[1], 1)
    else:
        address_row = registers.first_row(inst.operands[0], 1)
        data_rows = [registers.first_row(operand, count) for operand in inst.operands[1:3]]

    def read(w: Wave) -> None:
        lds = w.workgroup.lds
        offsets = [_offsets(w, address_row, constant) for constant in constants]
        if offsets[0].size:
            values = [
                lds.load(w.index, offset, nbytes) for offset in offsets
            ]  # before the address is overwritten
            for row, value in zip(data_rows, values, strict=True):
                access.write_registers(w, row, value)
            w.workgroup.traffic.lds_load_bytes += 2 * nbytes * offsets[0].size

    def write(w: Wave) -> None:
        for row, constant in zip(data_rows, constants, strict=True):
            offsets = _offsets(w, address_row, constant)
            if offsets.size:
                w.workgroup.lds.store(w.index, offsets, access.read_registers(w, row), nbytes)
                w.workgroup.traffic.lds_store_bytes += nbytes * offsets.size

    return read if action == "read" else write


def _bind_atomic(inst: Instruction, registers: RegisterFile, name: str, returns: bool) -> Execute:
    op = LDS_ATOMICS[name]
    operands = inst.operands[1:] if returns else inst.operands
    result_row = registers.first_row(inst.operands[0], op.result_registers) if returns else None
    address_row = registers.first_row(operands[0], 1)
    data_rows = [
        registers.first_row(operand, op.result_registers)
        for operand in operands[1 : 1 + op.operands]
    ]
    offset = inst.modifier_int("offset")

    def execute(w: Wave) -> None:
        lds = w.workgroup.lds
        offsets = _offsets(w, address_row, offset)
        data = np.concatenate([w.vgpr[row : row + op.result_registers] for row in data_rows])[
            :, w.exec_lanes
        ]
        old = np.empty((op.result_registers, offsets.size), np.uint32)
        for i in range(offsets.size):
            lane = slice(i, i + 1)
            old[:, lane] = lds.load_atomic(offsets[lane], op.nbytes)
            lds.scatter(offsets[lane], op.apply(old[:, lane], data[:, lane]), op.nbytes)
        w.workgroup.traffic.lds_load_bytes += op.nbytes * offsets.size
        w.workgroup.traffic.lds_store_bytes += op.nbytes * offsets.size
        if result_row is not None:
            w.vgpr[result_row : result_row + op.result_registers, w.exec_lanes] = old

    return execute


def _bind_permute(inst: Instruction, registers: RegisterFile, push: bool) -> Execute:
    """ds_permute_b32 sends to a lane, ds_bpermute_b32 fetches from one; inactive lanes give 0."""
    destination, address, data = (registers.first_row(operand, 1) for operand in inst.operands)
    offset = np.uint32(inst.modifier_int("offset"))

    def execute(w: Wave) -> None:
        other = (w.u32[address] + offset) // np.uint32(4) % np.uint32(WAVE_SIZE)
        values = np.where(w.exec_lanes, w.u32[data], np.uint32(0))
        if push:
            moved = np.zeros(WAVE_SIZE, np.uint32)
            moved[other[w.exec_lanes]] = values[w.exec_lanes]
        else:
            moved = values[other]
        w.write(w.u32[destination], moved)

    return execute


def _bind_swizzle(inst: Instruction, registers: RegisterFile) -> Execute:
    destination, data = (registers.first_row(operand, 1) for operand in inst.operands)
    source = _swizzle_lanes(inst.words[0] & 0xFFFF)

    def execute(w: Wave) -> None:
        values = np.where(w.exec_lanes, w.u32[data], np.uint32(0))
        w.write(w.u32[destination], values[source])

    return execute


def _swizzle_lanes(control: int) -> np.ndarray:
    """Source lane of each lane: a quad permutation, a rotation, or bit masks within 32 lanes."""
    lane = LANE_IDS.astype(np.int64)
    group, position = lane & ~31, lane & 31
    if control >> 14 == 0b11:
        amount = control >> 5 & 31
        direction = -1 if control >> 10 & 1 else 1
        keep = control & 31
        return group | (position & keep) | (position + direction * amount & 31 & ~keep)
    if control >> 15:
        order = np.array([control >> 2 * i & 3 for i in range(4)])
        return lane // 4 * 4 + order[lane % 4]
    and_mask, or_mask, xor_mask = control & 31, control >> 5 & 31, control >> 10 & 31
    return group | ((position & and_mask | or_mask) ^ xor_mask)
