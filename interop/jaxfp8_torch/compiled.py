# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""What JAX compiles: one jitted function for each operation and each set of options.

Everything runs under jax.jit, where jaxfp8 reads no values: nothing waits for the device. The
options are keys of a cache here and are compiled in; shapes are JAX's to tell apart.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

import jaxfp8
from jaxfp8 import E4M3FN, E4M3FNUZ, AttentionState, Fp8Format, HeadSlice, LayerScales
from jaxfp8_torch import devices, runtime

Layout = tuple[int | None, ...]
"""Lengths of vectors packed into one, first cu_seqlens, then descales; None where there is none."""

_Array = jax.Array | HeadSlice
_FORMATS = {fmt.name: fmt for fmt in (E4M3FNUZ, E4M3FN)}


def format_of(name: str | None) -> Fp8Format | None:
    """The format of a name, as operators carry it."""
    return None if name is None else _FORMATS[name]


def target_format(device: torch.device) -> str:
    """The name of the FP8 format of a torch device.

    Raises:
      NotImplementedError: it has none.
    """
    target = jaxfp8.detect_target(devices.jax_device(device))
    if target.fp8_format is None:
        raise NotImplementedError(
            f"precision: 'fp8' needs FP8 matrix units, and {target.arch} has none that this "
            "library knows; pass precision='bf16'"
        )
    return target.fp8_format.name


def _compile(function: Callable[..., Any], device: jax.Device) -> Callable[..., Any]:
    """function under jit, for a device: what the library chooses for a device, it chooses for
    this one, whichever is JAX's default.
    """

    def traced(*arguments: Any) -> Any:
        runtime.count_compilation()
        with jax.default_device(device):
            return function(*arguments)

    # Unused arguments too: a program waits for the last of them, whatever it reads (`crossing`).
    return jax.jit(traced, keep_unused=True)


def _unpack(packed: jax.Array, layout: Layout, num_cu_seqlens: int) -> list[jax.Array | None]:
    """The vectors in int32 `packed`: cu_seqlens, then descales, float32 by their bits."""
    vectors: list[jax.Array | None] = []
    begin = 0
    for index, length in enumerate(layout):
        if length is None:
            vectors.append(None)
            continue
        vector = packed[begin : begin + length]
        begin += length
        if index >= num_cu_seqlens:
            vector = jax.lax.bitcast_convert_type(vector, jnp.float32)
        vectors.append(vector)
    return vectors


def _lse(lse: jax.Array, layout: str) -> jax.Array:
    return lse.T if layout == "TH" else lse


@functools.cache
def prefill_attention(
    device: jax.Device, layout: Layout, causal: bool, softmax_scale: float | None, precision: Any,
    fmt: str | None, backend: str | None, lse_layout: str,
) -> Callable[..., Any]:  # fmt: skip
    """jaxfp8.prefill_attention of (q, k, v, packed): both cu_seqlens, and all descales or none."""

    def run(q: _Array, k: _Array, v: _Array, packed: jax.Array) -> AttentionState:
        cu_q, cu_k, *descales = _unpack(packed, layout, 2)
        assert cu_q is not None and cu_k is not None
        scales = None if descales[0] is None else LayerScales(*descales)
        out, lse = jaxfp8.prefill_attention(
            q, k, v, cu_q, cu_k, causal=causal, softmax_scale=softmax_scale, precision=precision,
            scales=scales, fmt=format_of(fmt), backend=backend,
        )  # fmt: skip
        return AttentionState(out, _lse(lse, lse_layout))

    return _compile(run, device)


