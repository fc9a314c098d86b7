# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of a call that padding would hide: shapes, and values where they are in ordinary memory.

What is wrong is found here and said by jaxfp8, whose functions are traced on the call's own
shapes, without running anything: one wording for both doors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch

from jaxfp8_torch.devices import DTYPES, jax_device
from jaxfp8_torch.dlpack import check, check_not_capturing, crosses

_Tensors = Mapping[str, torch.Tensor | None]


def tensors(named: _Tensors) -> torch.device:
    """Checks that every tensor of a call can cross, all from one device, which is returned."""
    device: torch.device | None = None
    for name, x in named.items():
        if x is None:
            continue
        if not crosses(x, device):
            check(name, x, device)
        if device is None:
            device = x.device
    assert device is not None
    check_not_capturing(device)
    return device


def heads_match(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether q, k and v have three dimensions each that fit each other."""
    return (
        q.dim() == k.dim() == v.dim() == 3
        and q.shape[1:] == k.shape[1:]
        and v.shape[:2] == k.shape[:2]
    )


def cu_seqlens_sound(x: torch.Tensor, num_tokens: int) -> bool:
    """Whether x is a sound cu_seqlens; the values on a GPU are not read, and are made sound by
    the compiled program.
    """
    if x.dtype != torch.int32 or x.dim() != 1 or x.shape[0] < 1:
        return False
    if not x.is_cpu:
        return True
    values = x.tolist()
    return (
        values[0] == 0
        and all(low <= high for low, high in itertools.pairwise(values))
        and values[-1] <= num_tokens
    )


def descale_sound(x: torch.Tensor | None, num_heads: int) -> bool:
    """Whether x is None or float32 [H]; finite and > 0, where that can be read."""
    if x is None:
        return True
    if x.dtype != torch.float32 or x.shape != (num_heads,):
        return False
    return not x.is_cpu or all(0 < value < float("inf") for value in x.tolist())


def let_jaxfp8_refuse(function: Callable[[dict[str, Any]], Any], named: _Tensors) -> None:
    """Calls function on the tensors' shapes (and on the values of small ones that lie in ordinary
    memory), for the error that it raises.

    Args:
      function: takes the arrays of the tensors that are there, by name.
      named: the tensors, of dtypes that cross.
    """
    present = {name: x for name, x in named.items() if x is not None}
    constants, shapes = {}, {}
    for name, x in present.items():
        if x.dim() == 1 and x.device.type == "cpu":
            constants[name] = x.detach().numpy()
        else:
            shapes[name] = jax.ShapeDtypeStruct(tuple(x.shape), np.dtype(DTYPES[x.dtype]))
    device = jax_device(next(iter(present.values())).device)
    with jax.default_device(device):
        jax.eval_shape(lambda traced: function({**constants, **traced}), shapes)
    raise AssertionError("jaxfp8 accepted a call that jaxfp8_torch does not")
