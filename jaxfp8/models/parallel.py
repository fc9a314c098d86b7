# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Prefill of an MLA layer on many devices: heads over one axis of a mesh, context over another.

    sharding = MlaSharding(mesh)
    out, cache = prefill_layer_sharded(sharding, config, weights, hidden, cache, batch, ...)

Each device projects the new tokens to the queries of its own heads and walks its own part of the
context, segment by segment, as `prefill_layer` does on one device. The new tokens attend to each
other on the devices of one part of the context, the part that takes their latents, so that every
key is counted once. Then, once a pass,

1. the parts of the context are merged over `cp`: with m the largest log-sum-exp of the parts and
   w = exp(lse - m), the attention is sum(w * out) / sum(w). In float32, and exact: a part in which
   a row saw no key has w = 0, whatever it holds, and a row that saw none anywhere is zero;
2. o_proj's sums over a device's heads are added up over `tp`, in float32.

Communication. With T new tokens (the length of `hidden`) and H / tp heads a device, the operands of
all-reduces on each device are, in bytes a pass (`communication_bytes`),

    over cp    T x H / tp x 4 x (1 + 1 + v_head_dim)    maximum; sum of w and of w * out
    over tp    T x hidden_size x 4

and nothing a segment, whatever the length of the context. An axis of size 1 needs none. For
Kimi-K3, 4096 new tokens and 12 heads a device: 25.6 MB over cp and 117 MB over tp. A ring over n
devices sends 2 (n - 1) / n times that from each. Gathering the parts and merging them on every
device would send n - 1 times the former and hold n states at a time; summing rescaled states needs
the maximum first, 1 / 130 of the bytes, and neither grows with n.

What all devices of a part do alike: the latents of the new tokens. What those of a rank do alike,
after the merge: gate and o_proj.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxfp8 import checks
from jaxfp8.formats import Fp8Format
from jaxfp8.models import mla
from jaxfp8.models.arguments import (
    PassOptions,
    check_cache,
    check_config,
    check_hidden,
    check_number,
    check_options,
    check_scales,
)
from jaxfp8.models.batch import NewTokens, PrefillBatch, check_batch, new_tokens, sound_batch
from jaxfp8.models.config import MlaConfig
from jaxfp8.models.prefill import PrefilledLayer, write_and_attend
from jaxfp8.models.sharding import MlaSharding, check_placed
from jaxfp8.models.weights import MlaWeights, check_weights
from jaxfp8.ops.attention.base import Precision
from jaxfp8.scales.arguments import require
from jaxfp8.scales.layer_scales import LayerScales


class ShardedBatch(NamedTuple):
    """The sequences of a pass over a context in parts: data, not shapes, as `PrefillBatch`.

    The parts of a sequence's context may be of any lengths, also empty, and hold any of its tokens:
    all new tokens see all of them. A long prompt goes through in several passes, each of which
    gives its tokens to another part, so that the parts grow alike.

    Attributes:
      cu_seqlens_q: int32 [B + 1], offsets of the sequences in the new tokens.
      context_lens: int32 [cp, B], tokens of each sequence in each part before the pass.
      cu_seqlens_cache: int32 [cp, B + 1], offsets of the sequences' regions in each part.
      new_tokens_part: int32 [], the part that takes the new tokens' latents.
    """

    cu_seqlens_q: jax.Array
    context_lens: jax.Array
    cu_seqlens_cache: jax.Array
    new_tokens_part: jax.Array | int


class Communication(NamedTuple):
    """Bytes of the operands of a pass's all-reduces, on each device.

    Attributes:
      cp: over the context-parallel axis.
      tp: over the tensor-parallel axis.
    """

    cp: int
    tp: int


def communication_bytes(config: MlaConfig, sharding: MlaSharding, num_tokens: int) -> Communication:
    """What a pass of num_tokens new tokens (capacity) communicates: see above.

    Raises:
      TypeError, ValueError: an argument is of the wrong kind, num_tokens is negative, or the
        tensor-parallel ranks do not divide the heads.
    """
    check_config(config)
    require("sharding", sharding, MlaSharding, "an MlaSharding")
    num_tokens = check_number("num_tokens", num_tokens, 0)
    heads = config.local_heads(sharding.tp_size)
    return Communication(
        cp=num_tokens * heads * 4 * (2 + config.v_head_dim) if sharding.cp_size > 1 else 0,
        tp=num_tokens * config.hidden_size * 4 if sharding.tp_size > 1 else 0,
    )


