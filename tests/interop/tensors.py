# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Test inputs as torch tensors, and tensors as NumPy arrays, by their bytes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch

import jaxfp8
from jaxfp8_torch import devices

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]
_TORCH = {numpy: torch_ for torch_, numpy in devices.DTYPES.items()}


def tensor(x: Any, device: str = "cpu") -> torch.Tensor:
    """A NumPy array (of any dtype that crosses) as a tensor of its own memory."""
    x = np.ascontiguousarray(x)
    if x.dtype not in _TORCH:
        return torch.tensor(x, device=device)
    if not x.size:
        return torch.empty(x.shape, dtype=_TORCH[x.dtype], device=device)
    as_bytes = torch.from_numpy(x.reshape(-1).view(np.uint8).copy()).to(device).clone()
    return as_bytes.view(_TORCH[x.dtype]).reshape(x.shape)


def array(x: torch.Tensor) -> np.ndarray:
    """A tensor as a NumPy array."""
    if not x.numel():
        return np.empty(tuple(x.shape), devices.DTYPES[x.dtype])
    as_bytes = x.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return as_bytes.view(devices.DTYPES[x.dtype]).reshape(tuple(x.shape))


def tensors(arrays: Any, device: str) -> list[torch.Tensor]:
    return [tensor(x, device) for x in arrays]


def placed(x: torch.Tensor, alignment: int, offset: int) -> torch.Tensor:
    """A copy of x that begins so many bytes past a multiple of alignment."""
    size = x.element_size()
    storage = x.new_empty(x.numel() + (alignment + offset) // size)
    first = (-storage.data_ptr() % alignment + offset) // size
    return storage[first : first + x.numel()].view(x.shape).copy_(x)


def native(device: str) -> jaxfp8.Fp8Format:
    """The FP8 format of a device."""
    fmt = jaxfp8.detect_target(devices.jax_device(torch.device(device))).fp8_format
    assert fmt is not None
    return fmt


def on_jax(arrays: Any, device: str) -> list[jax.Array]:
    """The same arrays through the other door."""
    return [jax.device_put(x, devices.jax_device(torch.device(device))) for x in arrays]


def assert_same_bits(actual: torch.Tensor, expected: Any) -> None:
    actual, expected = array(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(
        actual.reshape(-1).view(np.uint8), np.ascontiguousarray(expected).reshape(-1).view(np.uint8)
    )
