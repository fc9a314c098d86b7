# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""DLPack capsules of memory that they do not own.

torch's own capsules hold their tensor, and a thread of JAX's asks for Python's lock to let go of
it, in the midst of the next call's preparation. These hold nothing, and call nobody.
The structures are those of dlpack.h, version 0.8.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch

DEVICE_TYPE = {"cpu": 1, "cuda": 2 if torch.version.hip is None else 10}
"""DLPack's numbers; torch calls an AMD GPU "cuda" too."""

_TYPE_CODE = {
    torch.int32: 0,
    torch.float32: 2,
    torch.bfloat16: 4,
    torch.float8_e4m3fn: 10,
    torch.float8_e4m3fnuz: 11,
    torch.float8_e5m2: 12,
}
_NAME = ctypes.c_char_p(b"dltensor")
# What jaxlib calls in the end must be there, and must not be Python's: this does nothing.
_DO_NOTHING = ctypes.cast(ctypes.CDLL(None).labs, ctypes.c_void_p).value

_new_capsule: Any = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class DLManagedTensor(ctypes.Structure):
    """A DLTensor, and what its consumer calls when it has done with it."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),  # NULL: row-major
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class _Header:
    """What those capsules of a thread share that differ in their pointers alone."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes = (ctypes.c_int64 * len(shape))(*shape)
        self.tensor = DLManagedTensor(
            device_type=DEVICE_TYPE[device.type],
            device_id=device.index or 0,
            ndim=len(shape),
            type_code=_TYPE_CODE[dtype],
            type_bits=8 * dtype.itemsize,
            type_lanes=1,
            shape=ctypes.addressof(self.sizes),
            deleter=_DO_NOTHING,
        )
        self.address = ctypes.addressof(self.tensor)


class _Headers(threading.local):
    def __init__(self) -> None:
        self.known: dict[tuple[torch.Size, torch.dtype, torch.device], _Header] = {}


_headers = _Headers()
_all_headers: list[_Header] = []  # jaxlib may still look at them after their thread has ended


def capsule(pointer: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Any:
    """A capsule of contiguous memory. It is to be used up before this thread asks for another, and
    the memory is to stay as long as what is made of it is used.
    """
    known = _headers.known
    header = known.get((shape, dtype, device))
    if header is None:
        header = known[shape, dtype, device] = _Header(shape, dtype, device)
        _all_headers.append(header)
    header.tensor.data = pointer
    return _new_capsule(header.address, _NAME, None)
