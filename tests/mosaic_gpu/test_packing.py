# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The Hopper layouts and task table, which any device can make, and the kernel's packing.

The kernel's own packing needs a Hopper GPU and must give the same bits as XLA's.
"""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxfp8
from jaxfp8.ops.attention import pallas_mosaic_gpu as backend
from jaxfp8.ops.attention import pallas_mosaic_gpu_kernel as kernel
from jaxfp8.ops.attention import pallas_mosaic_gpu_schedule as schedule
from jaxfp8.ops.quantize import pallas_mosaic_gpu as packing
from tests import oracle
from tests.inputs import cu_seqlens

LENGTHS = (3, 0, 33, 64, 1, 149)
NEVER = np.iinfo(np.int32).max


def context(rng, tokens, heads=3, dqk=192):
    k = rng.standard_normal((tokens, heads, dqk)).astype(ml_dtypes.bfloat16)
    v = rng.standard_normal((tokens, heads, 256)).astype(ml_dtypes.bfloat16)
    v[20, 2, 128 + 2] = np.nan
    v[100, 1, 128 + 72] = np.nan
    v[101, 1, 128 + 72] = np.nan
    k[5, 1, 3] = np.inf
    k[9, 0, 2] = np.nan
    k[sum(LENGTHS) :] = np.nan
    v[sum(LENGTHS) :] = np.nan
    return k, v


def test_packed_context_holds_every_key_where_the_kernel_looks(monkeypatch):
    monkeypatch.setattr(packing, "UPDATES_OPERANDS", False)
    rng = np.random.default_rng(0)
    k, v = context(rng, 300)
    descales = rng.uniform(0.005, 0.02, (2, 3)).astype(np.float32)
    cu = cu_seqlens(LENGTHS)
    packed_k, packed_v, first_nan = (
        np.asarray(x)
        for x in packing.pack_context(
            jnp.asarray(k),
            jaxfp8.HeadSlice(jnp.asarray(v), 128, 128),
            jnp.asarray(cu),
            *map(jnp.asarray, descales),
            jaxfp8.E4M3FN,
        )
    )
    granules = packed_k.shape[1] // kernel.KEY_GRANULE
    assert packed_v.shape == (3 * granules, 128, kernel.KEY_GRANULE)
    stored_k = oracle.quantize(k, descales[0], "float8_e4m3fn")
    stored_v = oracle.quantize(v[:, :, 128:], descales[1], "float8_e4m3fn")
    starts = np.asarray(schedule.packed_starts(jnp.asarray(cu)))
    seen = np.zeros((3, granules * kernel.KEY_GRANULE), bool)
    place_in_16 = np.argsort(kernel.KEY_ORDER)
    for b, length in enumerate(LENGTHS):
        for j in range(length):
            row = starts[b] + j
            granule, key = divmod(row, kernel.KEY_GRANULE)
            key = key // 16 * 16 + place_in_16[key % 16]
            seen[:, row] = True
            for h in range(3):
                np.testing.assert_array_equal(
                    packed_k[h, row].view(np.uint8) & 0x7F,
                    stored_k[cu[b] + j, h].view(np.uint8) & 0x7F,
                )
                want = stored_v[cu[b] + j, h].astype(np.float32)
                got = packed_v[h * granules + granule, :, key].astype(np.float32)
                np.testing.assert_array_equal(got, np.nan_to_num(want))
    assert not packed_k[~seen].astype(np.float32).any()
    assert np.isfinite(packed_v.astype(np.float32)).all()
    expected = np.full((len(LENGTHS), 3, 128), NEVER)
    expected[2, 2, 2] = 20 - 3
    expected[4, 1, 72] = 0
    expected[5, 1, 72] = 0
    np.testing.assert_array_equal(first_nan, expected)


def table_without_kernel(cu_q, cu_k, num_tokens, **options):
    """What attention_tasks makes, of the same functions."""
    num_sequences = len(cu_q) - 1
    size = schedule.max_tasks(num_tokens, num_sequences, options["block_q"], options["parts"])
    index = jnp.arange(size, dtype=jnp.int32)
    fields, count = schedule.tasks_at(index, cu_q, cu_k, num_sequences, num_tokens, **options)
    work = fields[kernel.BLOCKS]
    place = schedule.rank(index, work, lambda i: work[i], count)
    table = np.zeros((size + 1, kernel.TASK_FIELDS), np.int32)
    table[place[:count]] = np.stack(fields, axis=1)[:count]
    table[size, 0] = count
    return table


TABLE_LENGTHS = [
    ((300,), (1000,)),
    ((1,), (0,)),
    ((5, 0, 131, 64), (70, 9, 20, 500)),
    ((9, 8), (0, 3)),
]


@pytest.mark.skipif(jaxfp8.detect_target().arch != "sm90", reason="needs an NVIDIA Hopper GPU")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("lengths", [*TABLE_LENGTHS, (tuple(range(90)), tuple(range(90, 0, -1)))])
def test_the_kernel_makes_the_table(lengths, parts, causal):
    cu_q, cu_k = (jnp.asarray(cu_seqlens(x)) for x in lengths)
    capacity = sum(lengths[0]) + 37
    options = {"block_q": 128, "block_kv": 160, "causal": causal, "parts": parts}
    want = table_without_kernel(cu_q, cu_k, capacity, **options)
    got = np.asarray(schedule.attention_tasks(cu_q, cu_k, capacity, **options))
    count = want[-1, 0]
    np.testing.assert_array_equal(got[:count], want[:count])
    np.testing.assert_array_equal(got[-1], want[-1])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("lengths_q", "lengths_k"), TABLE_LENGTHS)
def test_tasks_cover_every_row_and_every_key_it_sees_once(lengths_q, lengths_k, parts, causal):
    capacity, block_q, block_kv = sum(lengths_q) + 37, 128, 160
    cu_q, cu_k = cu_seqlens(lengths_q), cu_seqlens(lengths_k)
    options = {"block_q": block_q, "block_kv": block_kv, "causal": causal, "parts": parts}
    tasks = table_without_kernel(jnp.asarray(cu_q), jnp.asarray(cu_k), capacity, **options)
    count = tasks[-1, 0]
    starts = np.asarray(schedule.packed_starts(jnp.asarray(cu_k)))
    covered = np.zeros((parts, capacity), int)
    keys_seen = np.zeros((capacity, starts[-1] + block_kv), int)
    for task in tasks[:count]:
        assert task[kernel.Q_ROW] % kernel.Q_ALIGNMENT == 0
        for i in range(task[kernel.SKIP], task[kernel.ROWS]):
            row = task[kernel.Q_ROW] + i
            covered[task[kernel.PART], row] += 1
            limit = min(task[kernel.ROW_LIMIT] + (i if causal else 0), task[kernel.KEYS])
            first = task[kernel.FIRST_BLOCK] * block_kv
            for key in range(first, first + task[kernel.BLOCKS] * block_kv):
                if key < limit:
                    keys_seen[row, task[kernel.KV_ROW] + key] += 1
    assert (covered == 1).all()
    expected = np.zeros_like(keys_seen)
    for b, (len_q, len_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        for i in range(len_q):
            visible = min(max(i + 1 + len_k - len_q, 0), len_k) if causal else len_k
            expected[cu_q[b] + i, starts[b] : starts[b] + visible] = 1
    np.testing.assert_array_equal(keys_seen, expected)
    # The order is what balances the blocks: never more work after less.
    assert (np.diff(tasks[:count, kernel.BLOCKS]) <= 0).all()


@pytest.mark.skipif(jaxfp8.detect_target().arch != "sm90", reason="needs an NVIDIA Hopper GPU")
@pytest.mark.parametrize("fmt", [jaxfp8.E4M3FN, None], ids=["fp8", "bf16"])
@pytest.mark.parametrize("dqk", [192, 128])
def test_the_kernel_packs_the_same_bits_as_xla(fmt, dqk, monkeypatch):
    rng = np.random.default_rng(1)
    k, v = (jnp.asarray(x) for x in context(rng, 300, dqk=dqk))
    descales = jnp.asarray(rng.uniform(0.005, 0.02, (2, 3)), jnp.float32)
    arguments = (k, jaxfp8.HeadSlice(v, 128, 128), jnp.asarray(cu_seqlens(LENGTHS)), *descales)
    packed = [np.asarray(x) for x in packing.pack_context(*arguments, fmt)]
    query = np.asarray(packing.pack_query(k, descales[0], fmt))
    monkeypatch.setattr(packing, "UPDATES_OPERANDS", False)
    monkeypatch.setattr(packing.kernels, "can_pack", lambda x: False)
    expected = [np.asarray(x) for x in packing.pack_context(*arguments, fmt)]
    for got, want in zip(packed, expected, strict=True):
        np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))
    want = np.asarray(packing.pack_query(k, descales[0], fmt))
    np.testing.assert_array_equal(
        query[:, : k.shape[0]].astype(np.float32), want[:, : k.shape[0]].astype(np.float32)
    )


def assembled(rng):
    """An AssembledKey and a V that lie in one array, and the key in one piece."""
    k, v = context(rng, 300)
    k[:, :, 128:] = k[:, :1, 128:]
    nope = jnp.asarray(np.concatenate([k[:, :, :128], v[:, :, 128:]], axis=2))
    key = jaxfp8.AssembledKey(jaxfp8.HeadSlice(nope, 0, 128), jnp.asarray(k[:, 0, 128:]))
    return key, jaxfp8.HeadSlice(nope, 128, 128), jnp.asarray(k)


def assert_packed_alike(key, values, whole, fmt):
    rest = (values, jnp.asarray(cu_seqlens(LENGTHS)), *jnp.full((2, 3), 0.01), fmt)
    got, want = packing.pack_context(key, *rest), packing.pack_context(whole, *rest)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_assembled_keys_pack_as_the_array_they_stand_for(monkeypatch):
    monkeypatch.setattr(packing, "UPDATES_OPERANDS", False)
    assert_packed_alike(*assembled(np.random.default_rng(2)), jaxfp8.E4M3FN)


@pytest.mark.skipif(jaxfp8.detect_target().arch != "sm90", reason="needs an NVIDIA Hopper GPU")
@pytest.mark.parametrize("fmt", [jaxfp8.E4M3FN, None], ids=["fp8", "bf16"])
def test_the_kernel_reads_assembled_keys_where_they_lie(fmt):
    assert_packed_alike(*assembled(np.random.default_rng(2)), fmt)


def test_pieces_of_a_split_merge_by_their_lse():
    rng = np.random.default_rng(3)
    out, lse = rng.standard_normal((3, 6, 2, 8)), rng.standard_normal((3, 2, 6)) * 5
    lse[0, :, 0] = -np.inf
    lse[:, :, 1] = -np.inf
    out[:, 1] = 0
    out[1, 2, 0, 3] = np.nan
    merged = backend._merge_parts(jnp.asarray(out, jnp.float32), jnp.asarray(lse, jnp.float32))
    with np.errstate(divide="ignore", invalid="ignore"):
        want_lse = np.log(np.exp(lse).sum(axis=0))
        weights = np.exp(lse - np.where(np.isneginf(want_lse), 0, want_lse))
    want = np.einsum("phq,pqhd->qhd", weights, out)
    np.testing.assert_allclose(merged.lse, want_lse, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(merged.out, np.float32), want, rtol=2**-8, atol=1e-6)
    assert not np.asarray(merged.out, np.float32)[1].any()


def test_keys_are_split_where_tiles_are_few_and_where_bfloat16_sums_grow_long():
    assert backend._num_parts(4096, 65536, 12, "fp8") == 1
    assert backend._num_parts(1, 65536, 12, "fp8") == 11
    assert backend._num_parts(1, 100, 12, "fp8") == 1
    assert backend._num_parts(4096, 2**20, 12, "fp8") == 1
    assert backend._num_parts(4096, 2**20, 12, "bf16") == 4


def test_a_table_past_shared_memory_is_refused():
    one = jnp.array([0, 1], jnp.int32)
    with pytest.raises(NotImplementedError, match="q: 7000000 rows in 1 sequences are 54"):
        schedule.attention_tasks(
            one, one, 7_000_000, block_q=128, block_kv=160, causal=False, parts=1
        )
