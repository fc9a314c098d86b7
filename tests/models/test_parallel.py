# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""A pass on eight virtual devices, against one device and against the layer in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

# The first interpreted kernel would, and what is imported with it makes jax.jit forget all that it
# has compiled.
import jax.experimental.pallas.tpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxfp8.models import PrefilledLayer
from jaxfp8.models.parallel import ShardedBatch, merge_over_axis, prefill_layer_sharded
from jaxfp8.models.sharding import MlaSharding, shard_scales
from tests.models import oracle
from tests.models.builders import checkpoint_tensors, hidden_states
from tests.models.sharded_case import (
    CAPACITY,
    CONFIG,
    LAYER,
    SEGMENT,
    TOKENS,
    Case,
    artifact_of,
    fp8_case,
    make_case,
    mesh_of,
    placed,
    run_on_one,
    run_sharded,
    uneven_weights,
)  # fmt: skip
from tests.tolerances import relative_error

KIMI_HEADS = dataclasses.replace(
    CONFIG, hidden_size=64, num_heads=96, q_lora_rank=16, kv_lora_rank=16
)

# Float32 sums over hidden columns, heads or keys have another order on many devices. Where one of
# them falls on the other side of a boundary, so does its rounding to bfloat16: few do.
OTHER_SIDE = oracle.LAYER_ERROR["bf16"] / 7**0.5 / 2
# With other parts and segments P is rounded relative to another maximum, and the attention over
# each is rounded on its own. With the gated attention that is three of the roundings counted in
# `oracle.LAYER_ERROR`, here and there.
OTHER_PARTS = (2 * 3 / 7) ** 0.5 * oracle.LAYER_ERROR["bf16"]


def assert_same_pass(case: Case, many: PrefilledLayer, one: PrefilledLayer, bound: float) -> None:
    """The output of one device; its new latents in the part that takes them, all else untouched."""
    rows, context = np.asarray(case.one_batch.cu_seqlens_q), case.one_batch.context_lens
    lens, regions, takes = case.batch.context_lens, case.batch.cu_seqlens_cache, case.batch[3]
    assert many.out.shape == one.out.shape
    assert not np.asarray(many.out)[rows[-1] :].any()
    if rows[-1]:
        assert relative_error(many.out, np.asarray(one.out, np.float64)) < bound
    expected = case.cache.copy()
    for b in range(len(context)):
        count = rows[b + 1] - rows[b]
        to = takes * CAPACITY + regions[takes, b] + lens[takes, b]
        at = case.one_batch.cu_seqlens_cache[b] + context[b]
        expected[to : to + count] = np.asarray(one.cache)[at : at + count]
    written = np.asarray(many.cache)
    np.testing.assert_array_equal(written.view(np.uint16), expected.view(np.uint16))


def assert_right(case: Case, result: PrefilledLayer, precision: str) -> None:
    rows = case.one_batch.cu_seqlens_q
    for b, (context, whole) in enumerate(zip(case.one_batch.context_lens, case.whole, strict=True)):
        if rows[b + 1] > rows[b]:
            out = np.asarray(result.out)[rows[b] : rows[b + 1]]
            error = relative_error(out, whole.out[context:])
            assert error < oracle.LAYER_ERROR[precision], f"sequence {b}"


def test_96_heads_on_eight_devices():
    """Twelve heads each, as Kimi-K3 at TP8."""
    case = make_case([[30, 0, 41]], [13, 11, 1], 0, KIMI_HEADS)
    assert_right(case, run_sharded(case, MlaSharding(mesh_of(8, 1))), "bf16")


SPLITS: dict[str, dict[int, Any]] = {
    "ragged, with parts that are empty": {
        4: [[0, 0, 0], [40, 3, 0], [1, 0, 0], [33, 50, 0]],
        8: [[9, 1, 0], [0] * 3, [50, 2, 0], [0, 31, 0], [0] * 3, [1, 0, 0], [14, 19, 0], [0] * 3],
    },
    "all in one part": {
        4: [[0] * 3, [40, 20, 7], [0] * 3, [0] * 3],
        8: [[0] * 3] * 7 + [[40, 10, 7]],
    },
    "no context": {4: [[0] * 3] * 4, 8: [[0] * 3] * 8},
}


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize(("tp", "cp"), [(2, 4), (1, 8)])
def test_context_in_parts(tp, cp, split):
    """Whatever the lengths, one program; and whichever part takes the new tokens."""
    sharding = MlaSharding(mesh_of(tp, cp))
    for takes, new in ((0, [9, 0, 12]), (cp - 2, [0, 20, 4])):
        case = make_case(split[cp], new, takes)
        many = run_sharded(case, sharding)
        assert_right(case, many, "bf16")
        bound = OTHER_PARTS if case.one_batch.context_lens.any() else OTHER_SIDE
        assert_same_pass(case, many, run_on_one(case), bound)


