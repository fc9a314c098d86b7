# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""From checked arguments to a backend: what the public functions (prefill.py, segments.py) share.

The first half checks a query or a context and chooses the backend; the second is what is compiled:
one jitted function a step, whose static arguments are the backend's name and the request's spec.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8 import checks
from jaxfp8.formats import Fp8Format
from jaxfp8.head_slice import HeadSlice
from jaxfp8.inference_only import inference_only
from jaxfp8.ops.attention.base import AttentionSpec, Precision, QuantizedContext, QuantizedQuery
from jaxfp8.ops.attention.registry import choose_backend, get_backend
from jaxfp8.ops.quantize import reference as quantize
from jaxfp8.ops.quantize.assembled_key import AssembledKey
from jaxfp8.states import AttentionState
from jaxfp8.targets import Target, detect_target


def pack_query(
    q: jax.Array | HeadSlice,
    cu_seqlens_q: jax.Array,
    descale: jax.Array | None,
    precision: Precision,
    fmt: Fp8Format | None,
    backend: str | None,
    *,
    v_head_dim: int | None,
    descale_name: str = "descale",
) -> QuantizedQuery:
    """`quantize_query` for either precision; v_head_dim, where known, decides on the backend."""
    target = target_of(q)
    spec = spec_of(precision, fmt, target)
    num_heads, qk_head_dim, num_tokens = check_query(q, spec.fmt)
    cu_seqlens_q = checks.cu_seqlens("cu_seqlens_q", cu_seqlens_q, num_tokens, "q")
    descale = check_descale(descale_name, descale, spec, num_heads, "q")
    require_descale("q", q, descale, descale_name)
    spec = dataclasses.replace(
        spec, num_heads=num_heads, qk_head_dim=qk_head_dim, v_head_dim=v_head_dim
    )
    chosen = choose_backend(backend, spec, target)
    return pack_query_compiled(q, cu_seqlens_q, descale, backend=chosen.name, spec=spec)


def pack_context(
    k: jax.Array | HeadSlice | AssembledKey,
    v: jax.Array | HeadSlice,
    cu_seqlens_k: jax.Array,
    k_descale: jax.Array | None,
    v_descale: jax.Array | None,
    precision: Precision,
    fmt: Fp8Format | None,
    backend: str | None,
) -> QuantizedContext:
    """`quantize_context` for either precision."""
    target = target_of(k)
    spec = spec_of(precision, fmt, target)
    checks.keys("k", k, "[Tk, H, Dqk]")
    _, num_heads, qk_head_dim = k.shape
    v_head_dim = check_context(k, v, spec.fmt, num_heads, qk_head_dim, "k")
    cu_seqlens_k = checks.cu_seqlens("cu_seqlens_k", cu_seqlens_k, k.shape[0], "k")
    k_descale = check_descale("k_descale", k_descale, spec, num_heads, "k")
    v_descale = check_descale("v_descale", v_descale, spec, num_heads, "v")
    require_descale("k", k, k_descale, "k_descale")
    require_descale("v", v, v_descale, "v_descale")
    spec = dataclasses.replace(
        spec, num_heads=num_heads, qk_head_dim=qk_head_dim, v_head_dim=v_head_dim
    )
    chosen = choose_backend(backend, spec, target)
    return pack_context_compiled(
        k, v, cu_seqlens_k, k_descale, v_descale, backend=chosen.name, spec=spec
    )


def target_of(x: Any) -> Target:
    """The target of the device that holds x; of JAX's default device where x has none yet."""
    leaves = jax.tree.leaves(x)
    x = leaves[0] if leaves else None
    if isinstance(x, jax.Array) and not checks.is_traced(x):
        return detect_target(min(x.devices(), key=lambda device: device.id))
    return detect_target()


def spec_of(precision: Any, fmt: Any, target: Target) -> AttentionSpec:
    """The spec of a request, its dims still to be filled in."""
    if not (isinstance(precision, str) and precision in get_args(Precision)):
        raise ValueError(f"precision: expected 'fp8' or 'bf16', got {precision!r}")
    if fmt is not None:
        checks.fp8_format(fmt)
    if precision == "bf16":
        return AttentionSpec("bf16", None, 0, 0, None)
    if target.fp8_format is None:
        raise NotImplementedError(
            f"precision: 'fp8' needs FP8 matrix units, and {target.arch} has none that this "
            "library knows; pass precision='bf16'"
        )
    if fmt is not None and not target.speaks(fmt):
        raise ValueError(
            f"fmt: expected {target.fp8_format.name}, the FP8 format of {target.arch}, got "
            f"{fmt.name}. {checks.same_bits(fmt.name)}, so they are refused, not reinterpreted"
        )
    return AttentionSpec("fp8", fmt or target.fp8_format, 0, 0, None)


