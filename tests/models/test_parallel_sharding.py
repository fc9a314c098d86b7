# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""What lies on which device."""

from __future__ import annotations

import jax
import numpy as np

from jaxfp8.models import rank_weights, sharding
from jaxfp8.models.sharding import (
    MlaSharding,
    empty_sharded_cache,
    load_sharded_layers,
    shard_scales,
)  # fmt: skip
from tests.models.builders import save_checkpoint
from tests.models.sharded_case import CONFIG, LAYER, artifact_of, fp8_case, mesh_of

CASE = fp8_case()


def ranks_of(its: MlaSharding) -> dict[jax.Device, int]:
    return {device: rank for rank, held in enumerate(its.mesh.devices) for device in held}


def test_each_rank_has_the_weights_of_its_heads(tmp_path, monkeypatch):
    """And has read them once, however many devices it is of."""
    save_checkpoint(tmp_path, {LAYER: CASE.weights}, files=2)
    read = []
    load_layers = sharding.load_layers

    def recorded(*args, tp_rank, tp_size, device, **options):
        read.append((tp_rank, tp_size, len(device.device_set)))
        return load_layers(*args, tp_rank=tp_rank, tp_size=tp_size, device=device, **options)

    monkeypatch.setattr(sharding, "load_layers", recorded)
    its = MlaSharding(mesh_of(2, 4))
    weights = load_sharded_layers(tmp_path, CONFIG, [LAYER], its)[LAYER]
    assert read == [(0, 2, 4), (1, 2, 4)]
    for name, x in weights._asdict().items():
        np.testing.assert_array_equal(
            np.asarray(x).view(np.uint16), getattr(CASE.weights, name).view(np.uint16)
        )
        assert x.sharding.spec == getattr(its.weights_spec(CONFIG), name)
        assert len(x.addressable_shards) == 8
        for shard in x.addressable_shards:
            expected = getattr(rank_weights(CASE.weights, ranks_of(its)[shard.device], 2), name)
            np.testing.assert_array_equal(
                np.asarray(shard.data).view(np.uint16), expected.view(np.uint16), err_msg=name
            )


def test_each_rank_has_the_scales_of_its_heads():
    its = MlaSharding(mesh_of(4, 2))
    artifact = artifact_of(CASE, tp_size=4)
    scales = shard_scales(artifact, [LAYER], its)[LAYER]
    for name, x in scales._asdict().items():
        assert x.shape == (4,)
        for shard in x.addressable_shards:
            expected = artifact.layer(LAYER, tp_rank=ranks_of(its)[shard.device])
            np.testing.assert_array_equal(shard.data, getattr(expected, name))


def test_a_mesh_with_the_axes_in_another_order_and_one_more():
    devices = np.array(jax.devices()).reshape(2, 2, 2)
    its = MlaSharding(jax.sharding.Mesh(devices, ("cp", "stage", "tp")))
    assert (its.tp_size, its.cp_size) == (2, 2)
    assert its.local_devices() == {
        rank: [d for d in jax.devices() if d.id % 2 == rank] for rank in (0, 1)
    }
    assert hash(its) == hash(MlaSharding(its.mesh))


def test_an_empty_cache_is_made_in_its_parts():
    its = MlaSharding(mesh_of(2, 4))
    cache = empty_sharded_cache(CONFIG, 5, its)
    assert cache.shape == (20, CONFIG.latent_dim)
    assert cache.dtype == CASE.cache.dtype
    assert {shard.data.shape for shard in cache.addressable_shards} == {(5, CONFIG.latent_dim)}
    assert not np.asarray(cache).any()
