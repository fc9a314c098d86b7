# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Gated multi-head latent attention, in the parts that a prefill is made of.

    hidden -> q_a_proj -> RMSNorm -> q_b_proj -> Q                                  `queries`
    hidden -> kv_a_proj -> RMSNorm of all but the shared columns -> the cache       `latents`
    cache -> kv_b_proj -> K without its shared columns, V                           `up_project`
    (attention * sigmoid(g_proj(hidden))) -> o_proj                                 `gated_output`

Pure functions of arrays, for use under jit, lax.scan and shard_map. The number of heads is that of
the weights: with the weights of a tensor-parallel rank, Q, K and V are those of its heads, and what
`gated_output` returns is the rank's part of a sum over the ranks.

Matrix products are of bfloat16 with sums in float32 (XLA does so on CPUs and GPUs alike), RMSNorm,
rotation and gate are in float32. What is rounded to bfloat16: the normalized latents, Q, K, V, and
the gated attention.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8 import checks
from jaxfp8.head_slice import HeadSlice
from jaxfp8.models.arguments import check_hidden
from jaxfp8.models.config import MlaConfig
from jaxfp8.models.weights import MlaWeights
from jaxfp8.ops.quantize.assembled_key import AssembledKey
from jaxfp8.scales.layer_scales import LayerScales
from jaxfp8.segments import PrefillState, attend_segment


def queries(
    config: MlaConfig, weights: MlaWeights, hidden: jax.Array, positions: jax.Array | None = None
) -> jax.Array:
    """bfloat16 [T, H, qk_head_dim].

    Args:
      config: the layer's.
      weights: the layer's.
      hidden: bfloat16 [T, hidden_size].
      positions: int32 [T], of each token in its sequence; needed with config.rope_theta alone.

    Raises:
      TypeError: hidden is no bfloat16 array, or positions are no int32 one.
      ValueError: shapes disagree, or positions are needed and missing.
    """
    check_hidden(config, hidden)
    latent = _project("tc,rc->tr", hidden, weights.q_a_proj, jnp.float32)
    latent = rms_norm(latent, weights.q_a_layernorm, config.rms_norm_eps).astype(jnp.bfloat16)
    q = _project("tr,hdr->thd", latent, weights.q_b_proj)
    if config.rope_theta is None:
        return q
    nope, rope = jnp.split(q, [config.qk_nope_head_dim], axis=2)
    return jnp.concatenate([nope, _rotated(rope, positions, config.rope_theta)], axis=2)


def latents(
    config: MlaConfig, weights: MlaWeights, hidden: jax.Array, positions: jax.Array | None = None
) -> jax.Array:
    """bfloat16 [T, latent_dim]: what the cache holds, the normalized latent and K's shared columns.

    Arguments and errors are those of `queries`.
    """
    check_hidden(config, hidden)
    both = _project("tc,rc->tr", hidden, weights.kv_a_proj, jnp.float32)
    latent, rope = jnp.split(both, [config.kv_lora_rank], axis=1)
    latent = rms_norm(latent, weights.kv_a_layernorm, config.rms_norm_eps)
    if config.rope_theta is not None:
        rope = _rotated(rope[:, None], positions, config.rope_theta)[:, 0]
    return jnp.concatenate([latent, rope], axis=1).astype(jnp.bfloat16)


def up_project(
    config: MlaConfig, weights: MlaWeights, cached: jax.Array
) -> tuple[AssembledKey, HeadSlice]:
    """K [T, H, qk_head_dim] and V [T, H, v_head_dim] of cached latents.

    One product makes both, bfloat16 [T, H, qk_nope_head_dim + v_head_dim]; what is returned are
    views of it (and of the cache's shared columns) that a quantizing kernel reads in place.

    Args:
      config: the layer's.
      weights: the layer's.
      cached: bfloat16 [T, latent_dim], from `latents`.

    Raises:
      TypeError, ValueError: cached is no array, or of another shape.
    """
    shape = f"[T, {config.latent_dim}]"
    checks.array("cached", cached, shape)
    checks.matches("cached", cached, shape, (None, config.latent_dim), "config")
    latent, rope = jnp.split(cached, [config.kv_lora_rank], axis=1)
    kv_nope = _project("tr,hdr->thd", latent, weights.kv_b_proj)
    return (
        AssembledKey(nope=HeadSlice(kv_nope, 0, config.qk_nope_head_dim), rope=rope),
        HeadSlice(kv_nope, config.qk_nope_head_dim, config.v_head_dim),
    )


