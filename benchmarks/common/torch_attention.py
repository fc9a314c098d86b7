# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""torch's scaled_dot_product_attention for a batch. torch is imported here when used.

Sequences of unlike lengths are a call each: torch has no function for all of them that takes V
narrower than K. Its path to cuDNN has no causal mask that is aligned bottom right: behind a context
that is two calls, over the context and, causal, over the last keys, merged by their log-sum-exps.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from common import torch_on_gpu
from common.inputs import Batch, Tensors, pick
from common.timing import Subject


class _Call(NamedTuple):
    """Sequences of one length."""

    sequences: int
    length_q: int
    length_k: int


def subject(kernel: str | None, batch: Batch, sets: list[Tensors]) -> Subject:
    """Attention of a batch; `output` gives [Tq, H, Dv] and None.

    Args:
      kernel: of torch's SDPBackend, "CUDNN_ATTENTION" or another; None leaves it to torch.
      batch: the sequences.
      sets: inputs.

    Raises:
      NotImplementedError: the kernel does not serve the batch.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    calls = [_Call(1, q, k) for q, k in zip(batch.lengths_q, batch.lengths_k, strict=True)]
    if len(set(calls)) == 1:
        calls = [calls[0]._replace(sequences=len(calls))]
    given = [_attentions(kernel, batch.causal, calls, tensors) for tensors in sets]
    chosen = None if kernel is None else getattr(SDPBackend, kernel)

    def launch(number: int) -> list[Any]:
        with torch.inference_mode(), sdpa_kernel(chosen) if chosen else contextlib.nullcontext():
            return [attention() for attention in pick(given, number)]

    # Why a kernel does not serve the shapes torch says in warnings; the error names none.
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            launch(0)
        except RuntimeError as error:
            texts = [str(warning.message).split(" (Triggered")[0] for warning in said]
            reasons = [x for x in texts if "not used because" not in x and "disabled" not in x]
            raise NotImplementedError((reasons or [str(error)])[0]) from error

    def output(outs: list[Any]) -> tuple[np.ndarray, None]:
        found = iter(out.transpose(1, 2).flatten(0, 1).float().cpu().numpy() for out in outs)
        _, heads, v_head_dim = sets[0].v.shape
        rows = [
            next(found)
            if call.length_q and call.length_k
            else np.zeros((call.sequences * call.length_q, heads, v_head_dim), np.float32)
            for call in calls
        ]
        return np.concatenate(rows), None

    return Subject(launch, torch_on_gpu.synchronize, output)


def _attentions(
    kernel: str | None, causal: bool, calls: list[_Call], tensors: Tensors
) -> list[Callable[[], Any]]:
    """What is to be called, each giving [B, H, Tq, Dv]; nothing for sequences without keys."""
    import torch
    from torch.nn.attention.bias import causal_lower_right

    q, k, v = map(torch.utils.dlpack.from_dlpack, tensors)
    attentions, end_q, end_k = [], 0, 0
    for sequences, length_q, length_k in calls:
        begin_q, end_q = end_q, end_q + sequences * length_q
        begin_k, end_k = end_k, end_k + sequences * length_k
        if not length_q or not length_k:
            continue
        qkv = [
            x.unflatten(0, (sequences, -1)).transpose(1, 2).contiguous()
            for x in (q[begin_q:end_q], k[begin_k:end_k], v[begin_k:end_k])
        ]
        if causal and kernel == "CUDNN_ATTENTION" and length_k > length_q:
            cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
            attentions.append(behind_a_context(cudnn, *qkv))
            continue
        mask: dict[str, Any] = {}
        if causal and length_q == length_k:
            mask["is_causal"] = True
        elif causal:
            mask["attn_mask"] = causal_lower_right(length_q, length_k)
        attention = torch.nn.functional.scaled_dot_product_attention
        attentions.append(functools.partial(attention, *qkv, **mask))
    return attentions


def behind_a_context(kernel: Any, q: Any, k: Any, v: Any) -> Callable[[], Any]:
    """Causal attention, aligned bottom right, of q [B, H, Tq, D] over more keys than queries.

    Args:
      kernel: with the arguments of torch.ops.aten._scaled_dot_product_cudnn_attention; the first
        two things that it returns are the output and its LSE.
      q, k, v: torch tensors.
    """
    import torch

    context = k.shape[2] - q.shape[2]
    parts = [
        ([x[:, :, part].contiguous() for x in (k, v)], causal)
        for part, causal in ((slice(context), False), (slice(context, None), True))
    ]

    def attention() -> Any:
        (first, lse), (second, other_lse) = (
            kernel(q, *kv, None, True, 0.0, causal, False)[:2] for kv, causal in parts
        )
        share = torch.sigmoid(lse - other_lse).reshape(*first.shape[:3], 1)
        return torch.lerp(second.float(), first.float(), share).to(first.dtype)

    return attention
