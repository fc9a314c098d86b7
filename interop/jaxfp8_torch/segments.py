# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""One prefill pass on torch tensors: new tokens, then a long context in segments.

    state = start_prefill(q, cu_seqlens_q)
    state = attend_new_tokens(state, new_k, new_v)
    for k, v, cu_seqlens_k in segments:
        state = attend_segment(state, k, v, cu_seqlens_k)
    state.out, state.lse

The memory of k and v may be filled with the next segment as soon as a call returns, in the order
of torch's current stream: the work that reads them comes before.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from jaxfp8 import Fp8Format
from jaxfp8_torch import ops  # noqa: F401  (registers torch.ops.jaxfp8)
from jaxfp8_torch.prefill import (
    Precision,
    check_backend,
    check_precision,
    check_softmax_scale,
    format_name,
)
from jaxfp8_torch.states import AttentionState, LseLayout, check_lse_layout, check_tensor


@dataclasses.dataclass(frozen=True)
class PrefillState:
    """A prefill pass under way.

    Attributes:
      q: [Tq, H, Dqk], the new tokens' queries as given; held, not copied.
      query: the same in the pass's precision.
      q_descale: float32 [H] of `query`; None in a pass of precision "bf16".
      cu_seqlens_q: int32 [B + 1].
      acc: float32 [Tq, H, Dv], attention over all keys so far.
      lse_ht: float32 [H, Tq], its log-sum-exp.
    """

    q: torch.Tensor
    query: torch.Tensor
    q_descale: torch.Tensor | None
    cu_seqlens_q: torch.Tensor
    acc: torch.Tensor
    lse_ht: torch.Tensor
    softmax_scale: float | None
    precision: Precision
    fmt: str | None
    backend: str | None
    lse_layout: LseLayout

    @property
    def out(self) -> torch.Tensor:
        """bfloat16 [Tq, H, Dv]: attention over all keys so far; zeros where none was seen."""
        return self.acc.to(torch.bfloat16)

    @property
    def lse(self) -> torch.Tensor:
        """float32 [H, Tq], or [Tq, H], as start_prefill was told."""
        return self.lse_ht if self.lse_layout == "HT" else self.lse_ht.t().contiguous()

    @property
    def attention_state(self) -> AttentionState:
        """`out` and `lse`, to merge with states from elsewhere."""
        return AttentionState(self.out, self.lse)


def start_prefill(
    q: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    precision: Precision = "fp8",
    q_descale: torch.Tensor | None = None,
    v_head_dim: int = 128,
    fmt: Fp8Format | None = None,
    backend: str | None = None,
    lse_layout: LseLayout = "HT",
) -> PrefillState:
    """Begins a pass: quantizes the queries, once; has attended to nothing yet.

    Args: as `jaxfp8.start_prefill`; q is bfloat16. lse_layout: of the `lse` to come, "HT" or "TH".

    Raises:
      TypeError, ValueError, NotImplementedError: as `jaxfp8_torch.prefill_attention`.
    """
    check_tensor("q", q)
    check_tensor("cu_seqlens_q", cu_seqlens_q)
    check_precision(precision)
    check_backend(backend)
    check_lse_layout(lse_layout)
    if q_descale is not None:
        check_tensor("q_descale", q_descale)
    if isinstance(v_head_dim, bool) or not isinstance(v_head_dim, int):
        raise TypeError(f"v_head_dim: expected an integer, got {type(v_head_dim).__name__}")
    name, scale = format_name(fmt), check_softmax_scale(softmax_scale)
    quantized, descale, acc, lse = torch.ops.jaxfp8.start_prefill(
        q, cu_seqlens_q, q_descale, v_head_dim, scale, precision, name, backend
    )
    as_given = precision == "bf16" or q.dtype != torch.bfloat16
    return PrefillState(
        q=q,
        query=q if as_given else quantized,
        q_descale=q_descale if as_given else descale,
        cu_seqlens_q=cu_seqlens_q,
        acc=acc,
        lse_ht=lse,
        softmax_scale=scale,
        precision=precision,
        fmt=name,
        backend=backend,
        lse_layout=lse_layout,
    )


def attend_new_tokens(
    state: PrefillState,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    precision: Precision = "bf16",
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
) -> PrefillState:
    """Adds the new tokens' own keys and values, causally: token i sees the tokens 0 ... i.

    Args:
      state: the pass.
      k: [Tq, H, Dqk], bfloat16; the sequences are those of the queries.
      v: [Tq, H, Dv], bfloat16; like k it may be the columns of every head of a wider tensor.
      precision: "bf16", or "fp8" in a pass of precision "fp8".
      k_descale: float32 [H], for "fp8"; None takes a dynamic one.
      v_descale: float32 [H], likewise.

    Raises:
      TypeError, ValueError, NotImplementedError: as `jaxfp8_torch.prefill_attention`.
    """
    _check(state, k, v, k_descale, v_descale)
    check_precision(precision)
    if precision == "fp8" and state.precision == "bf16":
        raise ValueError(
            "precision: expected 'bf16' in a pass of precision 'bf16', got 'fp8'; "
            "start_prefill(precision='fp8') quantizes the queries"
        )
    query, descale, fmt = state.query, state.q_descale, state.fmt
    if precision == "bf16":
        query, descale, fmt = state.q, None, None
    acc, lse = torch.ops.jaxfp8.attend(
        query, descale, state.cu_seqlens_q, state.acc, state.lse_ht, k, v, None, k_descale,
        v_descale, state.softmax_scale, precision, fmt, state.backend,
    )  # fmt: skip
    return dataclasses.replace(state, acc=acc, lse_ht=lse)


def attend_segment(
    state: PrefillState,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
) -> PrefillState:
    """Adds a segment of the cached context, all of which every new token of its sequence sees.

    Args:
      state: the pass.
      k: [Tk, H, Dqk], bfloat16; or FP8 in the pass's format, with `k_descale`.
      v: [Tk, H, Dv], likewise; like k it may be the columns of every head of a wider tensor.
      cu_seqlens_k: int32 [B + 1], the pass's sequences within this segment; any may be empty.
      k_descale: float32 [H]; None takes a dynamic one for this segment.
      v_descale: float32 [H], likewise.

    Raises:
      TypeError, ValueError, NotImplementedError: as `jaxfp8_torch.prefill_attention`.
    """
    _check(state, k, v, k_descale, v_descale)
    check_tensor("cu_seqlens_k", cu_seqlens_k)
    acc, lse = torch.ops.jaxfp8.attend(
        state.query, state.q_descale, state.cu_seqlens_q, state.acc, state.lse_ht, k, v,
        cu_seqlens_k, k_descale, v_descale, state.softmax_scale, state.precision, state.fmt,
        state.backend,
    )  # fmt: skip
    return dataclasses.replace(state, acc=acc, lse_ht=lse)


def _check(state: Any, k: Any, v: Any, k_descale: Any, v_descale: Any) -> None:
    if not isinstance(state, PrefillState):
        raise TypeError(
            f"state: expected a PrefillState from start_prefill, got {type(state).__name__}"
        )
    check_tensor("k", k)
    check_tensor("v", v)
    for name, x in (("k_descale", k_descale), ("v_descale", v_descale)):
        if x is not None:
            check_tensor(name, x)
