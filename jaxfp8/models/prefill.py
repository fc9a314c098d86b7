# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Prefill of an MLA layer with a latent cache: one compiled pass over a context of any length.

    out, cache = prefill_layer(config, weights, hidden, cache, batch, segment=65_536, ...)

The new tokens' latents are written into the cache, which is donated and comes back updated. The new
tokens attend to each other, causally, and then to the context, segment by segment: the latents of a
segment are projected up to K and V of every head, quantized on the way into the attention kernel's
layout (K is not put together in memory), and attended to. Everything is one program, compiled for
the shapes (capacity of the new tokens and of the cache, number of sequences) and used for whatever
lengths fit in: the loop runs over the segments that there are, so that a short context in a large
cache costs little.

Memory. With H heads, head dims 128 + 64 and 128, and S tokens a segment, the pass holds beside
weights, hidden states and what belongs to the new tokens

    cache                 capacity x 576 x 2 bytes
    one segment           S x (2 x 576  +  H x (128 + 128) x 2  +  H x (192 + 128) x e) bytes

where the terms of a segment are its latents, their up-projection in bfloat16, and K and V as the
kernel reads them (e = 1 in FP8, 2 in bfloat16; `segment_bytes`). Nothing else grows with the
context: of 1,047,552 tokens with 12 heads and segments of 65,536 in FP8 that is 1.21 GB of cache
and 0.73 GB of segment, where K and V of the whole would be 8.0 GB in bfloat16. Compiled for gfx942,
XLA plans 0.60 GB beside cache, weights and output, some of which it uses for the segment too.

On a CPU K is put together and XLA keeps several forms of it: a constant factor on the segment. XLA
of JAX 0.10 also writes and reads bfloat16 there by way of a float32 copy of the whole cache; later
ones do not, and neither does a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8 import checks
from jaxfp8.formats import Fp8Format
from jaxfp8.models import mla
from jaxfp8.models.batch import (
    PrefillBatch,
    check_batch,
    cu_seqlens_context,
    new_tokens,
    segment_rows,
    sound_batch,
)
from jaxfp8.models.config import MlaConfig
from jaxfp8.models.weights import MlaWeights, weight_shapes
from jaxfp8.ops.attention.base import Precision
from jaxfp8.ops.mesh_axes import varying_like
from jaxfp8.scales.layer_scales import LayerScales
from jaxfp8.segments import PrefillState, attend_new_tokens, start_prefill


class PrefilledLayer(NamedTuple):
    """What a pass through a layer gives.

    Attributes:
      out: float32 [T, hidden_size], the layer's output; of a tensor-parallel rank, its part of the
        sum over the ranks (`mla.gated_output`). Rows past cu_seqlens_q[-1] are zero.
      cache: bfloat16 [capacity, latent_dim], with the latents of the new tokens.
    """

    out: jax.Array
    cache: jax.Array


def empty_cache(config: MlaConfig, capacity: int) -> jax.Array:
    """bfloat16 [capacity, latent_dim] of zeros: a cache that holds nothing yet."""
    return jnp.zeros((capacity, config.latent_dim), jnp.bfloat16)


def segment_bytes(config: MlaConfig, num_heads: int, segment: int, precision: Precision) -> int:
    """Bytes that a segment takes on its way from the cache to the attention kernel: see above."""
    up_projected = num_heads * (config.qk_nope_head_dim + config.v_head_dim) * 2
    element = 1 if precision == "fp8" else 2
    packed = num_heads * (config.qk_head_dim + config.v_head_dim) * element
    return segment * (config.latent_dim * 2 + up_projected + packed)