def check_query(q: Any, fmt: Fp8Format | None) -> tuple[int, int, int]:
    """H, Dqk and Tq of a sound q."""
    checks.heads("q", q, "[Tq, H, Dqk]")
    checks.attention_dtype("q", q, fmt)
    num_tokens, num_heads, qk_head_dim = q.shape
    return num_heads, qk_head_dim, num_tokens


def check_context(
    k: Any, v: Any, fmt: Fp8Format | None, num_heads: int, qk_head_dim: int, other: str
) -> int:
    """Dv of sound k and v."""
    checks.keys("k", k, f"[Tk, {num_heads}, {qk_head_dim}]")
    checks.attention_dtype("k", k, fmt)
    checks.matches(
        "k", k, f"[Tk, {num_heads}, {qk_head_dim}]", (None, num_heads, qk_head_dim), other
    )
    checks.heads("v", v, f"[{k.shape[0]}, {num_heads}, Dv]")
    checks.attention_dtype("v", v, fmt)
    checks.matches("v", v, f"[{k.shape[0]}, {num_heads}, Dv]", (k.shape[0], num_heads, None), "k")
    return int(v.shape[2])


def check_descale(
    name: str, x: Any, spec: AttentionSpec, num_heads: int, to_match: str
) -> jax.Array | None:
    """A sound descale, or None; in a request for "bf16" only None."""
    if x is None:
        return None
    if spec.fmt is None:
        raise ValueError(f"{name}: expected None with precision='bf16', which has no scales to use")
    return checks.descale(name, x, num_heads, to_match)


def require_descale(name: str, x: Any, descale: Any, argument: str) -> None:
    """ValueError where FP8 data come without their descales."""
    if checks.is_fp8(x) and descale is None:
        raise ValueError(
            f"{argument}: expected descales for {name}, which is already {np.dtype(x.dtype).name}: "
            "its bits alone do not say what it is worth"
        )


@functools.partial(jax.jit, static_argnames=("backend", "spec"))
def pack_query_compiled(
    q: Any, cu_seqlens: jax.Array, descale: jax.Array | None, *, backend: str, spec: AttentionSpec
) -> QuantizedQuery:
    """Packs a checked q; descale None is computed from it."""
    q, descale = inference_only((q, descale))
    implementation = get_backend(backend)
    cu_seqlens = checks.sound_cu_seqlens(cu_seqlens, q.shape[0])
    descale = _descale(q, descale, cu_seqlens, backend, spec)
    data = implementation.pack_query(q, cu_seqlens, descale, spec)
    return QuantizedQuery(data, cu_seqlens, descale, backend, spec, q.shape[0])


@functools.partial(jax.jit, static_argnames=("backend", "spec"))
def pack_context_compiled(
    k: Any, v: Any, cu_seqlens: jax.Array, k_descale: jax.Array | None,
    v_descale: jax.Array | None, *, backend: str, spec: AttentionSpec,
) -> QuantizedContext:  # fmt: skip
    """Packs checked k and v; descales that are None are computed from them."""
    k, v, k_descale, v_descale = inference_only((k, v, k_descale, v_descale))
    implementation = get_backend(backend)
    cu_seqlens = checks.sound_cu_seqlens(cu_seqlens, k.shape[0])
    k_descale = _descale(k, k_descale, cu_seqlens, backend, spec)
    v_descale = _descale(v, v_descale, cu_seqlens, backend, spec)
    data = implementation.pack_context(k, v, cu_seqlens, k_descale, v_descale, spec)
    return QuantizedContext(data, cu_seqlens, k_descale, v_descale, backend, spec, k.shape[0])


def _descale(
    x: Any, given: jax.Array | None, cu_seqlens: jax.Array, backend: str, spec: AttentionSpec
) -> jax.Array:
    if spec.fmt is None:
        return jnp.ones(spec.num_heads, jnp.float32)
    if given is not None:
        return given
    if x.shape[0] == 0:
        return quantize.descale_from_amax(jnp.zeros(spec.num_heads), spec.fmt)
    amax = get_backend(backend).amax(x, cu_seqlens[-1])
    return quantize.descale_from_amax(amax, spec.fmt)


@functools.partial(jax.jit, static_argnames=("causal", "softmax_scale"))
def attend_compiled(
    query: QuantizedQuery, context: QuantizedContext, *, causal: bool, softmax_scale: float
) -> AttentionState:
    """The backend's attention, or an empty state where there is nothing to attend with or to."""
    query, context = inference_only((query, context))
    v_head_dim = cast(int, context.spec.v_head_dim)
    num_heads = query.spec.num_heads
    if query.num_tokens == 0 or context.num_tokens == 0 or query.cu_seqlens.shape[0] == 1:
        return AttentionState(
            jnp.zeros((query.num_tokens, num_heads, v_head_dim), jnp.bfloat16),
            jnp.full((num_heads, query.num_tokens), -jnp.inf, jnp.float32),
        )
    return get_backend(query.backend).attend(
        query, context, causal=causal, softmax_scale=softmax_scale
    )