def prefill_layer_sharded(
    sharding: MlaSharding,
    config: MlaConfig,
    weights: MlaWeights,
    hidden: jax.Array,
    cache: jax.Array,
    batch: ShardedBatch,
    *,
    segment: int = 65_536,
    precision: Precision = "bf16",
    new_tokens_precision: Precision = "bf16",
    scales: LayerScales | None = None,
    fmt: Fp8Format | None = None,
    backend: str | None = None,
) -> PrefilledLayer:
    """`prefill_layer` on the devices of a mesh, with the result of one device.

    Arguments are checked before anything is compiled. Arrays are global: those of the checkpoint,
    the artifact and the cache as `jaxfp8.models.sharding` places them, hidden and batch the same on
    all devices (in several processes: NumPy arrays of the same values, or replicated arrays).
    Outside of a transformation the cache is donated. Differs from `prefill_layer` in the order of
    float32 sums; with dynamic scales also in these, which are those of a part's segments.

    Args:
      sharding: the mesh.
      config: the layer's.
      weights: the layer's, of all heads.
      hidden: bfloat16 [T, hidden_size], the layer's input for the new tokens.
      cache: bfloat16 [cp * capacity, latent_dim]: the parts of the context, one after the other.
      batch: which rows of hidden and of the parts belong to which sequence.
      segment: tokens of a part that are attended to at a time.
      precision, new_tokens_precision, fmt, backend: as in `prefill_layer`.
      scales: static scales of all heads, for "fp8"; None takes dynamic ones.

    Returns:
      The layer's output, summed over the heads of all devices and the same on each; the cache.

    Raises:
      TypeError: an argument is of the wrong kind or dtype.
      ValueError: the tensor-parallel ranks do not divide the heads, shapes disagree, a part of the
        cache is too short, or, on a mesh whose axes are Explicit, weights, scales or cache do not
        lie where they have to; the cache given is as it was.
      NotImplementedError: no backend serves the request.
    """
    require("sharding", sharding, MlaSharding, "an MlaSharding")
    check_config(config)
    config.local_heads(sharding.tp_size)
    check_weights(config, weights)
    heads, parts = config.num_heads, sharding.cp_size
    if weights.num_heads != heads:
        raise ValueError(
            f"weights: expected those of all {heads} heads (num_heads), got {weights.num_heads}"
        )
    check_hidden(config, hidden)
    check_cache(config, cache, f"{parts} * capacity")
    if cache.shape[0] % parts:
        raise ValueError(
            f"cache: expected shape [{parts} * capacity, {config.latent_dim}], got "
            f"{list(cache.shape)}"
        )
    batch = _check_batch(batch, parts, hidden.shape[0], cache.shape[0] // parts)
    options = check_options(segment, precision, new_tokens_precision, fmt, backend)
    checked_scales = check_scales(scales, precision, heads)
    check_placed(sharding, config, weights, cache, scales)
    return _prefill_layer_sharded(
        sharding, config, weights, hidden, cache, batch, checked_scales, options=options
    )


def merge_over_axis(out: jax.Array, lse: jax.Array, axis_name: str) -> tuple[jax.Array, jax.Array]:
    """`merge_states` of the states that the devices of a mesh axis have, for use under shard_map.

    Args:
      out: float32 [T, H, Dv], attention of the same queries over the device's own keys.
      lse: float32 [H, T], its log-sum-exp, natural log; -inf where the device has no key for a row,
        and +inf counts as -inf.
      axis_name: the axis.

    Returns:
      float32 out and lse over the keys of all devices, the same on each; zeros and -inf where none
      has a key. A NaN in an LSE makes the row NaN.
    """
    lse = jnp.where(lse == jnp.inf, -jnp.inf, lse)
    largest = jax.lax.pmax(lse, axis_name)
    # No key anywhere: subtracting -inf from itself would be NaN.
    shift = jnp.where(largest == -jnp.inf, 0.0, largest)
    weight = jnp.exp(lse - shift)
    counted = jnp.where(lse.T[:, :, None] == -jnp.inf, 0.0, out) * weight.T[:, :, None]
    summed, total = jax.lax.psum((counted, weight), axis_name)
    divisor = jnp.where(total == 0, 1.0, total)
    return summed / divisor.T[:, :, None], shift + jnp.log(total)


@functools.partial(
    jax.jit,
    static_argnames=("sharding", "config", "options"),
    donate_argnames="cache",
)
def _prefill_layer_sharded(
    sharding: MlaSharding, config: MlaConfig, weights: MlaWeights, hidden: jax.Array,
    cache: jax.Array, batch: ShardedBatch, scales: LayerScales | None, *, options: PassOptions,
) -> PrefilledLayer:  # fmt: skip
    everywhere = PartitionSpec()

    def on_a_device(
        weights: MlaWeights,
        hidden: jax.Array,
        cache: jax.Array,
        batch: ShardedBatch,
        scales: LayerScales | None,
    ) -> tuple[jax.Array, jax.Array]:
        num_tokens, capacity = hidden.shape[0], cache.shape[0]
        part = jax.lax.axis_index(sharding.cp)
        held, new = _part_of(batch, part, num_tokens, capacity)
        state, cache = write_and_attend(
            config, weights, hidden, cache, held, new, scales,
            takes_new_tokens=part == batch.new_tokens_part, options=options,
        )  # fmt: skip
        attention = state.acc
        if sharding.cp_size > 1:
            attention, _ = merge_over_axis(state.acc, state.lse, sharding.cp)
        out = mla.gated_output(config, weights, hidden, attention)
        if sharding.tp_size > 1:
            out = jax.lax.psum(out, sharding.tp)
        counted = jnp.arange(num_tokens) < held.cu_seqlens_q[-1]
        return jnp.where(counted[:, None], out, 0.0), cache

    scales_spec = None if scales is None else sharding.scales_spec
    mapped = jax.shard_map(
        on_a_device,
        mesh=sharding.mesh,
        in_specs=(
            sharding.weights_spec(config), everywhere, sharding.cache_spec, everywhere, scales_spec
        ),
        out_specs=(everywhere, sharding.cache_spec),
        # Pallas kernels do not say over which axes their results vary.
        check_vma=False,
    )  # fmt: skip
    return PrefilledLayer(*mapped(weights, hidden, cache, batch, scales))


def _part_of(
    batch: ShardedBatch, part: jax.Array, num_tokens: int, capacity: int
) -> tuple[PrefillBatch, NewTokens]:
    """The part as a batch, and the new tokens, whose rows are past the end of the part where it
    does not take them.
    """
    held = sound_batch(
        PrefillBatch(batch.cu_seqlens_q, batch.context_lens[part], batch.cu_seqlens_cache[part]),
        num_tokens,
        capacity,
    )
    whole = held._replace(context_lens=jnp.sum(batch.context_lens, axis=0, dtype=jnp.int32))
    position = new_tokens(whole, num_tokens, capacity).position
    row = new_tokens(held, num_tokens, capacity).row
    past_the_end = capacity + jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.where(part == batch.new_tokens_part, row, past_the_end)
    return held, NewTokens(position, row)


def _check_part(part: Any, parts: int) -> jax.Array:
    """int32 [], one of so many parts."""
    if checks.is_traced(part):
        return part
    try:
        value = np.asarray(part)
        sound = not value.shape and np.issubdtype(value.dtype, np.integer) and 0 <= value < parts
    except ValueError:  # a list of uneven lists
        sound = False
    if not sound:
        raise ValueError(
            f"new_tokens_part: expected an integer from 0 to {parts - 1}, got {part!r}"
        )
    return jnp.asarray(value, jnp.int32)


def _check_batch(batch: ShardedBatch, parts: int, num_tokens: int, capacity: int) -> ShardedBatch:
    """The batch, each part of it checked as `check_batch` does."""
    require("batch", batch, ShardedBatch, "a ShardedBatch")
    lens = checks.array("context_lens", batch.context_lens, "[cp, B]")
    offsets = checks.array("cu_seqlens_cache", batch.cu_seqlens_cache, "[cp, B + 1]")
    for name, x in (("context_lens", lens), ("cu_seqlens_cache", offsets)):
        shape = f"[{parts}, {x.shape[1]}]"
        checks.matches(name, x, shape, (parts, None), "the mesh")
    takes = _check_part(batch.new_tokens_part, parts)
    cu_seqlens_q = checks.cu_seqlens("cu_seqlens_q", batch.cu_seqlens_q, num_tokens, "hidden")
    none = jnp.zeros_like(cu_seqlens_q)
    for part in range(parts):
        # Room for the new tokens is needed where they go.
        goes_here = not checks.is_traced(takes) and part == int(takes)
        held = PrefillBatch(cu_seqlens_q if goes_here else none, lens[part], offsets[part])
        try:
            check_batch(held, num_tokens, capacity)
        except ValueError as error:
            raise ValueError(f"part {part} of the context: {error}") from None
    return ShardedBatch(cu_seqlens_q, jnp.asarray(lens), jnp.asarray(offsets), takes)
