# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Varlen attention prefill: the public functions check, choose a backend and call it.

`prefill_attention` does one attention. `quantize_query`, `quantize_context` and `attend` are its
parts, for callers that use a quantized query or context more than once. A prefill over a context
in segments has its own functions (jaxfp8/segments.py).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from jaxfp8 import checks, packing
from jaxfp8.formats import Fp8Format
from jaxfp8.head_slice import HeadSlice
from jaxfp8.ops.attention.base import AttentionSpec, Precision, QuantizedContext, QuantizedQuery
from jaxfp8.ops.attention.registry import choose_backend, get_backend
from jaxfp8.ops.quantize.assembled_key import AssembledKey
from jaxfp8.scales.layer_scales import LayerScales
from jaxfp8.states import AttentionState


def prefill_attention(
    q: jax.Array | HeadSlice,
    k: jax.Array | HeadSlice | AssembledKey,
    v: jax.Array | HeadSlice,
    cu_seqlens_q: jax.Array,
    cu_seqlens_k: jax.Array,
    *,
    causal: bool,
    softmax_scale: float | None = None,
    precision: Precision = "fp8",
    scales: LayerScales | None = None,
    fmt: Fp8Format | None = None,
    backend: str | None = None,
) -> AttentionState:
    """Attention of packed sequences of new tokens over packed sequences of keys.

    Sequence b holds the queries cu_seqlens_q[b] : cu_seqlens_q[b + 1] and the keys
    cu_seqlens_k[b] : cu_seqlens_k[b + 1]; each length may be 0. The arrays may be longer than
    cu_seqlens[-1]: tokens past it are ignored, their rows of the output are zero and their LSE
    -inf.

    Args:
      q: [Tq, H, Dqk], bfloat16; or FP8 in `fmt`, with `scales`.
      k: [Tk, H, Dqk], likewise; or an AssembledKey, whose parts are never put together in memory by
        the backends that can read them where they lie.
      v: [Tk, H, Dv], likewise. Each of the three may be a HeadSlice of a wider array.
      cu_seqlens_q: int32 [B + 1], starts at 0, does not decrease, ends within Tq. A traced array
        cannot be checked and is made so: nothing is ever read out of bounds.
      cu_seqlens_k: int32 [B + 1], likewise within Tk.
      causal: aligned bottom right: row i of a sequence with Lq queries and Lk keys sees the keys
        j <= i + Lk - Lq. A row that sees no key gives zeros and an LSE of -inf.
      softmax_scale: multiplies the scores; a Python number, finite and > 0. None is Dqk ** -0.5.
      precision: "fp8" (Q, K, V and the probabilities in FP8) or "bf16".
      scales: the layer's static descales; None takes dynamic ones from this call's data.
      fmt: the FP8 format; None is the target's own (E4M3FNUZ on a CPU). Not used for "bf16".
      backend: "xla", "pallas_triton", "pallas_mosaic_gpu" or "interpret"; None chooses.

    Returns:
      AttentionState: out bfloat16 [Tq, H, Dv], lse float32 [H, Tq], natural log.

    Raises:
      TypeError: an argument is of the wrong kind or dtype.
      ValueError: shapes disagree, or a value is out of range.
      NotImplementedError: no backend, or not the one named, serves the request; also on
        differentiation.

    Example:
      Two sequences in one batch, 3 and 5 new tokens over 7 and 9 keys:

      >>> import jax.numpy as jnp, numpy as np, jaxfp8
      >>> rng = np.random.default_rng(0)
      >>> q = jnp.asarray(rng.standard_normal((8, 2, 192)), jnp.bfloat16)
      >>> k = jnp.asarray(rng.standard_normal((16, 2, 192)), jnp.bfloat16)
      >>> v = jnp.asarray(rng.standard_normal((16, 2, 128)), jnp.bfloat16)
      >>> cu_seqlens_q = jnp.array([0, 3, 8], jnp.int32)
      >>> cu_seqlens_k = jnp.array([0, 7, 16], jnp.int32)
      >>> out, lse = jaxfp8.prefill_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=True)
      >>> out.shape, out.dtype.name, lse.shape, lse.dtype.name
      ((8, 2, 128), 'bfloat16', (2, 8), 'float32')

      A mistake says what was expected and what came:

      >>> jaxfp8.prefill_attention(q, k[:, :1], v, cu_seqlens_q, cu_seqlens_k, causal=True)
      Traceback (most recent call last):
      ValueError: k: expected shape [Tk, 2, 192] to match q, got [16, 1, 192]
    """
    causal = checks.flag("causal", causal)
    target = packing.target_of(q)
    spec = packing.spec_of(precision, fmt, target)
    num_heads, qk_head_dim, _ = packing.check_query(q, spec.fmt)
    v_head_dim = packing.check_context(k, v, spec.fmt, num_heads, qk_head_dim, "q")
    cu_seqlens_q = checks.cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.shape[0], "q")
    cu_seqlens_k = _cu_seqlens_k(cu_seqlens_k, k.shape[0], cu_seqlens_q.shape[0])
    softmax_scale = checks.softmax_scale(softmax_scale, qk_head_dim)
    descales = _check_scales(scales, spec, num_heads)
    for name, x, descale in zip("qkv", (q, k, v), descales, strict=True):
        packing.require_descale(name, x, descale, "scales")
    spec = dataclasses.replace(
        spec, num_heads=num_heads, qk_head_dim=qk_head_dim, v_head_dim=v_head_dim
    )
    chosen = choose_backend(backend, spec, target)
    return _prefill(
        q, k, v, cu_seqlens_q, cu_seqlens_k, descales,
        backend=chosen.name, spec=spec, causal=causal, softmax_scale=softmax_scale,
    )  # fmt: skip