def attend_latents(
    state: PrefillState,
    config: MlaConfig,
    weights: MlaWeights,
    cached: jax.Array,
    cu_seqlens_k: jax.Array,
    scales: LayerScales | None = None,
) -> PrefillState:
    """Adds a segment of the cached context to a prefill pass: up-projects it and attends to it.

    Args:
      state: the pass, from `jaxfp8.start_prefill`.
      config: the layer's.
      weights: the layer's, of the heads of the pass.
      cached: bfloat16 [T, latent_dim]; rows past cu_seqlens_k[-1] may hold anything.
      cu_seqlens_k: int32 [B + 1], the pass's sequences within this segment.
      scales: of the pass's heads; None takes dynamic ones from this segment, or is a pass in
        "bf16".

    Raises:
      TypeError, ValueError, NotImplementedError: as `jaxfp8.attend_segment`.
    """
    k, v = up_project(config, weights, cached)
    k_descale, v_descale = (None, None) if scales is None else (scales.k, scales.v)
    return attend_segment(state, k, v, cu_seqlens_k, k_descale=k_descale, v_descale=v_descale)


def gated_output(
    config: MlaConfig, weights: MlaWeights, hidden: jax.Array, attention: jax.Array
) -> jax.Array:
    """float32 [T, hidden_size]: the layer's output; of a tensor-parallel rank, its part of the sum.

    The caller adds up the parts of all ranks (`jax.lax.psum`), in float32 or, for half the
    traffic, rounded to bfloat16 first.

    Args:
      config: the layer's.
      weights: the layer's.
      hidden: bfloat16 [T, hidden_size], the layer's input.
      attention: float [T, H, v_head_dim], the attention output (`PrefillState.acc`).

    Raises:
      TypeError, ValueError: hidden or attention is no array, or shapes disagree.
    """
    check_hidden(config, hidden)
    expected = (hidden.shape[0], weights.num_heads, config.v_head_dim)
    checks.array("attention", attention, "[T, H, v_head_dim]")
    checks.matches("attention", attention, str(list(expected)), expected, "hidden and weights")
    attention = attention.astype(jnp.float32)
    if weights.g_proj is not None:
        gate = _project("tc,hdc->thd", hidden, weights.g_proj, jnp.float32)
        attention = attention * jax.nn.sigmoid(gate)
    return _project("thd,chd->tc", attention.astype(jnp.bfloat16), weights.o_proj, jnp.float32)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """float32: x / sqrt(mean(x ** 2) + eps) * weight, over the last axis."""
    x = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale * jnp.expand_dims(weight.astype(jnp.float32), range(x.ndim - 1))


def _project(
    subscripts: str, x: jax.Array, weight: jax.Array, dtype: jax.typing.DTypeLike = jnp.bfloat16
) -> jax.Array:
    return jnp.einsum(subscripts, x, weight, preferred_element_type=dtype)


def _rotated(x: jax.Array, positions: jax.Array | None, theta: float) -> jax.Array:
    """x [T, H, D] with its columns (2i, 2i + 1) turned by position * theta ** (-2i / D).

    DeepSeek pairs neighbouring columns. Its published code then sorts them into even and odd; an
    order that Q and K share does not change their products, so it is left out here.
    """
    if positions is None:
        raise ValueError("positions: needed with a rotary embedding (config.rope_theta), got None")
    checks.array("positions", positions, "[T]")
    checks.matches("positions", positions, str([x.shape[0]]), (x.shape[0],), "hidden")
    checks.dtype_in("positions", positions, [np.int32])
    pairs = x.shape[2] // 2
    frequency = theta ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs)
    angle = positions.astype(jnp.float32)[:, None, None] * frequency[None, None]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    even, odd = x[:, :, 0::2].astype(jnp.float32), x[:, :, 1::2].astype(jnp.float32)
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)
