# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Where the tokens of a batch lie in the latent cache.

The cache is one array [capacity, latent_dim] for all sequences, and each sequence has a region of
it, consecutive rows: its context first, and behind that the room where its new tokens go. Regions
may be longer than what they hold, so that a sequence grows in place; a cache of one array a
sequence would make one of a million tokens and one of a hundred equally large.

The context of a batch is walked in segments of a fixed number of tokens, whatever sequences they
belong to: `segment_rows` numbers the context tokens of all sequences through, and says where in the
cache those of a segment lie. A gather of 576 columns is little beside the up-projection to
heads x 256 that follows, and lets regions lie anywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8 import checks
from jaxfp8.scales.arguments import require
from jaxfp8.scales.errors import listed


class PrefillBatch(NamedTuple):
    """The sequences of a prefill pass: data, not shapes, so that other lengths compile nothing.

    Attributes:
      cu_seqlens_q: int32 [B + 1], offsets of the sequences in the new tokens.
      context_lens: int32 [B], tokens of each sequence that are in the cache before the pass.
      cu_seqlens_cache: int32 [B + 1], offsets of the sequences' regions in the cache.
    """

    cu_seqlens_q: jax.Array
    context_lens: jax.Array
    cu_seqlens_cache: jax.Array


class NewTokens(NamedTuple):
    """Of each new token, int32 [T]: its position in its sequence, and its row of the cache. Tokens
    past the last sequence have rows past the end of the cache, no two of them the same.
    """

    position: jax.Array
    row: jax.Array


def batch_arrays(batch: PrefillBatch) -> PrefillBatch:
    """The batch as JAX arrays, its values not looked at.

    Raises:
      TypeError: not a PrefillBatch of int32 arrays.
      ValueError: an array has more or fewer than one dimension.
    """
    require("batch", batch, PrefillBatch, "a PrefillBatch")
    for (name, x), shape in zip(
        batch._asdict().items(), ("[B + 1]", "[B]", "[B + 1]"), strict=True
    ):
        checks.array(name, x, shape)
        checks.dtype_in(name, x, [np.int32])
    return PrefillBatch(*map(jnp.asarray, batch))


def check_batch(batch: PrefillBatch, num_tokens: int, capacity: int) -> PrefillBatch:
    """The batch as JAX arrays, checked by value where there are values.

    Args:
      batch: the batch.
      num_tokens: length of the array of new tokens.
      capacity: rows of the cache.

    Raises:
      TypeError: not a PrefillBatch of int32 arrays.
      ValueError: shapes or offsets that cannot be, or a region that is shorter than the context and
        the new tokens of its sequence; all such sequences are named.
    """
    require("batch", batch, PrefillBatch, "a PrefillBatch")
    cu_seqlens_q = checks.cu_seqlens("cu_seqlens_q", batch.cu_seqlens_q, num_tokens, "hidden")
    cu_seqlens_cache = checks.cu_seqlens(
        "cu_seqlens_cache", batch.cu_seqlens_cache, capacity, "cache"
    )
    checks.matches(
        "cu_seqlens_cache", cu_seqlens_cache, str(list(cu_seqlens_q.shape)), cu_seqlens_q.shape,
        "cu_seqlens_q",
    )  # fmt: skip
    context_lens = checks.array("context_lens", batch.context_lens, "[B]")
    checks.dtype_in("context_lens", context_lens, [np.int32])
    sequences = cu_seqlens_q.shape[0] - 1
    checks.matches("context_lens", context_lens, f"[{sequences}]", (sequences,), "cu_seqlens_q")
    values = (cu_seqlens_q, context_lens, cu_seqlens_cache)
    if not any(map(checks.is_traced, values)):
        _check_room(*(np.asarray(x, np.int64) for x in values))
    return PrefillBatch(cu_seqlens_q, jnp.asarray(context_lens), cu_seqlens_cache)


def _check_room(
    cu_seqlens_q: np.ndarray, context: np.ndarray, cu_seqlens_cache: np.ndarray
) -> None:
    if negative := np.flatnonzero(context < 0).tolist():
        raise ValueError(
            f"context_lens: expected lengths >= 0, got {context[negative[0]]} for sequence "
            f"{negative[0]}"
        )
    new, room = np.diff(cu_seqlens_q), np.diff(cu_seqlens_cache)
    short = [
        f"sequence {b}: {room[b]} rows for {context[b]} + {new[b]}"
        for b in np.flatnonzero(context + new > room)
    ]
    if short:
        raise ValueError(
            "cache: expected room for the context and the new tokens of every sequence "
            f"(cu_seqlens_cache), got {listed(short)} tokens"
        )


def sound_batch(batch: PrefillBatch, num_tokens: int, capacity: int) -> PrefillBatch:
    """The batch made harmless, where it was traced and could not be checked: nothing is read or
    written outside of a sequence's region. The identity on good input.
    """
    cu_seqlens_cache = checks.sound_cu_seqlens(batch.cu_seqlens_cache, capacity)
    return PrefillBatch(
        checks.sound_cu_seqlens(batch.cu_seqlens_q, num_tokens),
        jnp.clip(batch.context_lens, 0, jnp.diff(cu_seqlens_cache)),
        cu_seqlens_cache,
    )


def new_tokens(batch: PrefillBatch, num_tokens: int, capacity: int) -> NewTokens:
    """Where the new tokens go; num_tokens and capacity as in `check_batch`."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    # Capacity for the sequences: B = 0 has none, and nothing to look up.
    b = _sequence_of(token, batch.cu_seqlens_q)
    context = jnp.append(batch.context_lens, 0)[b]
    position = context + token - batch.cu_seqlens_q[b]
    row = batch.cu_seqlens_cache[b] + position
    ends = jnp.append(batch.cu_seqlens_cache[1:], 0)
    return NewTokens(position, jnp.where(row < ends[b], row, capacity + token))


def cu_seqlens_context(batch: PrefillBatch) -> jax.Array:
    """int32 [B + 1]: offsets of the sequences where the context of all is numbered through."""
    return jnp.append(jnp.int32(0), jnp.cumsum(batch.context_lens, dtype=jnp.int32))


def segment_rows(
    batch: PrefillBatch, start: jax.Array, segment: int
) -> tuple[jax.Array, jax.Array]:
    """Rows of the cache that a segment of the context is made of.

    Args:
      batch: the batch.
      start: int32 [], number of the segment's first token among the context tokens of all.
      segment: tokens of a segment.

    Returns:
      int32 [segment], the rows, of which those past the end of the context may be any; and
      int32 [B + 1], offsets of the sequences in the segment.
    """
    cu_seqlens = cu_seqlens_context(batch)
    token = start + jnp.arange(segment, dtype=jnp.int32)
    b = _sequence_of(token, cu_seqlens)
    row = batch.cu_seqlens_cache[b] + token - cu_seqlens[b]
    return row, jnp.clip(cu_seqlens - start, 0, segment)


def _sequence_of(token: jax.Array, cu_seqlens: jax.Array) -> jax.Array:
    """int32, like token: the sequence that a token belongs to; B past the last."""
    return jnp.sum(token[:, None] >= cu_seqlens[None, 1:], axis=1, dtype=jnp.int32)
