# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Load a kernel from a code object and run it on numpy buffers."""

from __future__ import annotations

import ctypes
import struct
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxfp8.rocm.code_object import CodeObject, KernelArgument, KernelInfo
from jaxfp8.rocm.disassembly import disassemble
from tests.gfx942sim.errors import SimulationError, UnsupportedInstruction
from tests.gfx942sim.memory import GlobalMemory, LocalMemory, ScratchMemory
from tests.gfx942sim.operands import RegisterFile
from tests.gfx942sim.program import Pause, bind_program
from tests.gfx942sim.stats import Stats
from tests.gfx942sim.wave import (
    LANE_IDS,
    MODE_DX10_CLAMP,
    MODE_FP16_OVFL,
    MODE_IEEE,
    WAVE_SIZE,
    TrafficCounters,
    Wave,
    Workgroup,
    mask_of,
)  # fmt: skip

LOAD_ADDRESS = 0x1_0000_0000
LDS_LIMIT = 65536

# Initial content of registers, LDS and scratch: a NaN as f32 and as f16, an infinity as bf16,
# and in every other byte the NaN of fp8 and bf8.
POISON = 0xFF80FF80

# Kernels entered with preloaded kernargs start after this many bytes of compatibility code.
_KERNARG_PRELOAD_PROLOGUE = 256

Dim3 = int | Sequence[int]
Size = tuple[int, int, int]


