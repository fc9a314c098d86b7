# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Where tokens lie in the cache, against lists written out token by token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfp8.models.batch import PrefillBatch, check_batch, new_tokens, segment_rows, sound_batch
from tests.inputs import cu_seqlens

SEQUENCES, TOKENS, CAPACITY, SEGMENT = 3, 24, 120, 16
find_new = jax.jit(lambda batch: new_tokens(batch, TOKENS, CAPACITY))
find_segment = jax.jit(lambda batch, start: segment_rows(batch, start, SEGMENT))
make_sound = jax.jit(lambda batch: sound_batch(batch, TOKENS, CAPACITY))


def batch_of(context, new, spare):
    regions = cu_seqlens(np.add(np.add(context, new), spare))
    return PrefillBatch(cu_seqlens(new), np.array(context, np.int32), regions)


lengths = st.lists(st.integers(0, 8), min_size=SEQUENCES, max_size=SEQUENCES)
contexts = st.lists(st.integers(0, 23), min_size=SEQUENCES, max_size=SEQUENCES)


@settings(deadline=None, max_examples=60)
@given(context=contexts, new=lengths, spare=lengths)
def test_rows(context, new, spare):
    batch = check_batch(batch_of(context, new, spare), TOKENS, CAPACITY)
    regions = np.asarray(batch.cu_seqlens_cache)
    where = find_new(batch)
    expected = [
        (context[b] + i, regions[b] + context[b] + i)
        for b in range(SEQUENCES)
        for i in range(new[b])
    ]
    count = len(expected)
    assert list(zip(*(np.asarray(x)[:count].tolist() for x in where), strict=True)) == expected
    beyond = np.asarray(where.row)[count:]
    assert (beyond >= CAPACITY).all()
    assert len(set(beyond.tolist())) == len(beyond)

    walked = []
    for start in range(0, sum(context), SEGMENT):
        rows, cu = map(np.asarray, find_segment(batch, start))
        assert cu[0] == 0
        for b in range(SEQUENCES):
            walked += [(b, row) for row in rows[cu[b] : cu[b + 1]].tolist()]
    assert walked == [(b, regions[b] + i) for b in range(SEQUENCES) for i in range(context[b])]


@settings(deadline=None, max_examples=60)
@given(
    cu_q=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=4, max_size=4),
    context=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=3, max_size=3),
    cu_cache=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=4, max_size=4),
)
def test_a_traced_batch_of_nonsense_stays_within_its_regions(cu_q, context, cu_cache):
    batch = make_sound(PrefillBatch(*(np.array(x, np.int32) for x in (cu_q, context, cu_cache))))
    regions = np.asarray(batch.cu_seqlens_cache)
    assert regions[0] == 0
    assert (np.diff(regions) >= 0).all()
    assert regions[-1] <= CAPACITY
    assert (np.asarray(batch.context_lens) >= 0).all()
    assert (np.asarray(batch.context_lens) <= np.diff(regions)).all()
    where, cu = find_new(batch), np.asarray(batch.cu_seqlens_q)
    for b in range(SEQUENCES):
        rows = np.asarray(where.row)[cu[b] : cu[b + 1]]
        inside = rows[rows < CAPACITY]
        assert ((inside >= regions[b]) & (inside < regions[b + 1])).all()


GOOD = batch_of([20, 0, 7], [8, 8, 8], [0, 1, 2])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"context_lens": np.array([21, 0, 12], np.int32)},
            ValueError,
            "cache: expected room for the context and the new tokens of every sequence "
            "(cu_seqlens_cache), got sequence 0: 28 rows for 21 + 8, sequence 2: 17 rows for "
            "12 + 8 tokens",
        ),
        (
            {"context_lens": np.array([20, -1, 7], np.int32)},
            ValueError,
            "context_lens: expected lengths >= 0, got -1 for sequence 1",
        ),
        (
            {"context_lens": np.array([20, 7], np.int32)},
            ValueError,
            "context_lens: expected shape [3] to match cu_seqlens_q, got [2]",
        ),
        (
            {"context_lens": np.array([20, 0, 7])},
            TypeError,
            "context_lens: expected dtype int32, got int64",
        ),
        (
            {"context_lens": [20, 0, 7]},
            TypeError,
            "context_lens: expected a JAX or NumPy array of shape [B], got list",
        ),
        (
            {"cu_seqlens_q": np.array([0, 8, 16, 25], np.int32)},
            ValueError,
            "cu_seqlens_q: expected to end within the 24 tokens of hidden, got 25",
        ),
        (
            {"cu_seqlens_cache": np.array([0, 28, 37, 121], np.int32)},
            ValueError,
            "cu_seqlens_cache: expected to end within the 120 tokens of cache, got 121",
        ),
        (
            {"cu_seqlens_cache": np.array([0, 28, 37], np.int32)},
            ValueError,
            "cu_seqlens_cache: expected shape [4] to match cu_seqlens_q, got [3]",
        ),
    ],
)
def test_batches_that_cannot_be(change, error, message):
    with pytest.raises(error) as caught:
        check_batch(GOOD._replace(**change), TOKENS, CAPACITY)
    assert str(caught.value) == message


def test_no_sequences():
    batch = check_batch(batch_of([], [], []), 0, 0)
    where = new_tokens(batch, 5, 7)
    np.testing.assert_array_equal(where.row, 7 + np.arange(5))
    rows, cu = segment_rows(batch, jnp.int32(0), 4)
    assert rows.shape == (4,)
    assert cu.tolist() == [0]
