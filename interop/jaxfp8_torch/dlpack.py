# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The bridge: torch tensors as JAX arrays and back, without a copy, through DLPack.

DLPack itself lets pass what would give wrong numbers in silence (int64 narrowed to int32, a
FakeTensor's null pointer, a misaligned pointer) and refuses the rest with messages about C structs.
So every tensor is checked first, in one order:

  1. no FakeTensor, no meta tensor (there is no memory behind them)
  2. dtype
  3. device
  4. requires_grad, where gradients are recorded
  5. conjugate and negative bits
  6. layout: contiguous, or the columns of every head of a wider contiguous tensor (see `heads`)
  7. alignment of the pointer (a call copies what its kernels cannot read in place: see `crossing`)
  8. no elements at all: there is no pointer to hand over, so an empty array stands for it

How what has passed crosses, in what order and for how long, is said in `crossing`.
"""

from __future__ import annotations

from typing import Any

import jax
import torch
from torch._subclasses.fake_tensor import FakeTensor

from jaxfp8 import HeadSlice
from jaxfp8_torch import crossing
from jaxfp8_torch.devices import DTYPES, TORCH_DTYPES, jax_device

CPU_ALIGNMENT, GPU_ALIGNMENT = 64, 32
"""Bytes that a pointer must be a multiple of. On a GPU the Pallas kernels count on it; on a CPU
JAX copies in silence what is not."""

_NARROWED = {torch.int64: torch.int32, torch.float64: torch.float32}


def check(name: str, x: Any, device: torch.device | None = None) -> None:
    """Refuses a tensor that cannot cross, in the order given above; layout is left to `heads`.

    Args:
      name: the argument's name.
      x: what was given.
      device: where the call's other tensors are.

    Raises:
      TypeError: not a torch.Tensor, fake, or of a dtype that does not cross.
      ValueError: on another device, or requiring a gradient; or with lazy bits.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if isinstance(x, FakeTensor) or x.device.type == "meta":
        kind = "meta tensor" if x.device.type == "meta" else "FakeTensor"
        raise TypeError(
            f"{name}: expected a tensor with memory, got a {kind}; torch.ops.jaxfp8, and the "
            "functions of jaxfp8_torch that call it, have implementations for those"
        )
    if x.dtype not in DTYPES:
        expected, remark = ", ".join(map(_name, DTYPES)), ""
        if x.dtype in _NARROWED:
            expected = _name(_NARROWED[x.dtype])
            remark = "; it is not narrowed for you, as JAX would do, because what does not fit "
            remark += "would be silently wrong"
        raise TypeError(f"{name}: expected dtype {expected}, got {_name(x.dtype)}{remark}")
    if device is not None and x.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, as the others, got {x.device}")
    jax_device(x.device)
    if x.device.type == "cpu" and x.is_pinned():
        raise ValueError(
            f"{name}: expected a tensor on the GPU or in ordinary memory, got pinned memory, which "
            "JAX would take for the GPU's"
        )
    check_grad(name, x)
    if x.is_conj() or x.is_neg():
        raise ValueError(
            f"{name}: expected plain values, got a lazily conjugated or negated view; "
            "pass x.resolve_conj().resolve_neg()"
        )
    if x.layout != torch.strided:
        raise ValueError(f"{name}: expected a dense tensor, got layout {x.layout}")


def crosses(x: torch.Tensor, device: torch.device | None) -> bool:
    """Whether `check` is sure to let a GPU's tensor pass, if JAX has that GPU.

    A call has up to ten tensors, and `check` has a message for everything.
    """
    return (
        type(x) is torch.Tensor
        and x.is_cuda
        and x.dtype in DTYPES
        and (device is None or x.device == device)
        and not (x.requires_grad or x.is_neg() or x.layout != torch.strided)
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_grad(name: str, x: torch.Tensor) -> None:
    """Refuses a tensor that asks for a gradient where gradients are recorded.

    Raises:
      NotImplementedError: it does; jaxfp8 is for inference.
    """
    if x.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{name}: requires a gradient, and jaxfp8 is for inference: it has none to give. Call "
            "under torch.inference_mode() or torch.no_grad(), or pass x.detach()"
        )


def check_not_capturing(device: torch.device) -> None:
    """Refuses to work inside the capture of a graph.

    Raises:
      NotImplementedError: torch's current stream is being captured.
    """
    # torch.cuda is the ROCm build's too; torch.accelerator cannot tell.
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            "jaxfp8 cannot be captured in a CUDA or HIP graph: JAX runs on streams of its own, "
            "which the capture does not see. Prefill outside the graph (in vLLM it runs eagerly)"
        )


