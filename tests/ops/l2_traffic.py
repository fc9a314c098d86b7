# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""A small model of what a launch reads of K and V past its L2 caches, on a GPU of several dies."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np


def tiles_read(
    programs: Sequence[tuple[int, int]], *, dies: int, slots_per_die: int, tiles_per_cache: int
) -> int:
    """How many key tiles the dies read from memory.

    Program i runs on die i % dies. A die runs `slots_per_die` programs at a time, starts the next
    where one ends, and has a cache of the tiles it used last. Each program that runs reads one tile
    in a step.

    Args:
      programs: of each, the number of its stream of key tiles (its head and split), and how many
        of it there are. Programs of one stream read the same tiles.
      dies: number of dies.
      slots_per_die: programs on a die at a time.
      tiles_per_cache: key tiles (K and V) that a die's L2 holds.
    """
    misses = 0
    for die in range(dies):
        waiting = iter(programs[die::dies])
        running: list[list[int]] = []  # stream, next tile, end
        cache: OrderedDict[tuple[int, int], None] = OrderedDict()
        while True:
            running = [program for program in running if program[1] < program[2]]
            while len(running) < slots_per_die and (program := next(waiting, None)) is not None:
                running.append([program[0], 0, program[1]])
            if not running:
                break
            for program in running:
                tile = (program[0], program[1])
                program[1] += 1
                if tile in cache:
                    cache.move_to_end(tile)
                    continue
                misses += 1
                cache[tile] = None
                if len(cache) > tiles_per_cache:
                    cache.popitem(last=False)
    return misses


def programs_of(order: np.ndarray, num_tiles: int, lengths: np.ndarray) -> list[tuple[int, int]]:
    """The programs of schedule.program_order, given each tile's key tiles, longest first."""
    pair, tile = np.divmod(order, num_tiles + 1)
    keys = np.append(lengths, 0)[tile]
    return list(zip(pair.tolist(), keys.tolist(), strict=True))
