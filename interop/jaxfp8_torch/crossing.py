# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""How the tensors of one call cross to JAX, and its arrays back: no copy, no waiting of the host.

Order of work. On a GPU JAX runs on streams of its own, and names some for events from outside. To
JAX: such a stream waits for torch's current stream, once for all tensors of a call, and the last
tensor crosses with an event recorded there, which the program, that takes it, waits for. Back: such
a stream waits for the program's outputs, and torch's current stream for it. On a CPU a tensor is
handed over when it is computed, as torch expects.

Lifetime. On a GPU the arrays that a program reads are views that own nothing: torch's current
stream does nothing more before the program is done, so that memory which torch frees or fills
meanwhile is still what it was when the program reads it. (Memory of another stream needs
`record_stream`, as with any torch operator.) So a view is good for any tensor in the same place,
and is kept: making one costs several times what the rest of a crossing does. On a CPU nothing
orders the work, and an array holds its tensor. What comes back holds its array everywhere.
"""

from __future__ import annotations

import collections
import functools
import threading
from typing import Any

import jax
import numpy as np
import torch
import torch.utils.dlpack

from jaxfp8_torch import borrowing, jaxlib_compat, lending
from jaxfp8_torch.borrowing import DEVICE_TYPE
from jaxfp8_torch.devices import DTYPES, TORCH_DTYPES, jax_device, torch_device

_dlpack: Any = torch.utils.dlpack  # whose stubs leave to_dlpack out
KERNEL_ALIGNMENT = {"cpu": 64, "cuda": 256 if torch.version.hip is None else 32}
"""Bytes that the memory of a program's operands must begin at a multiple of. Mosaic GPU's kernels,
on NVIDIA, refuse others when they are launched; torch allocates at multiples of 512."""
_VIEWS = 1024
_recent: collections.deque[jax.Array] = collections.deque(maxlen=64)
"""Arrays that own nothing, dropped when their programs are most likely done: dropping one that is
in use sends XLA a callback through the device."""


def readable(x: torch.Tensor) -> torch.Tensor:
    """x, or where it begins at an address that kernels cannot read, a copy."""
    return x.clone() if x.data_ptr() % KERNEL_ALIGNMENT[x.device.type] else x


def to_jax(*tensors: torch.Tensor) -> list[jax.Array]:
    """Arrays on the memory of tensors, for one program that is called with all of them.

    Args:
      *tensors: checked, contiguous, `readable`, on one device; whatever fills them is queued on its
        current stream. They must live until the program's outputs have crossed.
    """
    device = tensors[0].device
    if device.type == "cpu" or not tensors[-1].numel():
        return [to_array(x) for x in tensors]
    stream = jaxlib_compat.external_stream(jax_device(device))
    if stream is None:
        return [to_array(x) for x in tensors]
    event = _event(device.index)
    event.record()
    event.wait(_external_stream(stream, device.index))
    arrays = [
        _view(x.data_ptr(), x.shape, x.dtype, device) if x.numel() else _empty(x)
        for x in tensors[:-1]
    ]
    x = tensors[-1]
    last = _borrow(x.data_ptr(), x.shape, x.dtype, device, stream)
    _recent.append(last)
    return [*arrays, last]


def to_torch(*arrays: jax.Array) -> list[torch.Tensor]:
    """Tensors on the memory of a program's outputs, all on one device, of dtypes that cross."""
    (device,) = arrays[0].devices()
    stream = None if device.platform == "cpu" else jaxlib_compat.external_stream(device)
    if stream is None:
        return [to_tensor(x) for x in arrays]
    index = device.local_hardware_id
    tensors = [
        _dlpack.from_dlpack(jaxlib_compat.dlpack_of_array(x, stream)) if x.size else to_tensor(x)
        for x in arrays
    ]
    event = _event(index)
    event.record(_external_stream(stream, index))
    event.wait()
    return tensors


def to_array(x: torch.Tensor) -> jax.Array:
    """An array that holds its tensor: checked, contiguous, aligned. Ordered by itself."""
    if x.numel() == 0:
        return _empty(x)
    lent = lending.lend(x)
    if x.device.type == "cpu" and jaxlib_compat.available():
        device, kind = jax_device(x.device), DEVICE_TYPE["cpu"]
        array = jaxlib_compat.array_of_dlpack(_dlpack.to_dlpack(lent), device, kind)
    else:
        array = jax.dlpack.from_dlpack(lent)
    lending.lent(lent, array)
    return array


def to_tensor(x: jax.Array) -> torch.Tensor:
    """A tensor that holds its array, which is on one device. Ordered by itself."""
    if x.size:
        tensor: torch.Tensor = _dlpack.from_dlpack(x)
        return tensor
    return torch.empty(x.shape, dtype=TORCH_DTYPES[x.dtype], device=torch_device(x.device))


def _empty(x: torch.Tensor) -> jax.Array:
    """There is no pointer to hand over."""
    return jax.device_put(np.zeros(tuple(x.shape), DTYPES[x.dtype]), jax_device(x.device))


def _borrow(
    pointer: int, shape: torch.Size, dtype: torch.dtype, device: torch.device, stream: int | None
) -> jax.Array:
    """An array that does not hold its memory, on a GPU; ready after what is on the stream now."""
    capsule = borrowing.capsule(pointer, shape, dtype, device)
    kind = DEVICE_TYPE[device.type]
    return jaxlib_compat.array_of_dlpack(capsule, jax_device(device), kind, stream)


@functools.lru_cache(_VIEWS)
def _view(pointer: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> jax.Array:
    """The same, ready from the start."""
    return _borrow(pointer, shape, dtype, device, None)


@functools.cache
def _external_stream(stream: int, index: int) -> torch.cuda.ExternalStream:
    return torch.cuda.ExternalStream(stream, device=torch.device("cuda", index))


class _Events(threading.local):
    """A thread's event on each GPU: what waits for one waits for what was recorded in it last."""

    def __init__(self) -> None:
        self.of_gpu: dict[int, torch.Event] = {}


_events = _Events()


def _event(index: int) -> torch.Event:
    event = _events.of_gpu.get(index)
    if event is None:
        event = _events.of_gpu[index] = torch.Event(torch.device("cuda", index))
    return event
