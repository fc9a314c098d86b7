# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Per-head FP8 quantization of torch tensors: the quantizers of jaxfp8, bit for bit."""

from __future__ import annotations

from typing import Any

import torch

from jaxfp8 import Fp8Format
from jaxfp8_torch import ops  # noqa: F401  (registers torch.ops.jaxfp8)
from jaxfp8_torch.prefill import format_name
from jaxfp8_torch.states import check_tensor


def per_head_amax(x: torch.Tensor) -> torch.Tensor:
    """Largest finite magnitude of each head of x [T, H, D], bfloat16 or float32: float32 [H].

    Raises:
      TypeError, ValueError: as `jaxfp8.per_head_amax`.
    """
    check_tensor("x", x)
    return torch.ops.jaxfp8.per_head_amax(x)


def quantize_per_head(x: torch.Tensor, descale: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """Quantizes each head of x with its own scale.

    Args:
      x: [T, H, D], bfloat16 or float32.
      descale: float32 [H], finite and > 0.
      fmt: jaxfp8_torch.E4M3FNUZ or jaxfp8_torch.E4M3FN.

    Returns:
      [T, H, D] in fmt: x / descale, clipped, rounded to nearest even.

    Raises:
      TypeError, ValueError: as `jaxfp8.quantize_per_head`.
    """
    check_tensor("x", x)
    check_tensor("descale", descale)
    return torch.ops.jaxfp8.quantize_per_head(x, descale, _required(fmt))


def dynamic_quantize_per_head(x: torch.Tensor, fmt: Fp8Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes each head of x [T, H, D] with the scale its own values ask for.

    Returns:
      x in fmt [T, H, D], and its descale, float32 [H].

    Raises:
      TypeError, ValueError: as `jaxfp8.dynamic_quantize_per_head`.
    """
    check_tensor("x", x)
    return torch.ops.jaxfp8.dynamic_quantize_per_head(x, _required(fmt))


def _required(fmt: Any) -> str:
    name = format_name(fmt)
    if name is None:
        raise TypeError("fmt: expected jaxfp8.E4M3FNUZ or jaxfp8.E4M3FN, got NoneType")
    return name