def quantize_query(
    q: jax.Array | HeadSlice,
    cu_seqlens_q: jax.Array,
    *,
    descale: jax.Array | None = None,
    fmt: Fp8Format | None = None,
    backend: str | None = None,
) -> QuantizedQuery:
    """Queries quantized per head, in the layout of the backend: once, for any number of `attend`.

    Args:
      q: [Tq, H, Dqk], bfloat16; or FP8 in `fmt`, with `descale`.
      cu_seqlens_q: int32 [B + 1].
      descale: float32 [H]; None takes a dynamic one from the tokens before cu_seqlens_q[-1].
      fmt: the FP8 format; None is the target's own.
      backend: as in `prefill_attention`; give `quantize_context` the same one.

    Returns:
      A pytree that goes through jit and lax.scan.

    Raises:
      TypeError, ValueError, NotImplementedError: as `prefill_attention`.
    """
    return packing.pack_query(q, cu_seqlens_q, descale, "fp8", fmt, backend, v_head_dim=None)


def quantize_context(
    k: jax.Array | HeadSlice | AssembledKey,
    v: jax.Array | HeadSlice,
    cu_seqlens_k: jax.Array,
    *,
    k_descale: jax.Array | None = None,
    v_descale: jax.Array | None = None,
    fmt: Fp8Format | None = None,
    backend: str | None = None,
) -> QuantizedContext:
    """Keys and values quantized per head, in the layout of the backend.

    Args:
      k: [Tk, H, Dqk], bfloat16; or FP8 in `fmt`, with `k_descale`. May be an AssembledKey.
      v: [Tk, H, Dv], bfloat16; or FP8 in `fmt`, with `v_descale`.
      cu_seqlens_k: int32 [B + 1].
      k_descale: float32 [H]; None takes a dynamic one from the tokens before cu_seqlens_k[-1].
      v_descale: float32 [H], likewise.
      fmt: the FP8 format; None is the target's own.
      backend: as in `prefill_attention`; give `quantize_query` the same one.

    Returns:
      A pytree that goes through jit and lax.scan.

    Raises:
      TypeError, ValueError, NotImplementedError: as `prefill_attention`.

    Example:
      MLA's K and V where they lie: kv_nope holds K's 128 columns and V's of each head, and the
      other 64 columns of K are the same for all heads.

      >>> import jax.numpy as jnp, jaxfp8
      >>> kv_nope = jnp.ones((16, 2, 256), jnp.bfloat16)
      >>> k_rope = jnp.ones((16, 64), jnp.bfloat16)
      >>> k = jaxfp8.AssembledKey(jaxfp8.HeadSlice(kv_nope, 0, 128), k_rope)
      >>> v = jaxfp8.HeadSlice(kv_nope, 128, 128)
      >>> context = jaxfp8.quantize_context(k, v, jnp.array([0, 7, 16], jnp.int32))
      >>> context.spec.qk_head_dim, context.spec.v_head_dim, context.num_tokens
      (192, 128, 16)
    """
    return packing.pack_context(k, v, cu_seqlens_k, k_descale, v_descale, "fp8", fmt, backend)


