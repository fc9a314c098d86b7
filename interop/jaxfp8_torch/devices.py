# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The names that torch and JAX have for the same dtypes and devices."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import torch

from jaxfp8 import E4M3FN, E4M3FNUZ
from jaxfp8_torch import runtime

_bfloat16 = np.dtype(jax.numpy.bfloat16)
DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.bfloat16: _bfloat16,
    torch.float32: np.dtype(np.float32),
    torch.float8_e4m3fnuz: E4M3FNUZ.dtype,
    torch.float8_e4m3fn: E4M3FN.dtype,
    torch.float8_e5m2: np.dtype(jax.numpy.float8_e5m2),
    torch.int32: np.dtype(np.int32),
}
"""What crosses the bridge."""
TORCH_DTYPES = {numpy: torch_ for torch_, numpy in DTYPES.items()}

_PLATFORM = {"cpu": "cpu", "cuda": "gpu"}


def jax_device(device: torch.device) -> jax.Device:
    """JAX's name for a torch device: the same physical one, by its local index.

    Both frameworks number the devices that CUDA_VISIBLE_DEVICES (or HIP_VISIBLE_DEVICES) leaves
    them, so the numbers agree.

    Raises:
      ValueError: JAX has no such device.
    """
    return _jax_device(device.type, device.index)


@functools.cache
def _jax_device(kind: str, index: int | None) -> jax.Device:
    runtime.enter()
    platform = _PLATFORM.get(kind)
    if platform is None:
        raise ValueError(f"device: expected one of {', '.join(_PLATFORM)}, got {kind!r}")
    try:
        devices = jax.local_devices(backend=platform)
    except RuntimeError as error:
        raise ValueError(
            f"device: the tensors are on {kind!r} and JAX has no {platform} ({error}); install "
            "the JAX plugin of this GPU, and see that JAX_PLATFORMS does not leave it out"
        ) from None
    for device in devices:
        if getattr(device, "local_hardware_id", None) == (index or 0):
            return device
    if platform == "cpu":
        return devices[0]
    raise ValueError(f"device: JAX sees {len(devices)} {kind} devices, and none of index {index}")


def torch_device(device: Any) -> torch.device:
    """torch's name for a JAX device."""
    if device.platform == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", device.local_hardware_id)
