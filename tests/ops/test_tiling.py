# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The tile tables, against the obvious loop."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8.ops.attention import tiling
from tests.inputs import cu_seqlens


def tiles_by_loop(lengths, block):
    """(sequence, row, token, count) of every tile."""
    tiles, token = [], 0
    for sequence, length in enumerate(lengths):
        tiles += [
            (sequence, row, token + row, min(block, length - row))
            for row in range(0, length, block)
        ]
        token += length
    return tiles


table_of = jax.jit(tiling.tile_table, static_argnums=(1, 2))


@hypothesis.settings(deadline=None, max_examples=50)
@hypothesis.given(
    lengths=st.lists(st.integers(0, 300), min_size=6, max_size=6),
    block=st.sampled_from([16, 128]),
)
def test_table(lengths, block):
    num_tiles = tiling.max_tiles(6 * 300, len(lengths), block)
    expected = tiles_by_loop(lengths, block)
    assert len(expected) <= tiling.max_tiles(sum(lengths), len(lengths), block) <= num_tiles

    table = table_of(cu_seqlens(lengths), block, num_tiles)
    columns = np.stack([table.sequence, table.row, table.token, table.count], axis=1)
    np.testing.assert_array_equal(columns[: len(expected)], np.reshape(expected, (-1, 4)))
    assert not columns[len(expected) :, 3].any(), "unused tiles hold nothing"
    assert (columns[:, 0] < len(lengths)).all()


def test_max_tiles_is_reached():
    for block in (16, 64):
        for batch in (1, 2, 5):
            for tokens in range(0, 5 * block):
                # The worst split: single tokens, and one sequence that takes the rest.
                singles = min(batch - 1, tokens)
                rest = tokens - singles
                bound = tiling.max_tiles(tokens, batch, block)
                assert bound >= singles + -(-rest // block)
                assert bound <= tokens
    assert tiling.max_tiles(1 + 4095, 2, 128) == 33
    assert tiling.max_tiles(0, 3, 64) == 0
    assert tiling.max_tiles(0, 0, 64) == 0
    assert tiling.max_tiles(500, 0, 64) == 0


def test_no_token_at_all():
    table = tiling.tile_table(jnp.zeros(3, jnp.int32), 64, 4)
    assert not np.any(table.count)
    assert not np.any(table.sequence)
