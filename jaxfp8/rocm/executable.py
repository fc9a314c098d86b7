# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels in a serialized XLA executable: their code, their launch, their arguments.

XLA has no public way to ask an executable for its kernels. Its serialization is a Riegeli file of
protobuf records (jaxfp8/rocm/wire.py), in JAX 0.11 and later inside a record of another one. Each
kernel launch in it is a `CustomKernelThunkProto` (xla/backends/gpu/runtime/thunk.proto) with the
code object inside; those are found by their shape, wherever in the records they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from jaxfp8.rocm.wire import (
    RIEGELI_SIGNATURE,
    Message,
    parse_message,
    read_riegeli,
    read_varint,
)

ELF_SIGNATURE = b"\x7fELF"

# Field numbers of CustomKernelThunkProto, CustomKernelProto and KernelLoaderSpecProto.
_THUNK_ARGUMENTS, _THUNK_KERNEL = 1, 3
_ARGUMENT_SLICE, _ARGUMENT_SHAPE = 1, 2
_SLICE_OFFSET, _SLICE_ALLOCATION = 1, 3
_SHAPE_TYPE, _SHAPE_DIMENSIONS = 2, 3
_KERNEL_SPEC, _KERNEL_GRID, _KERNEL_BLOCK, _KERNEL_SHARED_MEMORY = 2, 3, 4, 6
_SPEC_IN_MEMORY, _SPEC_NAME = 2, 4
_IN_MEMORY_CODE = 1
_GRID_SIZE, _BLOCK_SIZE = 2, 1

# xla/xla_data.proto, PrimitiveType.
_DTYPES = {
    1: np.dtype(np.bool_),
    2: np.dtype(np.int8),
    3: np.dtype(np.int16),
    4: np.dtype(np.int32),
    5: np.dtype(np.int64),
    6: np.dtype(np.uint8),
    7: np.dtype(np.uint16),
    8: np.dtype(np.uint32),
    9: np.dtype(np.uint64),
    10: np.dtype(np.float16),
    11: np.dtype(np.float32),
    12: np.dtype(np.float64),
    15: np.dtype(np.complex64),
    16: np.dtype(ml_dtypes.bfloat16),
    18: np.dtype(np.complex128),
    19: np.dtype(ml_dtypes.float8_e5m2),
    20: np.dtype(ml_dtypes.float8_e4m3fn),
    24: np.dtype(ml_dtypes.float8_e5m2fnuz),
    25: np.dtype(ml_dtypes.float8_e4m3fnuz),
}


@dataclasses.dataclass(frozen=True)
class LaunchArgument:
    """One buffer that a launch passes.

    Attributes:
      shape: of the array in it.
      dtype: of the array in it.
      address: allocation and offset; two arguments with the same one are the same memory.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    address: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class KernelLaunch:
    """One kernel launch of an executable.

    Attributes:
      name: the kernel's symbol in the code object.
      code_object: ELF file for gfx942.
      grid: workgroups along x, y, z.
      block_threads: threads of a workgroup.
      dynamic_lds_bytes: LDS that the launch adds to what the code object declares.
      arguments: the buffers, inputs first, then outputs.
    """

    name: str
    code_object: bytes
    grid: tuple[int, int, int]
    block_threads: int
    dynamic_lds_bytes: int
    arguments: tuple[LaunchArgument, ...]


def kernel_launches(serialized: bytes) -> list[KernelLaunch]:
    """The kernel launches of a serialized executable, in the order in which they run.

    Raises:
      ValueError: the executable has no kernel of its own (say, only calls of libraries), or is
        serialized in a way that this module does not know.
    """
    launches = [
        launch
        for record in records(serialized)
        if not record.startswith(ELF_SIGNATURE)
        for launch in _launches_within(record)
    ]
    if not launches:
        raise ValueError(
            "the compiled executable holds no GPU kernel that jaxfp8 can find: either XLA made "
            "none for this function, or this JAX serializes executables in a new way"
        )
    return launches


def records(data: bytes) -> Iterator[bytes]:
    """The records of a serialized executable, those of a nested file in its place."""
    for record in read_riegeli(data):
        # A nested file starts a record, after the few bytes of the protobuf field it is in.
        if RIEGELI_SIGNATURE in record[:64]:
            yield from records(record)
        else:
            yield record


def _launches_within(data: bytes) -> Iterator[KernelLaunch]:
    """Every launch in a protobuf message and the messages inside it."""
    if ELF_SIGNATURE not in data:
        return
    try:
        message = parse_message(data)
    except ValueError:
        return
    launch = _as_launch(message)
    if launch is not None:
        yield launch
        return
    for values in message.values():
        for value in values:
            if isinstance(value, bytes):
                yield from _launches_within(value)


def _as_launch(message: Message) -> KernelLaunch | None:
    """The launch that a message describes; None where it is another kind of message."""
    try:
        kernel = _submessage(message, _THUNK_KERNEL)
        spec = _submessage(kernel, _KERNEL_SPEC)
        code = _bytes(_submessage(spec, _SPEC_IN_MEMORY), _IN_MEMORY_CODE)
        name = _bytes(spec, _SPEC_NAME).decode()
        grid = _dimensions(_submessage(_submessage(kernel, _KERNEL_GRID), _GRID_SIZE))
        block = _dimensions(_submessage(_submessage(kernel, _KERNEL_BLOCK), _BLOCK_SIZE))
        (shared_memory,) = kernel.get(_KERNEL_SHARED_MEMORY, [0])
        arguments = tuple(
            _argument(parse_message(value))
            for value in message.get(_THUNK_ARGUMENTS, [])
            if isinstance(value, bytes)
        )
    except (ValueError, KeyError):
        return None
    if not code.startswith(ELF_SIGNATURE) or not isinstance(shared_memory, int):
        return None
    threads = block[0] * block[1] * block[2]
    return KernelLaunch(name, code, grid, threads, shared_memory, arguments)


def _bytes(message: Message, field: int) -> bytes:
    (value,) = message[field]
    if not isinstance(value, bytes):
        raise ValueError(f"field {field} is a number")
    return value


def _submessage(message: Message, field: int) -> Message:
    return parse_message(_bytes(message, field))


def _dimensions(message: Message) -> tuple[int, int, int]:
    x, y, z = (message.get(axis, [1])[0] for axis in (1, 2, 3))
    if isinstance(x, bytes) or isinstance(y, bytes) or isinstance(z, bytes):
        raise ValueError("dimensions that are no numbers")
    return x, y, z


def _argument(message: Message) -> LaunchArgument:
    place = _submessage(message, _ARGUMENT_SLICE)
    allocation, offset = (place.get(field, [0])[0] for field in (_SLICE_ALLOCATION, _SLICE_OFFSET))
    if isinstance(allocation, bytes) or isinstance(offset, bytes):
        raise ValueError("an address that is no number")
    return LaunchArgument(
        *_shape(_submessage(message, _ARGUMENT_SHAPE)), address=(allocation, offset)
    )


def _shape(message: Message) -> tuple[tuple[int, ...], np.dtype]:
    (element,) = message[_SHAPE_TYPE]
    if isinstance(element, bytes):
        raise ValueError("an element type that is no number")
    packed = b"".join(v for v in message.get(_SHAPE_DIMENSIONS, []) if isinstance(v, bytes))
    dimensions = []
    position = 0
    while position < len(packed):
        size, position = read_varint(packed, position)
        dimensions.append(size)
    return tuple(dimensions), _DTYPES[element]
