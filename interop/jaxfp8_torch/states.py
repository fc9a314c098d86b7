# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Attention states on torch tensors, and their merge."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

LseLayout = Literal["HT", "TH"]
"""The layout of a log-sum-exp: [H, T], as vLLM has it, or [T, H], as SGLang has it."""


class AttentionState(NamedTuple):
    """Attention of some queries over some keys.

    Attributes:
      out: bfloat16 [Tq, H, Dv]. Zero where no key was seen.
      lse: float32 [H, Tq], natural log; -inf where no key was seen. [Tq, H] if so asked for.
    """

    out: torch.Tensor
    lse: torch.Tensor


def merge_states(
    a: AttentionState, b: AttentionState, *, lse_layout: LseLayout = "HT"
) -> AttentionState:
    """Attention over two disjoint sets of keys, from the attention over each.

    As `jaxfp8.merge_states`: -inf (and +inf) on one side takes the other, on both gives zeros and
    -inf.

    Args:
      a: out bfloat16 or float32 [Tq, H, Dv], lse float32 [H, Tq].
      b: the same shapes and dtypes.
      lse_layout: "HT", or "TH" where both LSEs are [Tq, H]; the result's is the same.

    Raises:
      TypeError: an argument is not a pair of tensors of those dtypes.
      ValueError: shapes disagree.
    """
    check_lse_layout(lse_layout)
    for name, state in (("a", a), ("b", b)):
        if not (isinstance(state, tuple) and hasattr(state, "out") and hasattr(state, "lse")):
            raise TypeError(f"{name}: expected an AttentionState, got {type(state).__name__}")
        check_tensor(f"{name}.out", state.out)
        check_tensor(f"{name}.lse", state.lse)
    return AttentionState(*torch.ops.jaxfp8.merge_states(a.out, a.lse, b.out, b.lse, lse_layout))


def check_tensor(name: str, x: Any) -> None:
    """TypeError unless x is a tensor."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")


def check_lse_layout(x: Any) -> None:
    """ValueError unless x is a layout."""
    if x not in ("HT", "TH"):
        raise ValueError(f"lse_layout: expected 'HT' or 'TH', got {x!r}")
