# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""torch on the GPU that JAX uses: copies and matrix products. torch is imported here when used."""

from __future__ import annotations

import importlib.util
from typing import Any

import jax

from common.inputs import pick
from common.timing import Subject


def usable() -> bool:
    """Whether torch is installed and sees a GPU, and JAX runs on one."""
    if jax.default_backend() == "cpu" or importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())  # a ROCm build of torch says so too


def synchronize(_: Any = None) -> None:
    """Waits for all that torch has launched."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def copy(source: jax.Array) -> Subject:
    """A copy into another buffer."""
    import torch

    x = torch.utils.dlpack.from_dlpack(source)
    target = torch.empty_like(x)
    return Subject(lambda i: target.copy_(x), synchronize)


def matmul(pairs: list[Any], precision: str) -> Subject:
    """a b^T in bfloat16, or in FP8 with scales of one."""
    import torch

    operands = [tuple(torch.utils.dlpack.from_dlpack(x) for x in pair) for pair in pairs]
    one = torch.ones((), device=operands[0][0].device)

    def launch(number: int) -> Any:
        a, b = pick(operands, number)
        if precision == "fp8":
            return torch._scaled_mm(
                a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        return a @ b.t()

    return Subject(launch, synchronize)
