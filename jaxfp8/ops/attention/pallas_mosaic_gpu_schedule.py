# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Who does what: the task table of the Hopper attention kernel, made on the device."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxfp8.ops.attention.pallas_mosaic_gpu_kernel import KEY_GRANULE, Q_ALIGNMENT


def packed_starts(cu_seqlens: jax.Array) -> jax.Array:
    """int32 [B + 1]: where each packed sequence starts, in keys; a multiple of KEY_GRANULE."""
    granules = -(-jnp.diff(cu_seqlens) // KEY_GRANULE)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(granules * KEY_GRANULE)]).astype(
        jnp.int32
    )


def sequence_of(starts: jax.Array, positions: jax.Array) -> jax.Array:
    """int32: the sequence b with starts[b] <= position < starts[b + 1], at most B - 1."""
    later = jnp.sum(positions[:, None] >= starts[None, 1:-1], axis=1, dtype=jnp.int32)
    return later


def attention_tasks(
    cu_seqlens_q: jax.Array,
    cu_seqlens_k: jax.Array,
    num_tokens: int,
    *,
    block_q: int,
    block_kv: int,
    causal: bool,
    parts: int,
) -> jax.Array:
    """int32 [N + 1, TASK_FIELDS], see the fields in pallas_mosaic_gpu_kernel.py.

    The tasks that exist come first, those with most blocks before the others, and their number is
    in the last row.

    Every row of the queries, also those past cu_seqlens_q[-1] (as a sequence without keys), is in
    the tile of `parts` tasks, whose key blocks together are those that the tile's rows see.

    Args:
      cu_seqlens_q: int32 [B + 1].
      cu_seqlens_k: int32 [B + 1].
      num_tokens: rows of the query array.
      block_q: rows of a tile.
      block_kv: keys of a block.
      causal: aligned bottom right.
      parts: pieces that each tile's blocks are cut into.
    """
    num_sequences = cu_seqlens_q.shape[0] - 1
    end = jnp.full((1,), num_tokens, jnp.int32)
    q_starts = jnp.concatenate([cu_seqlens_q, end])
    q_lengths = jnp.diff(q_starts)
    k_lengths = jnp.concatenate([jnp.diff(cu_seqlens_k), jnp.zeros(1, jnp.int32)])

    # The first tile of a sequence begins a few rows before it, where the copy engine can.
    skipped = q_starts[:-1] % Q_ALIGNMENT
    max_tiles = (num_tokens + (num_sequences + 1) * (block_q - 1 + Q_ALIGNMENT - 1)) // block_q
    tiles = jnp.where(q_lengths > 0, -(-(skipped + q_lengths) // block_q), 0)
    tile_starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(tiles)]).astype(jnp.int32)
    tile = jnp.arange(max_tiles, dtype=jnp.int32)
    if num_sequences == 1 and causal:  # the last tile sees most
        tile = tile_starts[-1] - 1 - tile
    exists = (tile >= 0) & (tile < tile_starts[-1])
    sequence = sequence_of(tile_starts, tile)

    # Relative to the sequence; negative in the first tile where rows are skipped.
    first_row = (tile - tile_starts[sequence]) * block_q - skipped[sequence]
    rows = jnp.clip(q_lengths[sequence] - first_row, 0, block_q)
    rows = jnp.where(exists, rows, 0)
    keys = k_lengths[sequence]
    if causal:
        row_limit = first_row + keys - q_lengths[sequence] + 1
        visible = jnp.clip(row_limit + rows - 1, 0, keys)
    else:
        row_limit = keys
        visible = keys
    blocks = jnp.where(rows > 0, -(-visible // block_kv), 0)
    each = -(-blocks // parts)
    part = jnp.arange(parts, dtype=jnp.int32)[None, :]
    first_block = each[:, None] * part
    shape = (max_tiles, parts)
    part_blocks = jnp.clip(blocks[:, None] - first_block, 0, each[:, None])

    def per_part(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x[:, None], shape)

    fields = (
        per_part(q_starts[sequence] + first_row),
        per_part(jnp.maximum(-first_row, 0)),
        per_part(rows),
        per_part(packed_starts(cu_seqlens_k)[jnp.minimum(sequence, num_sequences - 1)]),
        first_block,
        part_blocks,
        per_part(keys),
        per_part(row_limit),
        per_part(jnp.minimum(sequence, num_sequences - 1)),
        jnp.broadcast_to(part, shape),
    )
    tasks = jnp.stack([f.astype(jnp.int32).reshape(-1) for f in fields], axis=1)
    count = jnp.zeros((1, tasks.shape[1]), jnp.int32).at[0, 0].set(tile_starts[-1] * parts)
    if num_sequences == 1:
        return jnp.concatenate([tasks, count])
    # A rank by counting is one kernel; a sort is several.
    cost = jnp.where(exists[:, None], part_blocks, -1).reshape(-1)
    index = jnp.arange(cost.shape[0], dtype=jnp.int32)
    before = (cost[None, :] > cost[:, None]) | (
        (cost[None, :] == cost[:, None]) & (index[None, :] < index[:, None])
    )
    rank = jnp.sum(before, axis=1, dtype=jnp.int32)
    ranked = jnp.zeros_like(tasks).at[rank].set(tasks, unique_indices=True)
    return jnp.concatenate([ranked, count])