@functools.cache
def start_prefill(
    device: jax.Device, layout: Layout, v_head_dim: int, softmax_scale: float | None,
    precision: Any, fmt: str | None, backend: str | None,
) -> Callable[..., Any]:  # fmt: skip
    """(q, packed: cu_seqlens_q, descale if any) -> FP8 q [Tq, H, Dqk] and descale [H].

    Token-major, so that its shape depends on no backend; a backend packs FP8 queries bit for bit.
    Nothing is returned where there is nothing to quantize: q in FP8, or precision "bf16".
    """

    def run(q: _Array, packed: jax.Array) -> tuple[jax.Array, ...]:
        cu_q, descale = _unpack(packed, layout, 1)
        assert cu_q is not None
        # Called for its refusals; what it computes is not used, so it is not compiled.
        state = jaxfp8.start_prefill(
            q, cu_q, softmax_scale=softmax_scale, precision=precision, q_descale=descale,
            v_head_dim=v_head_dim, fmt=format_of(fmt), backend=backend,
        )  # fmt: skip
        chosen = state.query.spec.fmt
        if chosen is None or q.dtype == chosen.dtype:
            return ()
        if descale is None:
            array = q.materialize() if isinstance(q, HeadSlice) else q
            counted = jnp.arange(q.shape[0]) < cu_q[-1]
            amax = jaxfp8.per_head_amax(jnp.where(counted[:, None, None], array, 0))
            descale = jaxfp8.descale_from_amax(amax, chosen)
        return jaxfp8.quantize_per_head(q, descale, chosen), descale

    return _compile(run, device)


@functools.cache
def attend(
    device: jax.Device, layout: Layout, softmax_scale: float | None, precision: Any,
    fmt: str | None, backend: str | None,
) -> Callable[..., Any]:  # fmt: skip
    """One step of a pass: (q, acc, lse, k, v, packed) -> acc, lse.

    packed: cu_seqlens_q, cu_seqlens_k, and the descales of q, k and v, where there are any. By
    jaxfp8.attend_segment, or without cu_seqlens_k by jaxfp8.attend_new_tokens.
    """

    def run(
        q: _Array, acc: jax.Array, lse: jax.Array, k: _Array, v: _Array, packed: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        cu_q, cu_k, q_descale, k_descale, v_descale = _unpack(packed, layout, 2)
        assert cu_q is not None
        state = jaxfp8.start_prefill(
            q, cu_q, softmax_scale=softmax_scale, precision=precision, q_descale=q_descale,
            v_head_dim=acc.shape[2], fmt=format_of(fmt), backend=backend,
        )  # fmt: skip
        state = dataclasses.replace(state, acc=acc, lse=lse)
        descales = {"k_descale": k_descale, "v_descale": v_descale}
        if cu_k is None:
            state = jaxfp8.attend_new_tokens(state, k, v, precision=precision, **descales)
        else:
            state = jaxfp8.attend_segment(state, k, v, cu_k, **descales)
        return state.acc, state.lse

    return _compile(run, device)


@functools.cache
def merge_states(device: jax.Device, lse_layout: str) -> Callable[..., Any]:
    """jaxfp8.merge_states of (a_out, a_lse, b_out, b_lse)."""

    def run(a_out: jax.Array, a_lse: jax.Array, b_out: jax.Array, b_lse: jax.Array) -> Any:
        out, lse = jaxfp8.merge_states(
            AttentionState(a_out, _lse(a_lse, lse_layout)),
            AttentionState(b_out, _lse(b_lse, lse_layout)),
        )
        return out, _lse(lse, lse_layout)

    return _compile(run, device)


@functools.cache
def per_head_amax(device: jax.Device) -> Callable[..., Any]:
    """(jaxfp8.per_head_amax of (x,),)."""
    return _compile(lambda x: (jaxfp8.per_head_amax(x),), device)


@functools.cache
def quantize_per_head(device: jax.Device, layout: Layout, fmt: str) -> Callable[..., Any]:
    """(jaxfp8.quantize_per_head of (x, packed: its descale),)."""

    def run(x: _Array, packed: jax.Array) -> tuple[jax.Array]:
        (descale,) = _unpack(packed, layout, 0)
        assert descale is not None
        return (jaxfp8.quantize_per_head(x, descale, _FORMATS[fmt]),)

    return _compile(run, device)


@functools.cache
def dynamic_quantize_per_head(device: jax.Device, fmt: str) -> Callable[..., Any]:
    """jaxfp8.dynamic_quantize_per_head of (x,)."""
    return _compile(lambda x: jaxfp8.dynamic_quantize_per_head(x, _FORMATS[fmt]), device)