class Kernel:
    """One kernel of a code object, ready to launch."""

    def __init__(self, code_object: CodeObject, info: KernelInfo):
        self.code_object = code_object
        self.info = info
        descriptor = info.descriptor
        registers = RegisterFile(descriptor.total_vgprs, descriptor.accum_offset)
        self._program = bind_program(disassemble(code_object.image), registers, LOAD_ADDRESS)

    @classmethod
    def from_hsaco(cls, source: str | Path | bytes, name: str | None = None) -> Kernel:
        """Load a HSACO from a path or from bytes; `name` chooses among several kernels."""
        image = source if isinstance(source, bytes) else Path(source).read_bytes()
        code_object = CodeObject(image)
        if not code_object.kernels:
            raise ValueError("the code object contains no kernel")
        if name is None and len(code_object.kernels) > 1:
            raise ValueError(f"choose a kernel by name: {sorted(code_object.kernels)}")
        info = code_object.kernels[name] if name else next(iter(code_object.kernels.values()))
        return cls(code_object, info)

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def unsupported(self) -> dict[str, str]:
        """Opcodes in the code that the simulator would reject, with the reason."""
        return self._program.unsupported

    def launch(
        self,
        grid: Dim3,
        block_threads: Dim3,
        args: Sequence[Any],
        dynamic_lds_bytes: int = 0,
        *,
        memory: GlobalMemory | None = None,
        workgroups: Iterable[Size] | None = None,
        reverse_waves: bool = False,
        detect_races: bool = False,
        uninitialized: int = POISON,
        max_wave_instructions: int = 100_000_000,
    ) -> Stats:
        """Run the kernel; arrays in `args` are read and written in place.

        grid: number of workgroups per dimension. block_threads: threads per workgroup.
        args: numpy arrays for pointers (None for a null pointer); numpy or ctypes scalars, or
            Python numbers that the metadata can size, for values. Trailing pointers that are
            left out are null.
        memory: a `GlobalMemory` with more registered buffers, whose addresses are in buffers.
        workgroups: run only these workgroup ids.
        reverse_waves: run the waves of a workgroup in reverse order between barriers.
        detect_races: raise `DataRace` on conflicting LDS accesses without a barrier between.
        uninitialized: 32-bit fill of registers, LDS and scratch.
        """
        start = time.perf_counter()
        grid, block = _dim3(grid), _dim3(block_threads)
        lds_bytes = self.info.descriptor.group_segment_fixed_size + dynamic_lds_bytes
        if lds_bytes > LDS_LIMIT:
            raise ValueError(f"{lds_bytes} bytes of LDS; gfx942 has {LDS_LIMIT}")
        memory = memory if memory is not None else GlobalMemory()
        self._map_code(memory)
        kernarg = self._build_kernarg(memory, args, grid, block, dynamic_lds_bytes)
        kernarg_address = memory.register(kernarg, "kernarg segment")
        counts = [0] * len(self._program.instructions)
        traffic = TrafficCounters()
        ids = list(workgroups) if workgroups is not None else _all_ids(grid)
        waves_per_group = -(-block[0] * block[1] * block[2] // WAVE_SIZE)
        budget = max_wave_instructions
        with np.errstate(all="ignore"):
            for group_ids in ids:
                lds = LocalMemory(lds_bytes, uninitialized, detect_races)
                group = Workgroup(group_ids, memory, lds, traffic)
                waves = [
                    self._start_wave(i, group, block, kernarg_address, kernarg, uninitialized)
                    for i in range(waves_per_group)
                ]
                budget = self._run_workgroup(
                    waves[::-1] if reverse_waves else waves, counts, budget
                )
        opcodes: Counter[str] = Counter()
        for inst, count in zip(self._program.instructions, counts, strict=True):
            if count:
                opcodes[inst.opcode] += count
        seconds = time.perf_counter() - start
        return Stats(opcodes, len(ids) * waves_per_group, len(ids), traffic, seconds)

    # ------------------------------------------------------------ arguments

    def _map_code(self, memory: GlobalMemory) -> None:
        """Make the loaded image readable at its load address, for constants in .rodata."""
        for segment in self.code_object.segments:
            data = np.frombuffer(segment.data, np.uint8)
            memory.map(data, LOAD_ADDRESS + segment.address, "code object")

    def _build_kernarg(
        self, memory: GlobalMemory, args: Sequence[Any], grid: Size, block: Size, dynamic_lds: int
    ) -> np.ndarray:
        explicit = [argument for argument in self.info.arguments if not argument.is_hidden]
        missing = explicit[len(args) :]
        if len(args) > len(explicit) or any(not argument.is_pointer for argument in missing):
            raise TypeError(f"{self.name} takes {len(explicit)} arguments, got {len(args)}")
        size = -(-max(self.info.descriptor.kernarg_size, 4) // 64) * 64
        kernarg = np.zeros(size, np.uint8)
        for position, (argument, value) in enumerate(zip(explicit, args, strict=False)):
            raw = _argument_bytes(argument, value, position, memory)
            kernarg[argument.offset : argument.offset + len(raw)] = np.frombuffer(raw, np.uint8)
        hidden = _hidden_arguments(grid, block, dynamic_lds)
        for argument in self.info.arguments:
            if argument.value_kind in hidden:
                raw = hidden[argument.value_kind].to_bytes(argument.size, "little")
                kernarg[argument.offset : argument.offset + argument.size] = np.frombuffer(
                    raw, np.uint8
                )
        return kernarg

    # ------------------------------------------------------------ waves

    def _start_wave(
        self,
        index: int,
        group: Workgroup,
        block: Size,
        kernarg_address: int,
        kernarg: np.ndarray,
        fill: int,
    ) -> Wave:
        descriptor = self.info.descriptor
        scratch = ScratchMemory(descriptor.private_segment_fixed_size, WAVE_SIZE, fill)
        w = Wave(index, group, scratch, descriptor.total_vgprs, fill)
        w.set_mode(
            descriptor.float_mode
            | MODE_DX10_CLAMP * descriptor.dx10_clamp
            | MODE_IEEE * descriptor.ieee_mode
            | MODE_FP16_OVFL * descriptor.fp16_ovfl
        )
        self._init_sgprs(w, kernarg_address, kernarg)
        threads = LANE_IDS + np.uint32(index * WAVE_SIZE)
        w.set_exec(mask_of(threads < block[0] * block[1] * block[2]))
        components = (
            threads % block[0],
            threads // block[0] % block[1],
            threads // (block[0] * block[1]),
        )
        w.u32[0][:] = 0
        for axis in range(descriptor.workitem_id_dimensions):
            w.u32[0] |= components[axis] << np.uint32(10 * axis)
        entry = descriptor.entry
        if descriptor.kernarg_preload_length:
            entry += _KERNARG_PRELOAD_PROLOGUE
        w.pc = self._program.index_of_address[entry]
        return w

    def _init_sgprs(self, w: Wave, kernarg_address: int, kernarg: np.ndarray) -> None:
        descriptor = self.info.descriptor
        position = 0
        for name, count in descriptor.user_sgprs:
            if name == "kernarg_segment_ptr":
                w.set_s64(position, kernarg_address)
            elif name == "private_segment_size":
                w.set_s32(position, descriptor.private_segment_fixed_size)
            position += count
        first = descriptor.kernarg_preload_offset
        for value in kernarg.view(np.uint32)[
            first : first + descriptor.kernarg_preload_length
        ].tolist():
            w.set_s32(position, value)
            position += 1
        position = descriptor.user_sgpr_count
        for axis, enabled in enumerate(descriptor.workgroup_id_enabled):
            if enabled:
                w.set_s32(position, w.workgroup.ids[axis])
                position += 1

    def _run_workgroup(self, waves: list[Wave], counts: list[int], budget: int) -> int:
        """Run waves in turn from barrier to barrier; return what is left of the budget."""
        running = waves
        while running:
            at_barrier = []
            while running:
                yielded = []
                for w in running:
                    pause, budget = self._run_wave(w, counts, budget)
                    if pause is Pause.BARRIER:
                        at_barrier.append(w)
                    elif pause is Pause.YIELD:
                        yielded.append(w)
                running = yielded
            waves[0].workgroup.lds.epoch += 1
            running = at_barrier
        return budget

    def _run_wave(self, w: Wave, counts: list[int], budget: int) -> tuple[Pause, int]:
        execute = self._program.execute
        pause = None
        try:
            while pause is None:
                pc = w.pc
                w.pc = pc + 1
                counts[pc] += 1
                pause = execute[pc](w)
                budget -= 1
                if budget < 0:
                    raise SimulationError("the limit of wave-instructions is reached")
        except (SimulationError, UnsupportedInstruction) as error:
            inst = self._program.instructions[pc]
            if isinstance(error, SimulationError):
                raise error.locate(inst.address, inst.text, str(w)) from error
            raise UnsupportedInstruction(
                f"{error} [pc 0x{inst.address:x}: {inst.text}; {w}]"
            ) from error
        return pause, budget


def _dim3(value: Dim3) -> Size:
    sizes = (value,) if isinstance(value, int) else tuple(int(size) for size in value)
    if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
        raise ValueError(f"{value} is not a valid grid or block")
    x, y, z, *_ = (*sizes, 1, 1)
    return x, y, z


def _all_ids(grid: Size) -> list[Size]:
    return [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]


def _argument_bytes(
    argument: KernelArgument, value: Any, position: int, memory: GlobalMemory
) -> bytes:
    if argument.is_pointer:
        if value is None:
            return bytes(8)
        if not isinstance(value, np.ndarray):
            raise TypeError(
                f"argument {position} is a pointer: pass a numpy array, not {type(value).__name__}"
            )
        return memory.register(value, f"argument {position}").to_bytes(8, "little")
    if isinstance(value, np.ndarray):
        raise TypeError(f"argument {position} is a value of {argument.size} bytes, not a pointer")
    if isinstance(value, np.generic):
        raw = value.tobytes()
    elif isinstance(value, (ctypes._SimpleCData, ctypes.Structure, ctypes.Array)):
        raw = bytes(value)
    elif isinstance(value, float):
        raw = struct.pack("<f" if argument.size == 4 else "<d", value)
    else:
        raw = (int(value) & (1 << 8 * argument.size) - 1).to_bytes(argument.size, "little")
    if len(raw) != argument.size:
        raise TypeError(f"argument {position} has {argument.size} bytes, got {len(raw)}")
    return raw


def _hidden_arguments(grid: Size, block: Size, dynamic_lds: int) -> dict[str, int]:
    """Values of the implicit kernel arguments that depend on the launch."""
    values = {"hidden_grid_dims": max(i + 1 for i in range(3) if i == 0 or grid[i] * block[i] > 1)}
    values["hidden_dynamic_lds_size"] = dynamic_lds
    for axis, letter in enumerate("xyz"):
        values[f"hidden_block_count_{letter}"] = grid[axis]
        values[f"hidden_group_size_{letter}"] = block[axis]
    return values
