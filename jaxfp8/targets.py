# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The device that a call compiles for, and the FP8 format its matrix units speak."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax

from jaxfp8.formats import E4M3FN, E4M3FNUZ, Fp8Format


@dataclasses.dataclass(frozen=True)
class Target:
    """What the library knows of a device.

    Attributes:
      arch: "gfx942", "sm90", "cpu", or whatever else the device calls itself ("gfx90a", "sm80",
        "tpu").
      fp8_format: the format that FP8 requests use there when none is named; None where the
        device has no FP8 matrix units that the library knows.
    """

    arch: str
    fp8_format: Fp8Format | None

    def speaks(self, fmt: Fp8Format) -> bool:
        """Whether FP8 bits of this format may be handed to this device. A CPU emulates both."""
        return self.arch == "cpu" or fmt == self.fp8_format


def target_of_arch(arch: str) -> Target:
    """The Target of an architecture name."""
    if arch in ("cpu", "gfx940", "gfx941", "gfx942"):
        return Target(arch, E4M3FNUZ)
    nvidia = re.fullmatch(r"sm(\d+)", arch)
    if arch == "gfx950" or arch.startswith("gfx12") or (nvidia and int(nvidia[1]) >= 89):
        return Target(arch, E4M3FN)
    return Target(arch, None)


def detect_target(device: Any = None) -> Target:
    """The Target of a device.

    Args:
      device: a jax.Device. None takes the device of the abstract mesh where one is set (so that
        code lowered for a described device sees that one), else JAX's default device.

    Raises:
      TypeError: device is not a jax.Device.

    Example:
      >>> import jax, jaxfp8
      >>> target = jaxfp8.detect_target(jax.devices("cpu")[0])
      >>> target.arch, target.fp8_format.name, target.speaks(jaxfp8.E4M3FN)
      ('cpu', 'float8_e4m3fnuz', True)
    """
    if device is None:
        device = _current_device()
    try:
        platform, kind = device.platform, device.device_kind
    except AttributeError:
        raise TypeError(f"device: expected a jax.Device, got {type(device).__name__}") from None
    if platform == "cpu":
        return target_of_arch("cpu")
    for description in (kind, str(getattr(device, "compute_capability", ""))):
        amd = re.search(r"gfx[0-9a-f]+", description)
        if amd:
            return target_of_arch(amd[0])
        nvidia = re.fullmatch(r"(\d+)\.(\d+)", description)
        if nvidia:
            return target_of_arch(f"sm{nvidia[1]}{nvidia[2]}")
    return Target(kind if platform == "gpu" else platform, None)


def _current_device() -> Any:
    abstract = jax.sharding.get_abstract_mesh()
    described = getattr(abstract, "abstract_device", None)
    if described is not None and "gfx" in described.device_kind:
        return _DescribedGpu(described.device_kind)
    default = getattr(jax.config, "jax_default_device", None)
    if default is not None and not isinstance(default, str):
        return default
    return jax.devices(default)[0] if isinstance(default, str) else jax.devices()[0]


@dataclasses.dataclass(frozen=True)
class _DescribedGpu:
    device_kind: str
    platform: str = "gpu"
