# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Any jitted function to gfx942 code objects, on a machine without a GPU."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src.mesh import AbstractDevice
from jax.sharding import NamedSharding, PartitionSpec

from jaxfp8.rocm.code_object import CodeObject, KernelInfo
from jaxfp8.rocm.disassembly import Instruction, disassemble, disassemble_text
from jaxfp8.rocm.executable import KernelLaunch, kernel_launches
from jaxfp8.rocm.loops import LoopReport, count, innermost_loops
from jaxfp8.rocm.plugin import mi300x_mesh

WAVE_SIZE = 64
SIMDS_PER_CU = 4
LDS_BYTES_PER_CU = 65536
_VGPRS_PER_LANE = 512  # vector registers of a SIMD, a lane; AGPRs are among them
_MAX_WAVES_PER_SIMD = 8
_LDS_GRANULE = 512


@dataclasses.dataclass(frozen=True)
class KernelArg:
    """One buffer of a kernel.

    Attributes:
      name: the name of the Ref in a Pallas kernel, without "_ref"; "k[0]" of a tuple "k_refs".
      shape: of the array in it.
      dtype: of the array in it.
      same_as: the name of an earlier argument that is the same memory; None mostly.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    same_as: str | None


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
    """One GPU kernel, as XLA:ROCm compiled and would launch it.

    Attributes:
      name: the kernel's symbol.
      code_object: the ELF file (HSACO) that holds it.
      grid: workgroups along x, y, z.
      block_threads: threads of a workgroup.
      dynamic_lds_bytes: LDS that the launch asks for, beside what the code object declares.
      args: the buffers, inputs first, then outputs, in the order of the kernel's arguments.
      pallas: whether it is a Pallas kernel, as against one that XLA made.
      vgpr: architectural vector registers of a lane.
      agpr: accumulation registers of a lane.
      sgpr: scalar registers of a wave.
      spills: vector and scalar registers that were spilled.
      scratch_bytes: private memory of a lane.
      static_lds_bytes: LDS that the code object declares.
    """

    name: str
    code_object: bytes
    grid: tuple[int, int, int]
    block_threads: int
    dynamic_lds_bytes: int
    args: tuple[KernelArg, ...]
    pallas: bool
    vgpr: int
    agpr: int
    sgpr: int
    spills: int
    scratch_bytes: int
    static_lds_bytes: int

    @property
    def lds_bytes(self) -> int:
        """LDS of a workgroup."""
        return self.static_lds_bytes + self.dynamic_lds_bytes

    @property
    def waves_per_simd(self) -> int:
        """Waves that fit on a SIMD at once, by registers and LDS."""
        registers = max(8, -(-(self.vgpr + self.agpr) // 8) * 8)
        by_registers = min(_MAX_WAVES_PER_SIMD, _VGPRS_PER_LANE // registers)
        waves = -(-self.block_threads // WAVE_SIZE)
        workgroups = SIMDS_PER_CU * by_registers // waves
        if self.lds_bytes:
            lds = -(-self.lds_bytes // _LDS_GRANULE) * _LDS_GRANULE
            workgroups = min(workgroups, LDS_BYTES_PER_CU // lds)
        return min(by_registers, workgroups * waves // SIMDS_PER_CU)

    @functools.cached_property
    def instructions(self) -> list[Instruction]:
        """The kernel's instructions.

        Raises:
          MissingToolError: there is no LLVM that reads gfx942.
        """
        info = _kernel_info(self.code_object, self.name)
        start = info.descriptor.entry
        return [
            instruction
            for instruction in disassemble(self.code_object)
            if start <= instruction.address < start + info.code_size
        ]

    @functools.cached_property
    def loops(self) -> list[LoopReport]:
        """The innermost loops, in address order.

        Raises:
          MissingToolError: there is no LLVM that reads gfx942.
        """
        return [loop.report() for loop in innermost_loops(self.instructions)]

    @functools.cached_property
    def total(self) -> LoopReport:
        """The same counts of the whole kernel, every instruction once.

        Raises:
          MissingToolError: there is no LLVM that reads gfx942.
        """
        return count(Counter(inst.opcode for inst in self.instructions))

    def disassembly(self) -> str:
        """The listing of the code object.

        Raises:
          MissingToolError: there is no LLVM that reads gfx942.
        """
        return disassemble_text(self.code_object)


def compile_for_gfx942(function: Callable[..., Any], *args: Any) -> tuple[CompiledKernel, ...]:
    """Compiles a function for gfx942 with the XLA:ROCm of the installed plugin.

    Nothing is run. The code is what the same JAX makes on an MI300X or MI325X.

    Args:
      function: a function of arrays, jitted or not.
      *args: the arguments, or their shapes and dtypes (jax.ShapeDtypeStruct); pytrees of either.

    Returns:
      The distinct kernels in launch order. Calls of libraries (hipBLASLt, MIOpen) have none.

    Raises:
      MissingToolError: the ROCm plugin of this JAX version, or what loading it takes, is missing.
      ValueError: the compiled function holds no GPU kernel.
    """
    traced, serialized = _compile(function, args)
    calls = list(_pallas_calls(traced.jaxpr.jaxpr))
    launches = kernel_launches(serialized)
    return tuple(dict.fromkeys(_compiled(launch, calls) for launch in launches))


def serialized_executable(function: Callable[..., Any], *args: Any) -> tuple[bytes, Any]:
    """XLA's serialization of the compiled function, and the pytree of its outputs' shapes.

    Args:
      function: as in `compile_for_gfx942`.
      *args: likewise.

    Raises:
      MissingToolError: as `compile_for_gfx942`.
    """
    traced, serialized = _compile(function, args)
    return serialized, traced.out_info


def _compile(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, bytes]:
    sharding = NamedSharding(mi300x_mesh(), PartitionSpec())
    described = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=sharding), args
    )
    with described_gfx942():
        # Kept, so that arguments keep their numbers: XLA drops unused ones otherwise.
        traced = jax.jit(function, keep_unused=True).trace(*described)
        lowered = traced.lower(lowering_platforms=("rocm",))
    return traced, lowered.compile().runtime_executable().serialize()


def described_gfx942() -> AbstractContextManager[Any]:
    """A context in which what is traced or lowered takes the device for a gfx942.

    Raises:
      MissingToolError: as `compile_for_gfx942`.
    """
    fields = {field.name for field in dataclasses.fields(AbstractDevice)}
    platform = {"platform": "gpu"} if "platform" in fields else {}  # not in JAX 0.10
    device = AbstractDevice(device_kind="gfx942", num_cores=None, **platform)
    mesh = mi300x_mesh().abstract_mesh
    return jax.sharding.use_abstract_mesh(mesh.update(abstract_device=device))


class _PallasCall(NamedTuple):
    """One call of a Pallas kernel: names and shapes of its inputs, then its outputs."""

    kernel: str
    arg_names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


def _pallas_calls(jaxpr: Any) -> Iterator[_PallasCall]:
    """The Pallas kernels that a jaxpr calls."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            kernel = equation.params["jaxpr"].debug_info
            name = equation.params["name"] or kernel.func_name
            shapes = (v.aval.shape for v in (*equation.invars, *equation.outvars))
            yield _PallasCall(name, tuple(kernel.arg_names), tuple(shapes))
            continue
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _pallas_calls(inner)


