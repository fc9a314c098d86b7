# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Splits, and the order of programs."""

from __future__ import annotations

import numpy as np
import pytest

from jaxfp8.ops.attention import schedule
from jaxfp8.ops.attention.heuristics import Device, default_config, device_of
from tests.ops import l2_traffic

MI300X = device_of("gfx942")
CONFIG = default_config("gfx942", "fp8")


def test_makespan_is_that_of_a_list_schedule():
    assert schedule.makespan(np.asarray([3.0, 1, 2]), 4) == 3
    assert schedule.makespan(np.full(9, 2.0), 4) == 6
    # 5, 4, 3 start; 3 ends first and takes 3, 4 takes 2, 5 takes 1.
    assert schedule.makespan(np.asarray([1.0, 2, 3, 3, 4, 5]), 3) == 6


@pytest.mark.parametrize(
    "tokens_q, tokens_k, causal, expected",
    [
        (4096, 65536, False, 3),  # 384 tiles on 608 slots: 3 splits end in two nearly full rounds
        (256, 65536, False, 25),
        (65536, 65536, False, 1),  # enough tiles
        (1, 1, True, 1),
    ],
)
def test_splits_of_mi300x(tokens_q, tokens_k, causal, expected):
    assert (
        schedule.choose_splits(12, tokens_q, tokens_k, 1, 128, causal, CONFIG, MI300X) == expected
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens_q", [1000, 4096, 8192])
@pytest.mark.parametrize("num_heads", [5, 12])
def test_splits_never_cost_time(num_heads, tokens_q, causal):
    splits = schedule.choose_splits(num_heads, tokens_q, 65536, 1, 128, causal, CONFIG, MI300X)
    lengths = np.tile(schedule.tile_lengths(tokens_q, 65536, causal, CONFIG), num_heads)
    one = schedule.makespan(lengths, MI300X.slots)
    many = schedule.makespan(np.repeat(np.ceil(lengths / splits), splits), MI300X.slots)
    assert many <= one
    ideal = lengths.sum() / MI300X.slots
    assert many <= 1.25 * ideal + 1


@pytest.mark.parametrize("longest_first", [False, True])
@pytest.mark.parametrize(
    "num_heads, splits, num_tiles, dies", [(12, 3, 33, 8), (1, 1, 1, 8), (5, 2, 7, 8), (3, 1, 4, 1)]
)
def test_every_item_is_done_once(num_heads, splits, num_tiles, dies, longest_first):
    order = schedule.program_order(num_heads, splits, num_tiles, dies, longest_first)
    pair, tile = np.divmod(order, num_tiles + 1)
    real = tile < num_tiles
    items = sorted(zip(pair[real].tolist(), tile[real].tolist(), strict=True))
    assert items == [(p, t) for p in range(num_heads * splits) for t in range(num_tiles)]
    assert (~real).sum() < dies
    assert order.size % dies == 0

    for die in range(dies):
        mine = pair[die::dies][real[die::dies]]
        # Programs that read the same keys share a die, except where a die's share ends.
        assert np.unique(mine).size <= -(-num_heads * splits // dies) + 1
        if longest_first:
            assert (np.diff(tile[die::dies]) >= 0).all()


def test_dies_share_a_causal_head_fairly():
    """12 heads on 8 dies: each die has one and a half."""
    num_tiles = 32
    order = schedule.program_order(12, 1, num_tiles, 8, longest_first=True)
    work = num_tiles - order % (num_tiles + 1)
    by_die = work.reshape(-1, 8).sum(axis=0)
    assert by_die.max() <= 1.03 * by_die.mean()


@pytest.mark.parametrize("causal, splits, at_most", [(False, 3, 1.4), (True, 1, 1.4), (True, 2, 2)])
def test_few_dies_read_the_same_keys(causal, splits, at_most):
    """By a model of the L2 caches: FP8, 12 heads, 4096 rows over 16,384 keys, 4 MB a die.

    Where the programs of a head simply follow each other, each of the eight dies reads all keys.
    Two dies that share a head read its keys twice, and so do programs that start when others end.
    """
    lengths = np.sort(schedule.tile_lengths(4096, 16384, causal, CONFIG))[::-1] // splits

    def tiles_read(dies, longest_first):
        order = schedule.program_order(12, splits, lengths.size, dies, longest_first)
        return l2_traffic.tiles_read(
            l2_traffic.programs_of(order, lengths.size, lengths),
            dies=8, slots_per_die=76, tiles_per_cache=2**22 // (CONFIG.block_k * (192 + 128)),
        )  # fmt: skip

    once = 12 * splits * int(lengths[0])
    assert once <= tiles_read(8, causal) < at_most * once
    assert tiles_read(1, False) > 7 * once


def test_one_slot_needs_no_splits():
    assert schedule.choose_splits(12, 300, 5000, 3, 128, True, CONFIG, Device(slots=1)) == 1
