# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Compiling ahead of the traffic."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

import torch

from jaxfp8 import Fp8Format, LayerScales
from jaxfp8.scales.arguments import integer, require
from jaxfp8_torch.buckets import Buckets, set_buckets
from jaxfp8_torch.prefill import Precision, prefill_attention
from jaxfp8_torch.runtime import compilation_count, use_compilation_cache
from jaxfp8_torch.segments import attend_new_tokens, attend_segment, start_prefill
from jaxfp8_torch.states import LseLayout


def warmup(
    buckets: Buckets,
    num_heads: int,
    *,
    qk_head_dim: int = 192,
    v_head_dim: int = 128,
    v_width: int | None = None,
    device: torch.device | str | None = None,
    causal: Sequence[bool] = (True,),
    softmax_scale: float | None = None,
    precision: Precision = "fp8",
    static_scales: bool = True,
    segments: bool = True,
    fmt: Fp8Format | None = None,
    backend: str | None = None,
    lse_layout: LseLayout = "HT",
    cache_dir: str | os.PathLike[str] | None = None,
) -> int:
    """Compiles every program that calls with these options can need, and makes `buckets` those
    in force.

    Args:
      buckets: the sizes.
      num_heads: heads of this rank.
      qk_head_dim: head dim of Q and K.
      v_head_dim: head dim of V.
      v_width: where V is the last v_head_dim columns of every head of a wider tensor, that
        tensor's columns (256 for vLLM's kv_nope), for calls whose sizes are those of buckets;
        other calls copy V, so both are compiled.
      device: where the tensors will be; None is torch's default device.
      causal: what `prefill_attention` is compiled for; empty leaves it out.
      softmax_scale, precision, fmt, backend, lse_layout: as in the calls to come.
      static_scales: whether the calls will give scales.
      segments: whether a pass (start_prefill, attend_new_tokens, attend_segment) is compiled.
      cache_dir: a folder that keeps what is compiled for the next process.

    Returns:
      The number of programs compiled.

    Raises:
      TypeError, ValueError, NotImplementedError: an argument that calls would be refused for; a
        size that is none.
    """
    require("buckets", buckets, Buckets, "Buckets")
    num_heads = _positive("num_heads", num_heads)
    qk_head_dim = _positive("qk_head_dim", qk_head_dim)
    v_head_dim = _positive("v_head_dim", v_head_dim)
    if v_width is not None and (v_width := _positive("v_width", v_width)) < v_head_dim:
        raise ValueError(f"v_width: expected at least v_head_dim, {v_head_dim}, got {v_width}")
    require("causal", causal, Sequence, "a sequence of the values that calls will give")
    before = compilation_count()
    if cache_dir is not None:
        use_compilation_cache(cache_dir)
    set_buckets(buckets)
    device = torch.get_default_device() if device is None else torch.device(device)

    def heads(tokens: int, dim: int) -> torch.Tensor:
        return torch.zeros((tokens, num_heads, dim), dtype=torch.bfloat16, device=device)

    def values(tokens: int) -> list[torch.Tensor]:
        contiguous = heads(tokens, v_head_dim)
        if v_width is None:
            return [contiguous]
        return [contiguous, heads(tokens, v_width)[:, :, v_width - v_head_dim :]]

    one = torch.ones(num_heads, dtype=torch.float32, device=device)
    scales = LayerScales(one, one, one) if static_scales and precision == "fp8" else None
    descales = {} if scales is None else {"k_descale": scales.k, "v_descale": scales.v}
    for tokens, sequences in itertools.product(buckets.query_tokens, buckets.sequences):
        # No tokens: nothing is computed, everything is compiled.
        cu_seqlens = torch.zeros(sequences + 1, dtype=torch.int32, device=device)
        q = heads(tokens, qk_head_dim)
        state = None
        if segments:
            state = start_prefill(
                q, cu_seqlens, softmax_scale=softmax_scale, precision=precision,
                q_descale=None if scales is None else scales.q, v_head_dim=v_head_dim, fmt=fmt,
                backend=backend, lse_layout=lse_layout,
            )  # fmt: skip
            for v in values(tokens):
                attend_new_tokens(state, q, v)
        for rows in buckets.context_tokens:
            k = heads(rows, qk_head_dim)
            for v in values(rows):
                if state is not None:
                    attend_segment(state, k, v, cu_seqlens, **descales)
                for masked in causal:
                    prefill_attention(
                        q, k, v, cu_seqlens, cu_seqlens, causal=masked,
                        softmax_scale=softmax_scale, precision=precision, scales=scales, fmt=fmt,
                        backend=backend, lse_layout=lse_layout,
                    )  # fmt: skip
    return compilation_count() - before


def _positive(name: str, value: object) -> int:
    size = integer(name, value)
    if size < 1:
        raise ValueError(f"{name}: expected at least 1, got {size}")
    return size
