# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Which program of a launch does what, decided on the host from the shapes.

A launch has a program for each head, key split and tile of query rows. Three things decide how
well they fill a GPU:

- How many there are. 4096 rows of 12 heads are 384 tiles; an MI300X has room for 608 at a time, so
  the keys of each tile are split among several programs, and the parts are merged afterwards.
- Their order. Under a causal mask tiles differ in length: the longest go first, so that the short
  ones fill the gaps at the end.
- Where they run. MI300X hands workgroups to its eight dies in turn, and each die has an L2 cache
  of its own: programs that read the same keys belong on one die.
"""

from __future__ import annotations

import functools
import heapq

import numpy as np

from jaxfp8.ops.attention import tiling
from jaxfp8.ops.attention.heuristics import Device, KernelConfig

# What a program costs beside its key tiles, in units of one key tile: it loads Q, fills the
# pipeline, drains it, writes the result.
_START = 4.0
# What the merge of the splits costs, in the same unit: its launch, and the bytes of float32
# partial outputs that the time of one key tile suffices to write and read back.
_MERGE_LAUNCH = 4.0
_MERGE_BYTES = 5e6

_MAX_SPLITS = 64


@functools.lru_cache(maxsize=1024)
def choose_splits(
    num_heads: int,
    tokens_q: int,
    tokens_k: int,
    num_sequences: int,
    v_head_dim: int,
    causal: bool,
    config: KernelConfig,
    device: Device,
) -> int:
    """Into how many parts each tile's keys are split: the number that ends soonest by the model.

    The model takes sequences of equal length, tiles of equal cost, and places the programs, longest
    first, on `device.slots` slots. `config.splits` overrides it.
    """
    if config.splits is not None:
        return config.splits
    lengths = tile_lengths(tokens_q // num_sequences, tokens_k // num_sequences, causal, config)
    lengths = np.tile(lengths, num_sequences * num_heads)
    best, best_time = 1, np.inf
    for splits in range(1, _MAX_SPLITS + 1):
        if splits > 1 and (lengths.size * splits > 8 * device.slots or splits > lengths.max()):
            break
        time = makespan(np.repeat(np.ceil(lengths / splits) + _START, splits), device.slots)
        if splits > 1:
            partial_bytes = 4 * splits * tokens_q * num_heads * v_head_dim
            time += _MERGE_LAUNCH + partial_bytes / _MERGE_BYTES
        if time < best_time:
            best, best_time = splits, time
    return best


def makespan(durations: np.ndarray, slots: int) -> float:
    """When the last job ends, if the longest that is left goes to the first slot that is free."""
    jobs = np.sort(durations)[::-1]
    if jobs.size <= slots:
        return float(jobs[0])
    if jobs[0] == jobs[-1]:
        return float(jobs[0] * -(-jobs.size // slots))
    ends = list(jobs[:slots])
    heapq.heapify(ends)
    for job in jobs[slots:]:
        heapq.heapreplace(ends, ends[0] + job)
    return float(max(ends))


def tile_lengths(len_q: int, len_k: int, causal: bool, config: KernelConfig) -> np.ndarray:
    """Key tiles of each tile of query rows of one sequence."""
    tiles = max(-(-len_q // config.block_q), 1)
    keys = np.full(tiles, len_k)
    if causal:
        last_row = np.minimum((np.arange(tiles) + 1) * config.block_q, len_q)
        keys = np.clip(last_row + len_k - len_q, 0, len_k)
    return np.maximum(-(-keys // config.block_k), 1)


@functools.lru_cache(maxsize=64)
def program_order(
    num_heads: int, splits: int, num_tiles: int, dies: int, longest_first: bool
) -> np.ndarray:
    """int32 [programs]: what each program does.

    Encoded as (head * splits + split) * (num_tiles + 1) + tile. Tiles are counted from the longest.
    Tile `num_tiles` stands for nothing to do: it fills up the last round of the dies. Each die gets
    an equal share of consecutive (head, split) pairs, whose tiles read the same keys; where a pair
    is shared between two dies, each gets every other tile, so that long and short ones are shared
    too.

    Args:
      num_heads: H.
      splits: parts into which the keys are split.
      num_tiles: tiles of query rows.
      dies: program i runs on die i % dies.
      longest_first: each die starts with the longest tiles of all its pairs; otherwise it takes one
        pair after the other, which reuses its cache better.
    """
    pairs = num_heads * splits
    tile = np.concatenate([np.arange(0, num_tiles, 2), np.arange(1, num_tiles, 2)])
    items = (np.arange(pairs)[:, None] * (num_tiles + 1) + tile).ravel()
    share = -(-items.size // dies)
    items = np.pad(items, (0, share * dies - items.size), constant_values=num_tiles)
    by_die = items.reshape(dies, share)
    if longest_first:
        rank = np.argsort(by_die % (num_tiles + 1), axis=1, kind="stable")
        by_die = np.take_along_axis(by_die, rank, axis=1)
    return np.ascontiguousarray(by_die.T.ravel().astype(np.int32))


def num_tiles_of(tokens_q: int, num_sequences: int, config: KernelConfig) -> int:
    """Tiles of query rows of a launch: the rows past the last sequence are one more sequence."""
    return tiling.max_tiles(tokens_q, num_sequences + 1, config.block_q)