def prefill_layer(
    config: MlaConfig,
    weights: MlaWeights,
    hidden: jax.Array,
    cache: jax.Array,
    batch: PrefillBatch,
    *,
    segment: int = 65_536,
    precision: Precision = "bf16",
    new_tokens_precision: Precision = "bf16",
    scales: LayerScales | None = None,
    fmt: Fp8Format | None = None,
    backend: str | None = None,
) -> PrefilledLayer:
    """One pass of a batch's new tokens through an MLA layer, over the context in its cache.

    Arguments are checked before anything is compiled. Outside of a transformation the cache is
    donated: the array given is deleted, go on with the one returned. Within jax.jit, lax.scan and
    shard_map the function is traced as a part of the caller's.

    Args:
      config: the layer's.
      weights: the layer's, of all heads or of a tensor-parallel rank's.
      hidden: bfloat16 [T, hidden_size], the layer's input for the new tokens. Rows past
        cu_seqlens_q[-1] may hold anything.
      cache: bfloat16 [capacity, latent_dim]. Rows that hold no context may hold anything.
      batch: which rows of hidden and cache belong to which sequence.
      segment: tokens of the context that are attended to at a time.
      precision: of the attention over the context.
      new_tokens_precision: of the attention of the new tokens to each other; "fp8" only in a pass
        that is "fp8" over the context too.
      scales: static scales of the heads, for "fp8"; None takes dynamic ones, of K and V anew for
        every segment.
      fmt: the FP8 format; None is the target's own.
      backend: as in `jaxfp8.prefill_attention`.

    Raises:
      TypeError: an argument is of the wrong kind or dtype.
      ValueError: shapes disagree, or the cache is too short; the cache given is as it was.
      NotImplementedError: no backend serves the request.
    """
    _check_weights(config, weights)
    hidden_size, latent_dim = config.hidden_size, config.latent_dim
    checks.array("hidden", hidden, f"[T, {hidden_size}]")
    checks.matches("hidden", hidden, f"[T, {hidden_size}]", (None, hidden_size), "config")
    checks.dtype_in("hidden", hidden, [jnp.bfloat16])
    checks.array("cache", cache, f"[capacity, {latent_dim}]")
    checks.matches("cache", cache, f"[capacity, {latent_dim}]", (None, latent_dim), "config")
    checks.dtype_in("cache", cache, [jnp.bfloat16])
    batch = check_batch(batch, hidden.shape[0], cache.shape[0])
    if isinstance(segment, bool) or not isinstance(segment, int | np.integer) or segment < 1:
        raise ValueError(f"segment: expected a number of tokens >= 1, got {segment!r}")
    for name, value in (
        ("precision", precision), ("new_tokens_precision", new_tokens_precision)
    ):  # fmt: skip
        if value not in get_args(Precision):
            raise ValueError(f"{name}: expected 'fp8' or 'bf16', got {value!r}")
    if new_tokens_precision == "fp8" and precision == "bf16":
        raise ValueError(
            "new_tokens_precision: expected 'bf16' in a pass of precision 'bf16', got 'fp8'"
        )
    return _prefill_layer(
        config, weights, hidden, cache, batch, _check_scales(scales, precision, weights.num_heads),
        segment=int(segment), precision=precision, new_tokens_precision=new_tokens_precision,
        fmt=fmt, backend=backend,
    )  # fmt: skip


