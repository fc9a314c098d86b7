# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Varlen attention prefill on torch tensors: jaxfp8.prefill_attention."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch

from jaxfp8 import Fp8Format, LayerScales
from jaxfp8_torch import ops  # noqa: F401  (registers torch.ops.jaxfp8)
from jaxfp8_torch.states import AttentionState, LseLayout, check_lse_layout, check_tensor

Precision = Literal["fp8", "bf16"]


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float | None = None,
    precision: Precision = "fp8",
    scales: LayerScales | None = None,
    fmt: Fp8Format | None = None,
    backend: str | None = None,
    lse_layout: LseLayout = "HT",
) -> AttentionState:
    """Attention of packed sequences of new tokens over packed sequences of keys.

    As `jaxfp8.prefill_attention`, whose documentation says what causal and capacity mean. All
    tensors are on one device. Work is queued on it, in order with torch's current stream; the host
    waits for nothing, so that values of cu_seqlens and scales that lie on a GPU are not checked
    (they are made sound where they would lead out of an array).

    Args:
      q: [Tq, H, Dqk], bfloat16; or FP8 in `fmt`, with `scales`.
      k: [Tk, H, Dqk], likewise.
      v: [Tk, H, Dv], likewise. Each of the three is contiguous, or the columns of every head of a
        wider contiguous tensor (V inside kv_nope [Tk, H, 256]), which is read in place.
      cu_seqlens_q: int32 [B + 1].
      cu_seqlens_k: int32 [B + 1].
      causal: aligned bottom right.
      softmax_scale: a Python number; None is Dqk ** -0.5.
      precision: "fp8" or "bf16".
      scales: the layer's static descales, tensors float32 [H]; None takes dynamic ones.
      fmt: the FP8 format; None is the device's own.
      backend: as in jaxfp8.
      lse_layout: "HT" gives an LSE [H, Tq], "TH" one [Tq, H] (SGLang).

    Raises:
      TypeError: an argument is of the wrong kind or dtype.
      ValueError: shapes disagree, a value is out of range, or a tensor cannot cross to JAX.
      NotImplementedError: no backend serves the request; a tensor requires a gradient; a graph
        is being captured.
    """
    for name, x in (
        ("q", q), ("k", k), ("v", v), ("cu_seqlens_q", cu_seqlens_q),
        ("cu_seqlens_k", cu_seqlens_k),
    ):  # fmt: skip
        check_tensor(name, x)
    check_precision(precision)
    check_backend(backend)
    check_lse_layout(lse_layout)
    descales = check_scales(scales, precision)
    if not isinstance(causal, (bool, np.bool_)):
        raise TypeError(f"causal: expected True or False, got {type(causal).__name__}")
    return AttentionState(
        *torch.ops.jaxfp8.prefill_attention(
            q, k, v, cu_seqlens_q, cu_seqlens_k, *descales, bool(causal),
            check_softmax_scale(softmax_scale), precision, format_name(fmt), backend, lse_layout,
        )
    )  # fmt: skip


def check_precision(x: Any) -> None:
    """ValueError unless x is a precision."""
    if x not in ("fp8", "bf16"):
        raise ValueError(f"precision: expected 'fp8' or 'bf16', got {x!r}")


def check_backend(x: Any) -> None:
    """TypeError unless x is a backend's name, known or not, or None."""
    if not (x is None or isinstance(x, str)):
        raise TypeError(f"backend: expected a name or None, got {type(x).__name__}")


def check_scales(scales: Any, precision: str) -> tuple[torch.Tensor | None, ...]:
    """The three descales of a LayerScales, or three times None."""
    if scales is None:
        return None, None, None
    if not isinstance(scales, LayerScales):
        raise TypeError(f"scales: expected a LayerScales or None, got {type(scales).__name__}")
    if precision == "bf16":
        raise ValueError("scales: expected None with precision='bf16', which has no scales to use")
    for name, x in (("scales.q", scales.q), ("scales.k", scales.k), ("scales.v", scales.v)):
        check_tensor(name, x)
    return scales.q, scales.k, scales.v


def check_softmax_scale(x: Any) -> float | None:
    """x as a float that can scale scores, or None."""
    if x is None:
        return None
    if isinstance(x, bool) or not isinstance(x, (int, float, np.integer, np.floating)):
        raise TypeError(f"softmax_scale: expected a number or None, got {type(x).__name__}")
    if not (math.isfinite(x) and x > 0):
        raise ValueError(f"softmax_scale: expected a finite number > 0, got {x}")
    return float(x)


def format_name(fmt: Any) -> str | None:
    """The name of an FP8 format, as the operators take it."""
    if fmt is None:
        return None
    if not isinstance(fmt, Fp8Format):
        raise TypeError(f"fmt: expected jaxfp8.E4M3FNUZ or jaxfp8.E4M3FN, got {type(fmt).__name__}")
    return fmt.name
