# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Bind a disassembled code object to closures, with control flow resolved."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from jaxfp8.rocm.disassembly import Instruction
from tests.gfx942sim.errors import SimulationError, UnsupportedInstruction
from tests.gfx942sim.lds import bind_lds
from tests.gfx942sim.mfma import bind_mfma
from tests.gfx942sim.operands import RegisterFile, scalar_reader, sgpr_index
from tests.gfx942sim.salu import BRANCH_CONDITIONS, bind_salu
from tests.gfx942sim.valu import bind_valu
from tests.gfx942sim.vmem import bind_vmem
from tests.gfx942sim.wave import Wave

# Timing, caches and priorities do not change results here: memory operations complete at once.
_NO_EFFECT = {
    "s_nop",
    "s_waitcnt",
    "s_waitcnt_depctr",
    "s_setprio",
    "s_sethalt",
    "s_icache_inv",
    "s_dcache_inv",
    "s_dcache_wb",
    "s_inst_prefetch",
    "s_ttracedata",
    "s_sendmsg",
    "s_set_gpr_idx_off",
    "buffer_wbl2",
    "buffer_inv",
    "buffer_wbinvl1",
    "buffer_wbinvl1_vol",
}


class Pause(enum.Enum):
    """Why a wave stops running."""

    BARRIER = enum.auto()
    YIELD = enum.auto()
    END = enum.auto()


Execute = Callable[[Wave], Pause | None]


@dataclass(frozen=True)
class Program:
    """Executable form of a code object; a wave's `pc` is an index into these lists."""

    instructions: list[Instruction]
    execute: list[Execute]
    index_of_address: dict[int, int]
    unsupported: dict[str, str]
    """Opcode to reason, for the instructions that raise when they are reached."""


def bind_program(
    instructions: list[Instruction], registers: RegisterFile, load_address: int
) -> Program:
    """Bind every instruction. What cannot be bound raises only when a wave reaches it."""
    index_of_address = {inst.address: i for i, inst in enumerate(instructions)}
    execute: list[Execute] = []
    unsupported: dict[str, str] = {}
    for inst in instructions:
        try:
            execute.append(_bind(inst, registers, index_of_address, load_address))
        except (UnsupportedInstruction, SimulationError) as error:
            unsupported[inst.opcode] = str(error)
            execute.append(_raise_when_reached(error))
    return Program(instructions, execute, index_of_address, unsupported)


def _raise_when_reached(error: Exception) -> Execute:
    def execute(w: Wave) -> None:
        raise error

    return execute


def _bind(
    inst: Instruction, registers: RegisterFile, index_of_address: dict[int, int], load_address: int
) -> Execute:
    if inst.opcode in _NO_EFFECT:
        return lambda w: None
    if bind := _CONTROL.get(inst.opcode):
        return bind(inst, index_of_address, load_address)
    if inst.opcode in BRANCH_CONDITIONS:
        return _bind_branch(inst, index_of_address)
    for bound in (
        bind_mfma(inst, registers),
        bind_valu(inst, registers),
        bind_salu(inst),
        bind_lds(inst, registers),
        bind_vmem(inst, registers),
    ):
        if bound is not None:
            return bound
    raise UnsupportedInstruction(inst.opcode)


def _bind_branch(inst: Instruction, index_of_address: dict[int, int]) -> Execute:
    condition = BRANCH_CONDITIONS[inst.opcode]
    target = index_of_address.get(inst.branch_target)
    if target is None:
        raise SimulationError(f"branch to 0x{inst.branch_target:x}, which is not an instruction")

    def execute(w: Wave) -> None:
        if condition(w):
            w.pc = target

    return execute


def _bind_end(inst: Instruction, index_of_address: dict[int, int], load_address: int) -> Execute:
    return lambda w: Pause.END


def _bind_barrier(
    inst: Instruction, index_of_address: dict[int, int], load_address: int
) -> Execute:
    return lambda w: Pause.BARRIER


def _bind_sleep(inst: Instruction, index_of_address: dict[int, int], load_address: int) -> Execute:
    return lambda w: Pause.YIELD


def _bind_getpc(inst: Instruction, index_of_address: dict[int, int], load_address: int) -> Execute:
    destination = sgpr_index(inst.operands[0])
    following = load_address + inst.address + inst.size
    return lambda w: w.set_s64(destination, following)


def _bind_jump(inst: Instruction, index_of_address: dict[int, int], load_address: int) -> Execute:
    """s_setpc_b64, and s_swappc_b64 which also saves the return address."""
    target = scalar_reader(inst.operands[-1], "u64")
    link = sgpr_index(inst.operands[0]) if inst.opcode == "s_swappc_b64" else None
    following = load_address + inst.address + inst.size

    def execute(w: Wave) -> None:
        address = target(w)
        if link is not None:
            w.set_s64(link, following)
        index = index_of_address.get(address - load_address)
        if index is None:
            raise SimulationError(f"jump to 0x{address:x}, which is not an instruction")
        w.pc = index

    return execute


_CONTROL: dict[str, Callable[[Instruction, dict[int, int], int], Execute]] = {
    "s_endpgm": _bind_end,
    "s_barrier": _bind_barrier,
    "s_sleep": _bind_sleep,
    "s_getpc_b64": _bind_getpc,
    "s_setpc_b64": _bind_jump,
    "s_swappc_b64": _bind_jump,
}