def heads(name: str, x: torch.Tensor, *, may_copy: bool = False) -> tuple[torch.Tensor, int]:
    """The contiguous tensor that holds x [T, H, D] and x's first column in it.

    x is contiguous itself, or has the strides (H * W, W, 1) with W > D: D of the W columns of
    every head of a wider tensor, such as V inside kv_nope [T, H, 256]. The wider tensor is found
    in x's storage; no element of it but x's is used.

    Args:
      name: the argument's name.
      x: [T, H, D].
      may_copy: whether columns without their wider tensor are copied and not refused: a clone that
        keeps the strides, as torch.compile makes them, ends with x's last element.

    Raises:
      ValueError: x lies otherwise in memory, or is not aligned.
    """
    found = (x, 0) if x.is_contiguous() else _columns(x)
    if found is None and may_copy and width_of_columns(x) is not None:
        found = x.contiguous(), 0
    if found is None:
        raise ValueError(
            f"{name}: expected a contiguous tensor, or the columns of every head of one, got shape "
            f"{list(x.shape)} with strides {list(x.stride())}; pass x.contiguous()"
        )
    check_alignment(name, found[0])
    return found


def _columns(x: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    width = width_of_columns(x)
    if width is None:
        return None
    tokens, num_heads, size = x.shape
    offset = x.storage_offset()
    in_storage = x.untyped_storage().nbytes() // x.element_size()
    length = tokens * num_heads * width
    # Which column is the first cannot be told from the strides alone. The one that the offset
    # suggests is right for a view of a whole tensor; x in the last columns is the usual case.
    for start in (offset % width, width - size, 0):
        first = offset - start
        if start + size <= width and first >= 0 and first + length <= in_storage:
            whole = x.as_strided(
                (tokens, num_heads, width), (num_heads * width, width, 1), storage_offset=first
            )
            return whole, int(start)
    return None


def width_of_columns(x: torch.Tensor) -> int | None:
    """W, where x has the strides (H * W, W, 1) with W > D; else None."""
    if x.dim() != 3 or x.stride(2) != 1:
        return None
    tokens, num_heads, size = x.shape
    width = x.stride(1) if num_heads > 1 else x.stride(0)
    if width <= size or (tokens > 1 and x.stride(0) != num_heads * width):
        return None
    return width


def contiguous(name: str, x: torch.Tensor) -> torch.Tensor:
    """x, if it is contiguous and aligned.

    Raises:
      ValueError: it is not.
    """
    if not x.is_contiguous():
        raise ValueError(
            f"{name}: expected a contiguous tensor, got shape {list(x.shape)} with strides "
            f"{list(x.stride())}; pass x.contiguous()"
        )
    check_alignment(name, x)
    return x


def check_alignment(name: str, x: torch.Tensor) -> None:
    """Refuses a pointer that kernels could not read from.

    Raises:
      ValueError: it is not a multiple of its device's alignment.
    """
    alignment = CPU_ALIGNMENT if x.is_cpu else GPU_ALIGNMENT
    if x.data_ptr() % alignment:
        raise ValueError(
            f"{name}: expected its memory to begin at a multiple of {alignment} bytes, got one "
            f"that is {x.data_ptr() % alignment} past it; pass x.clone()"
        )


def from_torch(name: str, x: Any) -> jax.Array | HeadSlice:
    """A tensor as a JAX array on the same memory, after all checks.

    Columns of a wider tensor come as a HeadSlice of an array on the whole of it. On NVIDIA jaxfp8's
    Mosaic GPU kernels take memory at multiples of 256 bytes alone: the functions of jaxfp8_torch
    copy what lies otherwise, this one does not.

    Args:
      name: the argument's name, for messages.
      x: a tensor.

    Raises:
      TypeError, ValueError, NotImplementedError: it cannot cross; see the module.
    """
    check(name, x)
    whole, start = heads(name, x)
    array = crossing.to_array(whole)
    return array if whole is x else HeadSlice(array, start, x.shape[-1])


def to_torch(x: jax.Array) -> torch.Tensor:
    """A JAX array on one device as a tensor on the same memory.

    The tensor can be written to, and the array would change with it: drop the array.

    Raises:
      TypeError: not a concrete JAX array on one device, or of a dtype that does not cross.
    """
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
        raise TypeError(f"x: expected a concrete JAX array, got {type(x).__name__}")
    if x.dtype not in TORCH_DTYPES:
        raise TypeError(f"x: expected a dtype that torch has too, got {x.dtype}")
    if len(x.devices()) != 1:
        raise TypeError(f"x: expected an array on one device, got one on {len(x.devices())}")
    return crossing.to_tensor(x)
