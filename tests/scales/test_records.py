# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Shards and artifacts as values: compared, hashed, copied, pickled, made from NumPy numbers."""

import copy
import dataclasses
import multiprocessing
import pickle

import numpy as np
import pytest

from jaxfp8.scales import (
    LayerAmax,
    RankShard,
    ScaleArtifact,
    checkpoint_id,
    diff,
    export_tensors,
    merge_folder,
    merge_shards,
    retarget,
    snapshot_revision,
)
from tests.scales import builders
from tests.scales.builders import LAYERS

MAKE = {
    "artifact": builders.artifact,
    "schema 1": lambda **changes: ScaleArtifact.from_bytes(
        builders.schema_1(builders.artifact(**changes).to_bytes())
    ),
    "shard": lambda **changes: builders.shard(0, 1, **changes),
    "empty shard": lambda **changes: builders.shard(1, 1, **changes),
}
every_kind = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


@every_kind
def test_equal_in_meaning_is_equal(make):
    a, b = make(), make()
    assert a == b and hash(a) == hash(b) and len({a, b}) == 1
    for changes in ({"calibration_id": "later"}, {"margin": 1.25}, {"tp_size": 4}):
        assert a != make(**changes)
    assert a != "a" and a is not None and a != builders.identity()


def test_every_number_counts():
    artifact, shard = builders.artifact(), builders.shard(0, 1)
    amax, descale = artifact.amax.copy(), artifact.descale.copy()
    amax[1, 2, 3] *= 2
    descale[1, 2, 3] *= 2
    assert dataclasses.replace(artifact, amax=amax, descale=descale) != artifact
    assert dataclasses.replace(artifact, runtime_names=("a", "b")) != artifact
    other = dataclasses.replace(shard.layers[7], k=shard.layers[7].k * 2)
    assert other != shard.layers[7]
    assert dataclasses.replace(shard, layers={**shard.layers, 7: other}) != shard
    assert dataclasses.replace(shard, layers={3: shard.layers[3]}) != shard
    assert builders.shard(0, 0) != shard != builders.shard(1, 1)
    assert LayerAmax("a", [1], [2], [3]) == LayerAmax("a", np.ones(1), (2.0,), [3])


@every_kind
def test_what_is_read_back_equals_what_was_written(make, tmp_path):
    made = make()
    if isinstance(made, ScaleArtifact):
        made.save(tmp_path / "x")
        assert ScaleArtifact.read(tmp_path / "x") == made
    else:
        assert type(made).read(made.save(tmp_path)) == made


@every_kind
def test_copies(make):
    made = make()
    for other in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert other == made and type(other) is type(made)
    other = pickle.loads(pickle.dumps(made))
    if isinstance(made, ScaleArtifact):
        arrays = [array for array in (other.descale, other.amax) if array is not None]
    else:
        arrays = [array for layer in other.layers.values() for array in (layer.q, layer.k, layer.v)]
        with pytest.raises(TypeError, match="does not support item assignment"):
            other.layers[5] = None
    assert not any(array.flags.writeable for array in arrays)


def test_shards_travel_between_processes():
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        assert pool.apply(merge_shards, (builders.shards(),)) == builders.artifact()


def test_numpy_numbers_are_numbers(tmp_path):
    identity = builders.identity(
        tp_size=np.int64(2), local_heads=np.int32(3), v_head_dim=np.uint8(128), margin=np.float64(2)
    )
    assert identity == builders.identity(margin=2.0) and type(identity.tp_size) is int
    rank, *_ = np.arange(1, 2)
    shard = dataclasses.replace(
        builders.shard(0, 1),
        tp_rank=rank,
        layers=dict(zip(np.array(LAYERS), builders.shard(0, 1).layers.values(), strict=True)),
    )
    assert shard == builders.shard(0, 1)
    assert type(shard).read(shard.save(tmp_path)) == shard
    artifact = builders.artifact()
    deployment = dataclasses.replace(artifact.deployment, layers=np.array([7, 3]))
    assert deployment == artifact.deployment
    artifact.check(deployment)
    whole, parts = artifact.layer(np.int64(7)), artifact.layer(np.int64(7), tp_rank=rank)
    np.testing.assert_array_equal(parts.k, whole.k[3:])
    assert dataclasses.replace(artifact, layers=np.array(LAYERS).tolist()) == artifact
    assert retarget(artifact, tp_size=np.int64(1)) == retarget(artifact, tp_size=1)


@pytest.mark.parametrize("value", [True, 3.0, "3", [3], None, np.float32(3)])
def test_what_is_no_integer_is_no_layer(value):
    with pytest.raises(TypeError, match="index: expected an integer, got"):
        builders.artifact().layer(value)


@pytest.mark.parametrize("value", [False, 0.0, "0", [0]])
def test_what_is_no_integer_is_no_rank(value):
    with pytest.raises(TypeError, match="tp_rank: expected an integer, got"):
        builders.artifact().layer(3, tp_rank=value)


@pytest.mark.parametrize(
    ("record", "changes", "message"),
    [
        (builders.shard(0, 0), {"identity": {}}, "identity: expected an Identity, got dict"),
        (builders.shard(0, 0), {"layers": [3]}, "layers: expected LayerAmax by layer index, got l"),
        (builders.shard(0, 0), {"layers": {3: 1}}, "layers: expected a LayerAmax for layer 3, got"),
        (builders.artifact(), {"identity": None}, "identity: expected an Identity, got NoneType"),
        (builders.artifact(), {"layers": 5}, "layers: expected a tuple, got int"),
        (builders.artifact(), {"runtime_names": "ab"}, "runtime_names: expected a tuple, got str"),
    ],
)
def test_kinds_that_cannot_be(record, changes, message):
    with pytest.raises(TypeError, match=message):
        dataclasses.replace(record, **changes)


def test_only_a_deployment_is_compared():
    for call in (builders.artifact().check, builders.artifact().mismatches):
        with pytest.raises(TypeError, match="deployment: expected a Deployment, got dict"):
            call({})


ARTIFACT = builders.artifact()
WRONG_KINDS = {
    "expected": lambda x: ScaleArtifact.from_bytes(ARTIFACT.to_bytes(), expected=x),
    "data": ScaleArtifact.from_bytes,
    "text": RankShard.from_json,
    "descale": lambda x: dataclasses.replace(ARTIFACT, descale=x),
    "amax": lambda x: dataclasses.replace(ARTIFACT, amax=x),
    "artifact": lambda x: retarget(x, tp_size=1),
    "artifact of an export": export_tensors,
    "convention": lambda x: export_tensors(ARTIFACT, convention=x),
    "per_tensor": lambda x: export_tensors(ARTIFACT, per_tensor=x),
    "name_template": lambda x: export_tensors(ARTIFACT, name_template=x),
    "a": lambda x: diff(x, ARTIFACT),
    "b": lambda x: diff(ARTIFACT, x),
    "shards": merge_shards,
    "shards in a list": lambda x: merge_shards([x]),
    "layers": lambda x: dataclasses.replace(ARTIFACT.deployment, layers=x),
    "path": ScaleArtifact.read,
    "path of a shard": RankShard.read,
    "path of a snapshot": snapshot_revision,
    "folder": merge_folder,
    "folder of a checkpoint": checkpoint_id,
}


@pytest.mark.parametrize("argument", WRONG_KINDS)
def test_a_wrong_kind_is_named(argument):
    """5 is also an open file, a size, and true."""
    with pytest.raises(TypeError, match=f"^{argument.split()[0]}: expected .*, got (int|object)"):
        WRONG_KINDS[argument](object() if argument in ("descale", "amax") else 5)
