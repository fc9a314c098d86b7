# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Run a whole compiled executable in the simulator: every kernel, XLA's own too, in XLA's order.

The buffers are those that XLA assigned, so that what it shares and reuses is tested as well. An
executable with steps other than kernel launches and copies (library calls) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfp8.rocm.compile import serialized_executable
from jaxfp8.rocm.executable import ELF_SIGNATURE, kernel_launches, records
from jaxfp8.rocm.wire import parse_message, read_varint
from tests.gfx942sim import Kernel
from tests.rocm.simulate import poison

# Field numbers of GpuExecutableProto (xla/service/gpu/gpu_executable.proto) and of what is in it.
_ALLOCATIONS, _OUTPUTS, _CONSTANTS, _THUNKS = 10, 11, 12, 13
_ALLOCATION = 1
_INDEX, _SIZE, _IS_PARAMETER, _PARAMETER = 1, 2, 5, 6
_CONSTANT_SYMBOL, _CONSTANT_ALLOCATION = 1, 3
# Of ThunkProto, DeviceToDeviceCopyThunkProto, CopyThunkProto, BufferAllocationSliceProto.
_COPY, _COPY_INFO, _SOURCE, _TARGET, _COPY_SIZE = 13, 1, 1, 2, 3
_SLICE, _OFFSET, _SLICE_ALLOCATION = 1, 1, 3
# Of HloModuleProto, HloComputationProto, HloInstructionProto and LiteralProto (xla/xla_data.proto).
_HLO_MODULE, _COMPUTATIONS, _INSTRUCTIONS = 1, 3, 2
_NAME, _OPCODE, _LITERAL = 1, 2, 8
_INT32S, _FLOAT32S = 4, 8
_OUTPUT_INFO, _OUTPUT_ALLOCATION = 2, 1


Place = tuple[int, int]
"""Allocation and offset."""


class _Buffers(NamedTuple):
    """The allocations of an executable."""

    sizes: dict[int, int]
    parameters: dict[int, int]  # parameter number to allocation
    outputs: list[int]  # allocations, in the order of the flat outputs
    constants: dict[int, bytes]  # allocation to content
    copies: list[tuple[Place, Place, int] | None]  # of each step: source, target, bytes


def run_executable(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """function(*args), compiled for gfx942 and simulated; options as Kernel.launch."""
    serialized, out_info = serialized_executable(function, *args)
    buffers = _read_buffers(serialized)
    launches = iter(kernel_launches(serialized))
    memory = {index: poison((size,), np.uint8) for index, size in buffers.sizes.items()}
    for allocation, content in buffers.constants.items():
        memory[allocation][:] = np.frombuffer(content, np.uint8)
    leaves = [np.ascontiguousarray(leaf) for leaf in jax.tree.leaves(args)]
    for parameter, allocation in buffers.parameters.items():
        data = leaves[parameter].reshape(-1).view(np.uint8)
        memory[allocation][: data.size] = data

    def view(place: Place, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        allocation, offset = place
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return memory[allocation][offset : offset + size].view(dtype).reshape(shape)

    for copy in buffers.copies:
        if copy is not None:
            source, target, size = copy
            view(target, (size,), np.uint8)[:] = view(source, (size,), np.uint8)
            continue
        launch = next(launches)
        arrays = [view(arg.address, arg.shape, arg.dtype) for arg in launch.arguments]
        Kernel.from_hsaco(launch.code_object, launch.name).launch(
            launch.grid, launch.block_threads, arrays, launch.dynamic_lds_bytes, **options
        )
    assert next(launches, None) is None, "the executable has steps within its steps"
    infos, structure = jax.tree.flatten(out_info)
    results = [
        view((allocation, 0), info.shape, info.dtype)
        for allocation, info in zip(buffers.outputs, infos, strict=True)
    ]
    return jax.tree.unflatten(structure, results)


def _read_buffers(serialized: bytes) -> _Buffers:
    messages = [parse_message(r) for r in records(serialized) if not r.startswith(ELF_SIGNATURE)]
    (fields,) = [message for message in messages if _THUNKS in message]
    # Constants are in records of their own.
    all_constants = [data for message in messages for data in message.get(_CONSTANTS, [])]
    sizes, parameters = {}, {}
    (assignment,) = fields[_ALLOCATIONS]
    for data in parse_message(assignment)[_ALLOCATION]:
        allocation = parse_message(data)
        index = allocation.get(_INDEX, [0])[0]
        sizes[index] = allocation.get(_SIZE, [0])[0]
        if _IS_PARAMETER in allocation:
            parameters[allocation.get(_PARAMETER, [0])[0]] = index
    outputs = []
    for data in fields[_OUTPUTS]:
        (info,) = parse_message(data)[_OUTPUT_INFO]
        outputs.append(parse_message(info).get(_OUTPUT_ALLOCATION, [0])[0])
    literals = _read_literals(fields[_HLO_MODULE][0])
    constants = {}
    for data in all_constants:
        constant = parse_message(data)
        symbol = constant[_CONSTANT_SYMBOL][0].decode()
        allocation = constant.get(_CONSTANT_ALLOCATION, [0])[0]
        constants[allocation] = literals[symbol.removeprefix("buffer_for_")]
    # With several outputs the first entry is the tuple of them.
    outputs = outputs[1:] if len(outputs) > 1 else outputs
    return _Buffers(sizes, parameters, outputs, constants, [_copy(d) for d in fields[_THUNKS]])


def _copy(thunk: bytes) -> tuple[Place, Place, int] | None:
    """What a step copies; None where it launches a kernel."""
    message = parse_message(thunk)
    if _COPY not in message:
        assert ELF_SIGNATURE in thunk, f"a step that is neither launch nor copy: {list(message)}"
        return None
    info = parse_message(parse_message(message[_COPY][0])[_COPY_INFO][0])
    places = []
    for end in (_SOURCE, _TARGET):
        piece = parse_message(parse_message(info[end][0])[_SLICE][0])
        places.append(tuple(piece.get(key, [0])[0] for key in (_SLICE_ALLOCATION, _OFFSET)))
    return places[0], places[1], info[_COPY_SIZE][0]


def _read_literals(module_and_config: bytes) -> dict[str, bytes]:
    """The content of every int32 and float32 constant, by its name as a symbol."""
    literals = {}
    module = parse_message(parse_message(module_and_config)[_HLO_MODULE][0])
    for computation in module[_COMPUTATIONS]:
        for data in parse_message(computation)[_INSTRUCTIONS]:
            instruction = parse_message(data)
            if instruction[_OPCODE] != [b"constant"]:
                continue
            literal = parse_message(instruction[_LITERAL][0])
            name = re.sub(r"\W", "_", instruction[_NAME][0].decode())
            if _FLOAT32S in literal:
                literals[name] = literal[_FLOAT32S][0]
            elif _INT32S in literal:
                literals[name] = _varints(literal[_INT32S][0])
    return literals


def _varints(packed: bytes) -> bytes:
    """int32 from packed varints, which hold a negative number as 64 bits."""
    values, position = [], 0
    while position < len(packed):
        value, position = read_varint(packed, position)
        values.append(value & 0xFFFFFFFF)
    return np.uint32(values).tobytes()