def test_static_scales_of_each_rank():
    case = fp8_case()
    sharding = MlaSharding(mesh_of(2, 2))
    scales = shard_scales(artifact_of(case, tp_size=2), [LAYER], sharding)[LAYER]
    many = run_sharded(case, sharding, precision="fp8", new_tokens_precision="fp8", scales=scales)
    assert_right(case, many, "fp8")
    # It was FP8 indeed.
    whole = np.concatenate(
        [x.out[n:] for x, n in zip(case.whole, case.one_batch.context_lens, strict=True)]
    )
    assert relative_error(many.out[: len(whole)], whole) > oracle.LAYER_ERROR["bf16"]


@pytest.mark.slow
def test_pallas_kernels_on_a_mesh():
    """In interpret mode, which is slow: one head."""
    case = make_case([[3, 30], [9, 0]], [6, 5], 1, dataclasses.replace(CONFIG, num_heads=1))
    many = run_sharded(case, MlaSharding(mesh_of(1, 2)), backend="interpret")
    assert_right(case, many, "bf16")


def test_states_are_merged_exactly():
    """Eight parts in float32 against float64: with rows that some or all of them see no key of,
    whose output may be anything.
    """
    rng = np.random.default_rng(3)
    out = rng.standard_normal((8, 40, 2, 16)).astype(np.float32)
    lse = (rng.standard_normal((8, 2, 40)) * 30).astype(np.float32)
    lse[rng.random(lse.shape) < 0.4] = -np.inf
    lse[3, :, 5:9] = np.inf
    lse[:, 0, 0], lse[:, 1, 1] = -np.inf, np.inf
    lse[:, :, 2] = -1000 + lse[:, :, 3]
    unseen = ~np.isfinite(lse)
    out[unseen.swapaxes(1, 2)] = np.nan
    merged = jax.jit(
        jax.shard_map(
            lambda out, lse: merge_over_axis(out[0], lse[0], "cp"),
            mesh=mesh_of(1, 8),
            in_specs=PartitionSpec("cp"),
            out_specs=PartitionSpec(),
        )
    )
    actual_out, actual_lse = merged(out, lse)
    wide = np.where(unseen, -np.inf, lse.astype(np.float64))
    with np.errstate(divide="ignore"):
        expected_lse = np.logaddexp.reduce(wide, axis=0)
    weight = np.exp(wide - np.where(np.isneginf(expected_lse), 0, expected_lse)).swapaxes(1, 2)
    expected = (np.where(weight[..., None] == 0, 0, out) * weight[..., None]).sum(axis=0)
    np.testing.assert_allclose(actual_lse, expected_lse, rtol=2**-22, atol=2**-22)
    np.testing.assert_allclose(actual_out, expected, rtol=0, atol=2**-20)
    assert not np.asarray(actual_out)[0, 0].any()

    # A NaN is not lost, and stays in its row.
    lse[6, 1, 30] = np.nan
    broken_out, broken_lse = map(np.asarray, merged(out, lse))
    assert np.isnan(broken_out[30, 1]).all()
    assert np.isnan(broken_lse[1, 30])
    assert np.isnan(broken_out).sum() == broken_out.shape[2]
    assert np.isnan(broken_lse).sum() == 1


def test_a_prompt_in_chunks_each_into_another_part():
    """Every chunk sees those before it, which lie in other parts. The cache is donated."""
    sharding = MlaSharding(mesh_of(2, 4))
    (hidden,) = hidden_states(np.random.default_rng(5), [4 * TOKENS], CONFIG)
    weights, cache = placed(make_case([[0] * 3] * 4, [0] * 3, 0), sharding)
    whole = oracle.layer(CONFIG, checkpoint_tensors(uneven_weights()), hidden)
    lens = np.zeros((4, 3), np.int32)
    regions = np.array([[0, CAPACITY, CAPACITY, CAPACITY]] * 4, np.int32)
    for chunk, part in enumerate((2, 0, 3, 1)):
        tokens = slice(chunk * TOKENS, (chunk + 1) * TOKENS)
        batch = ShardedBatch(np.array([0, TOKENS, TOKENS, TOKENS], np.int32), lens, regions, part)
        before = cache
        out, cache = prefill_layer_sharded(
            sharding, CONFIG, weights, hidden[tokens], cache, batch, segment=SEGMENT
        )
        assert before.is_deleted()
        assert out.is_fully_replicated
        assert relative_error(out, whole.out[tokens]) < oracle.LAYER_ERROR["bf16"]
        lens = lens + np.eye(4, dtype=np.int32)[part][:, None] * np.array([TOKENS, 0, 0], np.int32)
    assert cache.sharding.spec == sharding.cache_spec


def test_inside_a_callers_jit():
    """With a mesh whose axes have other names and explicit types, and everything traced."""
    sharding = MlaSharding(jax.make_mesh((4, 2), ("heads", "context")), tp="heads", cp="context")
    case = fp8_case()
    weights, cache = placed(case, sharding)

    def twice(weights, hidden, cache, batch):
        for _ in range(2):
            out, cache = prefill_layer_sharded(
                sharding, CONFIG, weights, hidden, cache, batch, segment=SEGMENT
            )
            hidden = (hidden + out).astype(jnp.bfloat16)
        return hidden, cache

    hidden, cache = jax.eval_shape(twice, weights, case.hidden, cache, case.batch)
    assert hidden.shape == case.hidden.shape
    assert cache.shape == case.cache.shape