def _compiled(launch: KernelLaunch, pallas_calls: Sequence[_PallasCall]) -> CompiledKernel:
    # Of several kernels of one name XLA calls the others NAME__1 and so on.
    possible = (launch.name, re.sub(r"__\d+$", "", launch.name))
    calls = [call for call in pallas_calls if call.kernel in possible]
    shapes = tuple(argument.shape for argument in launch.arguments)
    names = next(
        (call.arg_names for call in calls if call.shapes == shapes),
        tuple(f"arg{index}" for index in range(len(shapes))),
    )
    names = tuple(re.sub(r"_refs?(?=\[|$)", "", name) for name in names)
    args: list[KernelArg] = []
    first_at: dict[tuple[int, int], str] = {}
    for name, argument in zip(names, launch.arguments, strict=True):
        same_as = first_at.get(argument.address)
        args.append(KernelArg(name, argument.shape, argument.dtype, same_as))
        first_at.setdefault(argument.address, name)
    info = _kernel_info(launch.code_object, launch.name)
    metadata = info.metadata
    return CompiledKernel(
        name=launch.name,
        code_object=launch.code_object,
        grid=launch.grid,
        block_threads=launch.block_threads,
        dynamic_lds_bytes=launch.dynamic_lds_bytes,
        args=tuple(args),
        pallas=bool(calls),
        # The metadata counts the AGPRs among the VGPRs: gfx942 has one file for both.
        vgpr=metadata[".vgpr_count"] - metadata[".agpr_count"],
        agpr=metadata[".agpr_count"],
        sgpr=metadata[".sgpr_count"],
        spills=metadata[".vgpr_spill_count"] + metadata[".sgpr_spill_count"],
        scratch_bytes=info.descriptor.private_segment_fixed_size,
        static_lds_bytes=info.descriptor.group_segment_fixed_size,
    )


def _kernel_info(code_object: bytes, name: str) -> KernelInfo:
    return CodeObject(code_object).kernels[name]