def attend_context(
    state: PrefillState,
    config: MlaConfig,
    weights: MlaWeights,
    cache: jax.Array,
    batch: PrefillBatch,
    *,
    segment: int,
    scales: LayerScales | None = None,
) -> PrefillState:
    """Adds the whole cached context to a prefill pass: `mla.attend_latents`, segment by segment.

    For use under jit. Under shard_map the cache may be a device's own part of the context, with the
    lengths of that part in the batch; the loop then runs as often as that device's part asks for.

    Args:
      state: the pass.
      config: the layer's.
      weights: the layer's, of the heads of the pass.
      cache: bfloat16 [capacity, latent_dim].
      batch: which rows of the cache are context.
      segment: tokens at a time.
      scales: as in `mla.attend_latents`.
    """
    segment = min(segment, cache.shape[0])
    if segment == 0:
        return state
    num_segments = (cu_seqlens_context(batch)[-1] + segment - 1) // segment

    def attend_segment(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        rows, cu_seqlens_k = segment_rows(batch, i * segment, segment)
        cached = jnp.take(cache, rows, axis=0, mode="clip")
        seen = dataclasses.replace(state, acc=carry[0], lse=carry[1])
        seen = mla.attend_latents(seen, config, weights, cached, cu_seqlens_k, scales)
        return seen.acc, seen.lse

    carry = varying_like((state.acc, state.lse), cache, batch, weights.kv_b_proj, scales)
    acc, lse = jax.lax.fori_loop(jnp.int32(0), num_segments, attend_segment, carry)
    return dataclasses.replace(state, acc=acc, lse=lse)


@functools.partial(
    jax.jit,
    static_argnames=(
        "config", "segment", "precision", "new_tokens_precision", "fmt", "backend"
    ),
    donate_argnames="cache",
)  # fmt: skip
def _prefill_layer(
    config: MlaConfig, weights: MlaWeights, hidden: jax.Array, cache: jax.Array,
    batch: PrefillBatch, scales: LayerScales | None,
    *, segment: int, precision: Precision, new_tokens_precision: Precision,
    fmt: Fp8Format | None, backend: str | None,
) -> PrefilledLayer:  # fmt: skip
    num_tokens, capacity = hidden.shape[0], cache.shape[0]
    batch = sound_batch(batch, num_tokens, capacity)
    new = new_tokens(batch, num_tokens, capacity)
    latents = mla.latents(config, weights, hidden, new.position)
    # Before the context is read, so that the cache can be written in place.
    cache = cache.at[new.row].set(latents, mode="drop", unique_indices=True)
    state = start_prefill(
        mla.queries(config, weights, hidden, new.position),
        batch.cu_seqlens_q,
        softmax_scale=config.softmax_scale,
        precision=precision,
        q_descale=None if scales is None else scales.q,
        v_head_dim=config.v_head_dim,
        fmt=fmt,
        backend=backend,
    )
    k, v = mla.up_project(config, weights, latents)
    k_descale, v_descale = (None, None)
    if scales is not None and new_tokens_precision == "fp8":
        k_descale, v_descale = scales.k, scales.v
    state = attend_new_tokens(
        state, k, v, precision=new_tokens_precision, k_descale=k_descale, v_descale=v_descale
    )
    state = attend_context(state, config, weights, cache, batch, segment=segment, scales=scales)
    out = mla.gated_output(config, weights, hidden, state.acc)
    counted = jnp.arange(num_tokens) < batch.cu_seqlens_q[-1]
    return PrefilledLayer(jnp.where(counted[:, None], out, 0.0), cache)


def _check_weights(config: MlaConfig, weights: MlaWeights) -> None:
    if not isinstance(weights, MlaWeights):
        raise TypeError(f"weights: expected an MlaWeights, got {type(weights).__name__}")
    checks.array("weights.q_b_proj", weights.q_b_proj, "[H, qk_head_dim, q_lora_rank]")
    expected, other = ("an array", "None") if config.output_gate else ("None", "an array")
    if (weights.g_proj is not None) != config.output_gate:
        raise ValueError(
            f"weights.g_proj: expected {expected} with config.output_gate={config.output_gate}, "
            f"got {other}"
        )
    for name, shape in weight_shapes(config, weights.num_heads).items():
        weight = checks.array(f"weights.{name}", getattr(weights, name), str(list(shape)))
        checks.matches(f"weights.{name}", weight, str(list(shape)), shape, "config")
        checks.dtype_in(f"weights.{name}", weight, [jnp.bfloat16])


def _check_scales(
    scales: LayerScales | None, precision: Precision, num_heads: int
) -> LayerScales | None:
    if scales is None:
        return None
    if not isinstance(scales, LayerScales):
        raise TypeError(f"scales: expected a LayerScales or None, got {type(scales).__name__}")
    if precision == "bf16":
        raise ValueError("scales: expected None with precision='bf16', which has no scales to use")
    return LayerScales(
        *(
            checks.descale(f"scales.{name}", x, num_heads, name)
            for name, x in zip("qkv", scales, strict=True)
        )
    )
