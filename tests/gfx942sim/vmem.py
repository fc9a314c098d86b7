# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Bind scalar and vector memory instructions: SMEM, global, flat, buffer and scratch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxfp8.rocm.disassembly import Instruction, Operand
from tests.gfx942sim.atomics import GLOBAL_ATOMICS, AtomicOp
from tests.gfx942sim.errors import MemoryFault, UnsupportedInstruction
from tests.gfx942sim.memory import PRIVATE_APERTURE, SHARED_APERTURE
from tests.gfx942sim.operands import (
    RegisterFile,
    ScalarReader,
    is_vector,
    scalar_reader,
    sgpr_index,
)
from tests.gfx942sim.wave import LANE_IDS, M0, Wave

Execute = Callable[[Wave], None]
AddressReader = Callable[[Wave], np.ndarray]
LocateLanes = Callable[[Wave], tuple[np.ndarray, np.ndarray | None]]

_APERTURE_MASK = np.uint64(0xFFFFFFFF00000000)
_WIDTHS = {"byte": 1, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}


@dataclass(frozen=True)
class Access:
    """What one load or store moves: its width and how it meets the 32-bit registers."""

    nbytes: int
    sign_extend: bool = False
    d16: bool = False
    high_half: bool = False

    @property
    def registers(self) -> int:
        return max(self.nbytes // 4, 1)

    @classmethod
    def parse(cls, name: str) -> Access:
        """Parse the part of a mnemonic after `load_` or `store_`, such as `sbyte_d16_hi`."""
        match = re.fullmatch(
            r"(?P<sign>[us]?)(?P<unit>byte|short|dword(?:x[234])?)(?P<d16>_d16)?(?P<hi>_hi)?", name
        )
        if match is None:
            raise UnsupportedInstruction(f"memory access type {name}")
        d16 = bool(match["d16"]) or bool(match["hi"])
        return cls(_WIDTHS[match["unit"]], match["sign"] == "s", d16, bool(match["hi"]))

    def write_registers(self, w: Wave, row: int, data: np.ndarray) -> None:
        """Put loaded rows (active lanes only) into registers."""
        if self.nbytes < 4:
            data = self._extend(w, row, data[0])[None]
        if w.exec_full:
            w.vgpr[row : row + self.registers] = data
        else:
            w.vgpr[row : row + self.registers, w.exec_lanes] = data

    def read_registers(self, w: Wave, row: int) -> np.ndarray:
        """Rows to store, active lanes only."""
        data = w.vgpr[row : row + self.registers]
        if self.high_half:
            data = data >> np.uint32(16)
        return data if w.exec_full else data[:, w.exec_lanes]

    def _extend(self, w: Wave, row: int, value: np.ndarray) -> np.ndarray:
        if self.sign_extend:
            unused = np.int32(32 - 8 * self.nbytes)
            value = ((value.view(np.int32) << unused) >> unused).view(np.uint32)
        if not self.d16:
            return value
        old = w.u32[row] if w.exec_full else w.u32[row][w.exec_lanes]
        if self.high_half:
            return value << np.uint32(16) | old & np.uint32(0xFFFF)
        return value & np.uint32(0xFFFF) | old & np.uint32(0xFFFF0000)


def bind_vmem(inst: Instruction, registers: RegisterFile) -> Execute | None:
    """A closure that executes the instruction, or None if this module does not know it."""
    match = re.fullmatch(
        r"(global|flat|buffer|scratch)_(load|store|atomic)_(?:lds_)?(\w+)", inst.opcode
    )
    if match is not None:
        segment, action, name = match.groups()
        bind = {
            "global": _bind_global,
            "flat": _bind_flat,
            "buffer": _bind_buffer,
            "scratch": _bind_scratch,
        }[segment]
        return bind(inst, registers, action, name)
    match = re.fullmatch(r"s_(load|buffer_load)_dword(?:x(\d+))?", inst.opcode)
    if match is not None:
        return _bind_scalar_load(inst, int(match[2] or 1), match[1] == "buffer_load")
    return None


# ---------------------------------------------------------------- scalar loads


def _bind_scalar_load(inst: Instruction, dwords: int, is_buffer: bool) -> Execute:
    destination = sgpr_index(inst.operands[0])
    base = sgpr_index(inst.operands[1])
    offset = scalar_reader(inst.operands[2], "u32")
    extra = inst.modifier_int("offset")

    def execute(w: Wave) -> None:
        position = offset(w) + extra
        if is_buffer and position + 4 * dwords > w.sgpr[base + 2]:
            raise MemoryFault(
                f"scalar buffer load of {4 * dwords} bytes at offset {position} "
                f"of {w.sgpr[base + 2]}"
            )
        address = (w.get_s64(base) & (1 << 48) - 1) + position & ~3
        for i, value in enumerate(w.workgroup.memory.load_scalar(address, dwords)):
            w.set_s32(destination + i, value)

    return execute


# ---------------------------------------------------------------- address forms


def _register_pair_address(row: int, offset: int) -> AddressReader:
    constant = np.uint64(offset & (1 << 64) - 1)

    def read(w: Wave) -> np.ndarray:
        return (
            w.u32[row].astype(np.uint64) | w.u32[row + 1].astype(np.uint64) << np.uint64(32)
        ) + constant

    return read


def _global_address(
    vaddr: Operand, saddr: Operand, offset: int, registers: RegisterFile
) -> AddressReader:
    """64-bit VGPR address, or 64-bit SGPR base plus 32-bit VGPR offset."""
    if saddr.is_off:
        return _register_pair_address(registers.first_row(vaddr, 2), offset)
    base = sgpr_index(saddr)
    row = registers.first_row(vaddr, 1)
    return lambda w: w.u32[row] + np.uint64(w.get_s64(base) + offset & (1 << 64) - 1)


def _active(w: Wave, values: np.ndarray) -> np.ndarray:
    return values if w.exec_full else values[w.exec_lanes]


# ---------------------------------------------------------------- global


def _bind_global(inst: Instruction, registers: RegisterFile, action: str, name: str) -> Execute:
    offset = inst.modifier_int("offset")
    operands = inst.operands
    if action == "atomic":
        returns = "sc0" in inst.modifiers
        vaddr, vdata, saddr = operands[1:] if returns else operands
        address = _global_address(vaddr, saddr, offset, registers)
        return _bind_global_atomic(
            name, address, vdata, operands[0] if returns else None, registers
        )
    if "_lds_" in inst.opcode:
        vaddr, saddr = operands
        address = _global_address(vaddr, saddr, offset, registers)
        return _bind_load_to_lds(
            Access.parse(name), lambda w: (_active(w, address(w)), None), offset
        )
    if action == "load":
        vdata, vaddr, saddr = operands
    else:
        vaddr, vdata, saddr = operands
    address = _global_address(vaddr, saddr, offset, registers)
    return _bind_plain_access(Access.parse(name), action, address, registers.first_row(vdata))


def _bind_plain_access(access: Access, action: str, address: AddressReader, row: int) -> Execute:
    nbytes = access.nbytes

    def load(w: Wave) -> None:
        addresses = _active(w, address(w))
        if addresses.size:
            access.write_registers(w, row, w.workgroup.memory.load(addresses, nbytes))
            w.workgroup.traffic.global_load_bytes += nbytes * addresses.size

    def store(w: Wave) -> None:
        addresses = _active(w, address(w))
        if addresses.size:
            w.workgroup.memory.store(addresses, access.read_registers(w, row), nbytes)
            w.workgroup.traffic.global_store_bytes += nbytes * addresses.size

    return load if action == "load" else store


def _bind_global_atomic(
    name: str, address: AddressReader, vdata: Operand, vdst: Operand | None, registers: RegisterFile
) -> Execute:
    op = GLOBAL_ATOMICS[name]
    data_row = registers.first_row(vdata, op.data_registers)
    result_row = None if vdst is None else registers.first_row(vdst, op.result_registers)

    def execute(w: Wave) -> None:
        addresses = _active(w, address(w))
        if addresses.size:
            data = w.vgpr[data_row : data_row + op.data_registers][:, w.exec_lanes]
            old = _global_read_modify_write(w, op, addresses, data)
            if result_row is not None:
                w.vgpr[result_row : result_row + op.result_registers, w.exec_lanes] = old

    return execute


def _global_read_modify_write(
    w: Wave, op: AtomicOp, addresses: np.ndarray, data: np.ndarray
) -> np.ndarray:
    """Apply an atomic lane by lane; return the old values as rows."""
    memory = w.workgroup.memory
    old = np.empty((op.result_registers, addresses.size), np.uint32)
    for i in range(addresses.size):
        lane = slice(i, i + 1)
        old[:, lane] = memory.load(addresses[lane], op.nbytes)
        memory.store(addresses[lane], op.apply(old[:, lane], data[:, lane]), op.nbytes)
    w.workgroup.traffic.global_load_bytes += op.nbytes * addresses.size
    w.workgroup.traffic.global_store_bytes += op.nbytes * addresses.size
    return old


def _bind_load_to_lds(access: Access, locate: LocateLanes, offset: int) -> Execute:
    """Load straight to LDS at M0[15:0] + offset + 4*lane.

    `locate` gives the addresses of the active lanes, and which of them are in range if not all.
    """

    def execute(w: Wave) -> None:
        addresses, in_range = locate(w)
        if not addresses.size:
            return
        data = np.zeros((1, addresses.size), np.uint32)
        lanes = slice(None) if in_range is None else in_range
        if addresses[lanes].size:
            data[:, lanes] = w.workgroup.memory.load(addresses[lanes], access.nbytes)
        places = _active(w, LANE_IDS).astype(np.int64) * 4 + (w.sgpr[M0] & 0xFFFF) + offset
        w.workgroup.lds.store(w.index, places, data, 4)
        w.workgroup.traffic.global_load_bytes += access.nbytes * addresses.size
        w.workgroup.traffic.lds_store_bytes += 4 * addresses.size

    return execute


# ---------------------------------------------------------------- flat


def _bind_flat(inst: Instruction, registers: RegisterFile, action: str, name: str) -> Execute:
    """Flat accesses choose global memory, LDS or scratch by the address's aperture."""
    offset = inst.modifier_int("offset")
    operands = inst.operands
    if action == "atomic":
        returns = "sc0" in inst.modifiers
        vaddr, vdata = operands[1:] if returns else operands
        address = _register_pair_address(registers.first_row(vaddr, 2), offset)
        return _bind_global_atomic(
            name, address, vdata, operands[0] if returns else None, registers
        )
    vdata, vaddr = operands if action == "load" else operands[::-1]
    address = _register_pair_address(registers.first_row(vaddr, 2), offset)
    access = Access.parse(name)
    nbytes = access.nbytes
    row = registers.first_row(vdata)
    access_global = _bind_plain_access(access, action, address, row)

    def execute(w: Wave) -> None:
        addresses = _active(w, address(w))
        apertures = np.unique(addresses & _APERTURE_MASK)
        if apertures.size != 1 or int(apertures[0]) not in (SHARED_APERTURE, PRIVATE_APERTURE):
            access_global(w)
            return
        offsets = (addresses & ~_APERTURE_MASK).astype(np.int64)
        lds, scratch, lanes = w.workgroup.lds, w.scratch, _active(w, LANE_IDS)
        is_lds = int(apertures[0]) == SHARED_APERTURE
        if action == "load":
            data = (
                lds.load(w.index, offsets, nbytes)
                if is_lds
                else scratch.load(lanes, offsets, nbytes)
            )
            access.write_registers(w, row, data)
        elif is_lds:
            lds.store(w.index, offsets, access.read_registers(w, row), nbytes)
        else:
            scratch.store(lanes, offsets, access.read_registers(w, row), nbytes)

    return execute


# ---------------------------------------------------------------- scratch


def _bind_scratch(inst: Instruction, registers: RegisterFile, action: str, name: str) -> Execute:
    vdata, vaddr, saddr = (
        inst.operands
        if action == "load"
        else (inst.operands[1], inst.operands[0], inst.operands[2])
    )
    access = Access.parse(name)
    row = registers.first_row(vdata)
    offset = inst.modifier_int("offset")
    address_row = None if vaddr.is_off else registers.first_row(vaddr, 1)
    base: ScalarReader = (lambda w: 0) if saddr.is_off else scalar_reader(saddr, "u32")

    def execute(w: Wave) -> None:
        lanes = _active(w, LANE_IDS)
        if not lanes.size:
            return
        offsets = np.full(lanes.size, offset + base(w), np.int64)
        if address_row is not None:
            offsets += _active(w, w.u32[address_row])
        if action == "load":
            access.write_registers(w, row, w.scratch.load(lanes, offsets, access.nbytes))
        else:
            w.scratch.store(lanes, offsets, access.read_registers(w, row), access.nbytes)

    return execute


# ---------------------------------------------------------------- buffer


@dataclass(frozen=True)
class _BufferAddress:
    """Address operands of a MUBUF instruction."""

    descriptor: int
    soffset: ScalarReader
    offset: int
    offset_row: int | None
    index_row: int | None

    @classmethod
    def bind(
        cls,
        inst: Instruction,
        vaddr: Operand,
        srsrc: Operand,
        soffset: Operand,
        registers: RegisterFile,
    ):
        row = registers.first_row(vaddr) if is_vector(vaddr) else 0
        has_index, has_offset = "idxen" in inst.modifiers, "offen" in inst.modifiers
        return cls(
            sgpr_index(srsrc),
            scalar_reader(soffset, "u32"),
            inst.modifier_int("offset"),
            row + has_index if has_offset else None,
            row if has_index else None,
        )

    def locate(self, w: Wave) -> tuple[np.ndarray, np.ndarray, int]:
        """Of the active lanes: addresses, byte offsets for the range check, and the limit."""
        words = w.sgpr[self.descriptor : self.descriptor + 4]
        base = words[0] | (words[1] & 0xFFFF) << 32
        stride = words[1] >> 16 & 0x3FFF
        if words[1] >> 31 or words[3] >> 23 & 1:
            raise UnsupportedInstruction("buffer descriptor with swizzle or add_tid")
        soffset = self.soffset(w)
        count = w.exec.bit_count()
        offsets = np.full(count, self.offset, np.int64)
        if self.offset_row is not None:
            offsets += _active(w, w.u32[self.offset_row])
        if self.index_row is not None:
            offsets += _active(w, w.u32[self.index_row]).astype(np.int64) * stride
        return (offsets + (base + soffset)).astype(np.uint64), offsets, words[2] - soffset


def _bind_buffer(inst: Instruction, registers: RegisterFile, action: str, name: str) -> Execute:
    """MUBUF: out-of-range dwords read as 0, and are not stored."""
    to_lds = "lds" in inst.modifiers
    *data, vaddr, srsrc, soffset = inst.operands
    buffer = _BufferAddress.bind(inst, vaddr, srsrc, soffset, registers)
    if action == "atomic":
        return _bind_buffer_atomic(name, buffer, data[0], "sc0" in inst.modifiers, registers)
    access = Access.parse(name)
    if to_lds:

        def locate(w: Wave) -> tuple[np.ndarray, np.ndarray]:
            addresses, offsets, limit = buffer.locate(w)
            return addresses, offsets + access.nbytes <= limit

        return _bind_load_to_lds(access, locate, buffer.offset)

    row = registers.first_row(data[0])
    nbytes = access.nbytes
    step = min(nbytes, 4)

    def load(w: Wave) -> None:
        addresses, offsets, limit = buffer.locate(w)
        if not addresses.size:
            return
        memory = w.workgroup.memory
        inside = offsets + nbytes <= limit
        if inside.all():
            values = memory.load(addresses, nbytes)
        else:
            values = np.zeros((access.registers, addresses.size), np.uint32)
            for part in range(access.registers):
                lanes = offsets + step * (part + 1) <= limit
                if lanes.any():
                    values[part, lanes] = memory.load(
                        addresses[lanes] + np.uint64(step * part), step
                    )[0]
        access.write_registers(w, row, values)
        w.workgroup.traffic.global_load_bytes += nbytes * int(inside.sum())

    def store(w: Wave) -> None:
        addresses, offsets, limit = buffer.locate(w)
        if not addresses.size:
            return
        values = access.read_registers(w, row)
        memory = w.workgroup.memory
        inside = offsets + nbytes <= limit
        if inside.all():
            memory.store(addresses, values, nbytes)
        else:
            for part in range(access.registers):
                lanes = offsets + step * (part + 1) <= limit
                if lanes.any():
                    memory.store(
                        addresses[lanes] + np.uint64(step * part),
                        values[part : part + 1, lanes],
                        step,
                    )
        w.workgroup.traffic.global_store_bytes += nbytes * int(inside.sum())

    return load if action == "load" else store


def _bind_buffer_atomic(
    name: str, buffer: _BufferAddress, vdata: Operand, returns: bool, registers: RegisterFile
) -> Execute:
    op = GLOBAL_ATOMICS[name]
    row = registers.first_row(vdata, op.data_registers)

    def execute(w: Wave) -> None:
        addresses, offsets, limit = buffer.locate(w)
        inside = offsets + op.nbytes <= limit
        lanes = np.nonzero(w.exec_lanes)[0]
        if inside.any():
            data = w.vgpr[row : row + op.data_registers][:, lanes[inside]]
            old = _global_read_modify_write(w, op, addresses[inside], data)
            if returns:
                w.vgpr[row : row + op.result_registers, lanes[inside]] = old
        if returns:
            w.vgpr[row : row + op.result_registers, lanes[~inside]] = 0

    return execute
