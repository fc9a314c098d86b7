# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Packed sequences cut into tiles of rows, each sequence on a tile boundary.

How many tiles there are depends on the values in cu_seqlens, which a jitted function does not
know. So arrays are sized for the most there can be, and small tables, computed on the device,
say what each tile holds: nothing is compiled again when only the values change.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


def max_tiles(num_tokens: int, num_sequences: int, block: int) -> int:
    """The most tiles that `num_sequences` sequences of `num_tokens` tokens in all can need.

    ceil(n / block) <= (n + block - 1) / block, summed over the sequences; and a tile holds at
    least one token.
    """
    if num_sequences == 0:
        return 0
    return min(num_tokens, (num_tokens + num_sequences * (block - 1)) // block)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TileTable:
    """What each tile holds; int32 [num_tiles] each.

    Attributes:
      sequence: index of the tile's sequence, in range also for a tile that holds nothing.
      row: the tile's first row, counted within its sequence.
      token: the tile's first row, counted in the token-major arrays.
      count: rows that it holds; 0 for the tiles past the last sequence's.
    """

    sequence: jax.Array
    row: jax.Array
    token: jax.Array
    count: jax.Array


def first_tiles(cu_seqlens: jax.Array, block: int) -> jax.Array:
    """int32 [B + 1]: index of each sequence's first tile, then the number of tiles in use."""
    tiles = (jnp.diff(cu_seqlens) + (block - 1)) // block
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(tiles, dtype=jnp.int32)])


def tile_table(cu_seqlens: jax.Array, block: int, num_tiles: int) -> TileTable:
    """The table of `num_tiles` tiles, as many as `max_tiles` says.

    Args:
      cu_seqlens: int32 [B + 1], B >= 1, sound: starts at 0, does not decrease.
      block: rows of a tile.
      num_tiles: length of the table.
    """
    first = first_tiles(cu_seqlens, block)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    # The sequences that end at or before the tile. A comparison of all pairs is one fused loop
    # on a GPU, where a binary search is many.
    sequence = jnp.sum(tile[:, None] >= first[None, 1:], axis=1, dtype=jnp.int32)
    used = sequence < cu_seqlens.shape[0] - 1
    sequence = jnp.where(used, sequence, 0)
    row = jnp.where(used, (tile - first[sequence]) * block, 0)
    token = cu_seqlens[sequence] + row
    count = jnp.where(used, jnp.minimum(cu_seqlens[sequence + 1] - token, block), 0)
    return TileTable(sequence, row, token, count)