def attend(
    query: QuantizedQuery,
    context: QuantizedContext,
    *,
    causal: bool,
    softmax_scale: float | None = None,
    backend: str | None = None,
) -> AttentionState:
    """Attention of quantized queries over a quantized context.

    Args:
      query: from `quantize_query`.
      context: from `quantize_context`, with the same heads, Dqk, format, backend and number of
        sequences.
      causal: as in `prefill_attention`.
      softmax_scale: as in `prefill_attention`.
      backend: None, or the one that both were made for.

    Returns:
      AttentionState, as `prefill_attention`.

    Raises:
      TypeError: query or context is of another kind.
      ValueError: they do not fit each other, or the backend named is not theirs.

    Example:
      >>> import jax.numpy as jnp, jaxfp8
      >>> q, k = jnp.ones((8, 2, 192), jnp.bfloat16), jnp.ones((16, 2, 192), jnp.bfloat16)
      >>> v, cu_seqlens_k = jnp.ones((16, 2, 128), jnp.bfloat16), jnp.array([0, 7, 16], jnp.int32)
      >>> query = jaxfp8.quantize_query(q, jnp.array([0, 3, 8], jnp.int32))
      >>> context = jaxfp8.quantize_context(k, v, cu_seqlens_k)
      >>> jaxfp8.attend(query, context, causal=False).out.shape
      (8, 2, 128)
    """
    if not isinstance(query, QuantizedQuery):
        raise TypeError(f"query: expected a QuantizedQuery, got {type(query).__name__}")
    if not isinstance(context, QuantizedContext):
        raise TypeError(f"context: expected a QuantizedContext, got {type(context).__name__}")
    causal = checks.flag("causal", causal)
    for what, have, want in (
        ("backend", context.backend, query.backend),
        ("precision", context.spec.precision, query.spec.precision),
        ("fmt", context.spec.fmt, query.spec.fmt),
        ("number of heads", context.spec.num_heads, query.spec.num_heads),
        ("qk_head_dim", context.spec.qk_head_dim, query.spec.qk_head_dim),
        ("cu_seqlens shape", context.cu_seqlens.shape, query.cu_seqlens.shape),
    ):
        if have != want:
            raise ValueError(f"context: expected {what} {want} to match query, got {have}")
    if backend is not None and get_backend(backend).name != query.backend:
        raise ValueError(
            f"backend: query and context are in the layout of {query.backend!r}, got {backend!r}; "
            "name the backend in quantize_query and quantize_context"
        )
    return packing.attend_compiled(
        query,
        context,
        causal=causal,
        softmax_scale=checks.softmax_scale(softmax_scale, query.spec.qk_head_dim),
    )


_Descales = tuple[jax.Array | None, jax.Array | None, jax.Array | None]


def _cu_seqlens_k(x: Any, num_tokens: int, expected: int) -> jax.Array:
    x = checks.cu_seqlens("cu_seqlens_k", x, num_tokens, "k")
    checks.matches("cu_seqlens_k", x, f"[{expected}]", (expected,), "cu_seqlens_q")
    return x


def _check_scales(scales: Any, spec: AttentionSpec, num_heads: int) -> _Descales:
    if scales is None:
        return None, None, None
    if not isinstance(scales, LayerScales):
        raise TypeError(f"scales: expected a LayerScales or None, got {type(scales).__name__}")
    if spec.fmt is None:
        raise ValueError("scales: expected None with precision='bf16', which has no scales to use")
    return (
        checks.descale("scales.q", scales.q, num_heads, "q"),
        checks.descale("scales.k", scales.k, num_heads, "k"),
        checks.descale("scales.v", scales.v, num_heads, "v"),
    )


@functools.partial(jax.jit, static_argnames=("backend", "spec", "causal", "softmax_scale"))
def _prefill(
    q: Any, k: Any, v: Any, cu_seqlens_q: jax.Array, cu_seqlens_k: jax.Array, descales: _Descales,
    *, backend: str, spec: AttentionSpec, causal: bool, softmax_scale: float,
) -> AttentionState:  # fmt: skip
    q_descale, k_descale, v_descale = descales
    query = packing.pack_query_compiled(q, cu_seqlens_q, q_descale, backend=backend, spec=spec)
    context = packing.pack_context_compiled(
        k, v, cu_seqlens_k, k_descale, v_descale, backend=backend, spec=spec
    )
    return packing.attend_compiled(query, context, causal=causal, softmax_scale=softmax_scale)
