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
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfp8.formats import Fp8Format
from jaxfp8.models import mla
from jaxfp8.models.arguments import (
    PassOptions,
    check_cache,
    check_config,
    check_hidden,
    check_number,
    check_options,
    check_precision,
    check_scales,
    check_segment,
)
from jaxfp8.models.batch import (
    NewTokens,
    PrefillBatch,
    batch_arrays,
    check_batch,
    cu_seqlens_context,
    new_tokens,
    segment_rows,
    sound_batch,
)
from jaxfp8.models.config import MlaConfig
from jaxfp8.models.weights import MlaWeights, check_weights
from jaxfp8.ops.attention.base import Precision
from jaxfp8.ops.mesh_axes import varying_like
from jaxfp8.scales.arguments import require
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
    """bfloat16 [capacity, latent_dim] of zeros: a cache that holds nothing yet.

    Raises:
      TypeError, ValueError: config is no MlaConfig, or capacity no integer >= 0.
    """
    check_config(config)
    capacity = check_number("capacity", capacity, 0)
    return jnp.zeros((capacity, config.latent_dim), jnp.bfloat16)


def segment_bytes(config: MlaConfig, num_heads: int, segment: int, precision: Precision) -> int:
    """Bytes that a segment takes on its way from the cache to the attention kernel: see above.

    Raises:
      TypeError, ValueError: config is no MlaConfig, a number no integer >= 1, or precision neither
        "fp8" nor "bf16".
    """
    check_config(config)
    num_heads = check_number("num_heads", num_heads, 1)
    segment = check_number("segment", segment, 1)
    check_precision("precision", precision)
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
    check_config(config)
    check_weights(config, weights)
    check_hidden(config, hidden)
    check_cache(config, cache)
    batch = check_batch(batch, hidden.shape[0], cache.shape[0])
    options = check_options(segment, precision, new_tokens_precision, fmt, backend)
    scales = check_scales(scales, precision, weights.num_heads)
    return _prefill_layer(config, weights, hidden, cache, batch, scales, options=options)


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

    Raises:
      TypeError: an argument is of the wrong kind or dtype.
      ValueError: segment is no number of tokens >= 1, or shapes disagree.
    """
    check_config(config)
    check_weights(config, weights)
    check_cache(config, cache)
    batch = batch_arrays(batch)
    require("state", state, PrefillState, "a PrefillState, from jaxfp8.start_prefill")
    scales = check_scales(scales, state.query.spec.precision, weights.num_heads)
    segment = min(check_segment(segment), cache.shape[0])
    if segment == 0:  # Of an empty cache.
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


@functools.partial(jax.jit, static_argnames=("config", "options"), donate_argnames="cache")
def _prefill_layer(
    config: MlaConfig, weights: MlaWeights, hidden: jax.Array, cache: jax.Array,
    batch: PrefillBatch, scales: LayerScales | None, *, options: PassOptions,
) -> PrefilledLayer:  # fmt: skip
    num_tokens, capacity = hidden.shape[0], cache.shape[0]
    batch = sound_batch(batch, num_tokens, capacity)
    state, cache = write_and_attend(
        config, weights, hidden, cache, batch, new_tokens(batch, num_tokens, capacity), scales,
        options=options,
    )  # fmt: skip
    out = mla.gated_output(config, weights, hidden, state.acc)
    counted = jnp.arange(num_tokens) < batch.cu_seqlens_q[-1]
    return PrefilledLayer(jnp.where(counted[:, None], out, 0.0), cache)


def write_and_attend(
    config: MlaConfig, weights: MlaWeights, hidden: jax.Array, cache: jax.Array,
    batch: PrefillBatch, new: NewTokens, scales: LayerScales | None,
    *, takes_new_tokens: jax.Array | None = None, options: PassOptions,
) -> tuple[PrefillState, jax.Array]:  # fmt: skip
    """A pass up to its output: what one device and each device of a mesh do alike.

    Args:
      config, weights, hidden, cache, scales: checked; as in `prefill_layer`.
      batch: sound.
      new: where the new tokens stand in their sequences, and where their latents go.
      takes_new_tokens: bool [], whether the new tokens attend to each other here; None is yes.
      options: checked.

    Returns:
      The state after new tokens and context, and the cache with the new tokens' latents.
    """
    latents = mla.latents(config, weights, hidden, new.position)
    # Before the context is read, so that the cache can be written in place.
    cache = cache.at[new.row].set(latents, mode="drop", unique_indices=True)
    state = start_prefill(
        mla.queries(config, weights, hidden, new.position),
        batch.cu_seqlens_q,
        softmax_scale=config.softmax_scale,
        precision=options.precision,
        q_descale=None if scales is None else scales.q,
        v_head_dim=config.v_head_dim,
        fmt=options.fmt,
        backend=options.backend,
    )
    new_tokens_precision = options.new_tokens_precision
    k_descale, v_descale = (None, None)
    if scales is not None and new_tokens_precision == "fp8":
        k_descale, v_descale = scales.k, scales.v

    def attend_to_each_other(state: PrefillState) -> PrefillState:
        k, v = mla.up_project(config, weights, latents)
        return attend_new_tokens(
            state, k, v, precision=new_tokens_precision, k_descale=k_descale, v_descale=v_descale
        )

    if takes_new_tokens is None:
        state = attend_to_each_other(state)
    else:
        state = jax.lax.cond(takes_new_tokens, attend_to_each_other, lambda state: state, state)
    state = attend_context(
        state, config, weights, cache, batch, segment=options.segment, scales=scales
    )
    return state, cache
