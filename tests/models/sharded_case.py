# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""A batch whose context is spread over parts, the same on one device, and what is right."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

import jaxfp8
from jaxfp8 import scales
from jaxfp8.models import MlaConfig, MlaWeights, PrefillBatch, PrefilledLayer, prefill_layer
from jaxfp8.models.parallel import ShardedBatch, prefill_layer_sharded
from jaxfp8.models.sharding import MlaSharding
from tests import oracle as attention_oracle
from tests.inputs import cu_seqlens
from tests.models import oracle
from tests.models.builders import TINY, checkpoint_tensors, hidden_states, tiny_weights

# One bucket, so that a mesh is compiled once; a part holds several segments.
TOKENS, CAPACITY, ONE_CAPACITY, SEGMENT = 32, 96, 192, 32
LAYER = 3
CONFIG = dataclasses.replace(TINY, rope_theta=10_000.0)
"""Rotary, so that a token's position matters, which is that after all parts of its context."""

Split = Sequence[Sequence[int]]
"""Context tokens of each sequence in each part: [parts][sequences]."""


class Case(NamedTuple):
    """NumPy arrays; NaN wherever nothing is to be read."""

    config: MlaConfig
    weights: MlaWeights
    hidden: np.ndarray  # [TOKENS, hidden_size]
    cache: np.ndarray  # [parts * CAPACITY, latent_dim]
    batch: ShardedBatch
    one_cache: np.ndarray  # [ONE_CAPACITY, latent_dim], the same context
    one_batch: PrefillBatch
    whole: list[oracle.Layer]  # of each sequence


def uneven_weights(config: MlaConfig = CONFIG) -> MlaWeights:
    """Head h has K and V 2^h times those of head 0, Q and o_proj so much less: with the scales of
    another rank's heads, FP8 is far off.
    """
    weights = tiny_weights(0, config)
    factor = np.exp2(np.arange(config.num_heads) % 4).astype(ml_dtypes.bfloat16)[:, None, None]
    return weights._replace(
        q_b_proj=weights.q_b_proj / factor,
        kv_b_proj=weights.kv_b_proj * factor,
        o_proj=weights.o_proj / factor[:, :, 0],
    )


def make_case(
    split: Split,
    new: Sequence[int],
    takes: int,
    config: MlaConfig = CONFIG,
    weights: MlaWeights | None = None,
) -> Case:
    """Sequences with new[b] tokens over a context that is dealt out to parts in random order."""
    weights = uneven_weights(config) if weights is None else weights
    rng = np.random.default_rng(7)
    lens = np.array(split, np.int32)
    context = lens.sum(axis=0, dtype=np.int32)
    sequences = hidden_states(rng, context + np.array(new), config)
    whole = [oracle.layer(config, checkpoint_tensors(weights), x) for x in sequences]
    hidden = np.full((TOKENS, config.hidden_size), np.nan, ml_dtypes.bfloat16)
    rows = cu_seqlens(new)
    hidden[: rows[-1]] = np.concatenate([x[n:] for x, n in zip(sequences, context, strict=True)])

    parts = np.full((len(lens), CAPACITY, config.latent_dim), np.nan, ml_dtypes.bfloat16)
    one = np.full((ONE_CAPACITY, config.latent_dim), np.nan, ml_dtypes.bfloat16)
    # Where a part takes the new tokens, behind the context of each sequence.
    room = lens + np.where(np.arange(len(lens)) == takes, 1, 0)[:, None] * np.array(new)
    regions = np.stack([cu_seqlens(x) for x in room])
    one_regions = cu_seqlens(context + np.array(new))
    for b, its in enumerate(whole):
        latents = its.latents[: context[b]].astype(ml_dtypes.bfloat16)
        one[one_regions[b] :][: context[b]] = latents
        dealt = np.split(latents[rng.permutation(context[b])], np.cumsum(lens[:, b])[:-1])
        for part, held in enumerate(dealt):
            parts[part, regions[part, b] :][: len(held)] = held
    return Case(
        config,
        weights,
        hidden,
        parts.reshape(-1, config.latent_dim),
        ShardedBatch(rows, lens, regions, takes),
        one,
        PrefillBatch(rows, context, one_regions),
        whole,
    )


def amax_of(case: Case) -> np.ndarray:
    """float32 [3, H]: what a calibration on these sequences would find of Q, K and V."""
    return np.stack(
        [
            attention_oracle.amax(np.concatenate([getattr(x, name) for x in case.whole]))
            for name in "qkv"
        ]
    ).astype(np.float32)


def artifact_of(case: Case, tp_size: int) -> scales.ScaleArtifact:
    """The artifact of a model of one layer, LAYER."""
    config, amax = case.config, amax_of(case)[None]
    identity = scales.Identity(
        model="tiny", revision="0123456789abcdef", checkpoint_id="tiny", calibration_id="case",
        tp_size=tp_size, pp_size=1, fp8_dtype=jaxfp8.E4M3FNUZ.name,
        local_heads=config.num_heads // tp_size, qk_head_dim=config.qk_head_dim,
        v_head_dim=config.v_head_dim, margin=1.0,
    )  # fmt: skip
    descale = amax / np.float32(identity.fmt.max)
    return scales.ScaleArtifact(
        identity=identity, layers=(LAYER,), descale=descale, amax=amax, created_by="test"
    )


def mesh_of(tp: int, cp: int) -> jax.sharding.Mesh:
    """The first devices, those of a rank side by side."""
    devices = np.array(jax.devices()[: tp * cp])
    return jax.sharding.Mesh(devices.reshape(tp, cp), ("tp", "cp"))


def placed(case: Case, sharding: MlaSharding) -> tuple[MlaWeights, jax.Array]:
    """Weights and cache as they lie on the mesh."""
    specs = jax.tree.map(sharding.named, sharding.weights_spec(case.config))
    cache = jax.device_put(case.cache, sharding.named(sharding.cache_spec))
    return jax.device_put(case.weights, specs), cache


def run_sharded(case: Case, sharding: MlaSharding, **options: Any) -> PrefilledLayer:
    """On the mesh."""
    weights, cache = placed(case, sharding)
    return prefill_layer_sharded(
        sharding, case.config, weights, case.hidden, cache, case.batch, segment=SEGMENT, **options
    )


def run_on_one(case: Case, **options: Any) -> PrefilledLayer:
    """On one device."""
    return prefill_layer(
        case.config, case.weights, case.hidden, case.one_cache, case.one_batch,
        segment=SEGMENT, **options,
    )  # fmt: skip


FP8_SPLIT: Split = ([40, 0, 3], [1, 9, 3])
FP8_NEW = [10, 7, 9]
"""The case that processes and test have in common: two parts, the second takes the new tokens."""


def fp8_case() -> Case:
    return make_case(FP8_SPLIT, FP8_NEW, takes=1)
