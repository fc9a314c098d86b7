# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""What cannot be spread over devices: one clear error, and nothing compiled."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxfp8 import LayerScales
from jaxfp8.models import CheckpointError, parallel, rank_weights
from jaxfp8.models.parallel import communication_bytes, prefill_layer_sharded
from jaxfp8.models.sharding import (
    MlaSharding,
    empty_sharded_cache,
    load_sharded_layers,
    shard_scales,
)  # fmt: skip
from tests.models.builders import save_checkpoint
from tests.models.sharded_case import (
    CONFIG,
    LAYER,
    artifact_of,
    fp8_case,
    mesh_of,
    placed,
)  # fmt: skip

CASE = fp8_case()
BATCH = CASE.batch


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    """The compiled part may not be reached."""
    monkeypatch.delattr(parallel, "_prefill_layer_sharded")


def run(sharding: Any, **change: Any) -> None:
    given = {
        "weights": CASE.weights,
        "hidden": CASE.hidden,
        "cache": CASE.cache,
        "batch": BATCH,
        **change,
    }
    prefill_layer_sharded(sharding, CONFIG, **given)


def sharding_of(tp: int, cp: int) -> MlaSharding:
    return MlaSharding(mesh_of(tp, cp))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mesh": ["cpu"]}, TypeError, "mesh: expected a jax.sharding.Mesh, got list"),
        ({"tp": "m"}, ValueError, "tp: expected an axis of the mesh, one of tp, cp, got 'm'"),
        ({"cp": None}, ValueError, "cp: expected an axis of the mesh, one of tp, cp, got None"),
        ({"cp": "tp"}, ValueError, "cp: expected another axis than tp, got 'tp' for both"),
    ],
)  # fmt: skip
def test_meshes(options: dict[str, Any], error, message):
    with pytest.raises(error, match=re.escape(message)):
        MlaSharding(**{"mesh": mesh_of(2, 2), **options})


def test_heads_that_the_ranks_do_not_divide(tmp_path):
    message = r"tp_size: expected a divisor of the 4 heads \(num_heads\), got 8"
    sharding = sharding_of(8, 1)
    with pytest.raises(ValueError, match=message):
        run(sharding)
    with pytest.raises(ValueError, match=message):
        load_sharded_layers(tmp_path / "none", CONFIG, [LAYER], sharding)
    with pytest.raises(ValueError, match=message):
        communication_bytes(CONFIG, sharding, 1)


def test_weights_of_one_rank():
    with pytest.raises(ValueError, match=r"weights: expected those of all 4 heads .*, got 2"):
        run(sharding_of(2, 2), weights=rank_weights(CASE.weights, 0, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": CASE.hidden[:, 1:]}, "hidden: expected shape [T, 96] to match config"),
        ({"cache": CASE.cache[:, 1:]}, "cache: expected shape [2 * capacity, 128] to match config"),
        ({"cache": CASE.cache[1:]}, "cache: expected shape [2 * capacity, 128], got [191, 128]"),
        ({"segment": 0}, "segment: expected a number of tokens >= 1, got 0"),
        ({"scales": LayerScales(*np.ones((3, 4), np.float32))}, "scales: expected None with"),
        (
            {"scales": LayerScales(*np.ones((3, 2), np.float32)), "precision": "fp8"},
            "scales.q: expected shape [4]",
        ),
        (
            {"scales": LayerScales(*np.zeros((3, 4), np.float32)), "precision": "fp8"},
            "scales.q: expected finite",
        ),
        ({"precision": "int8"}, "precision: expected 'fp8' or 'bf16', got 'int8'"),
        ({"new_tokens_precision": "fp8"}, "new_tokens_precision: expected 'bf16' in a pass"),
        ({"backend": "cuda"}, "backend: expected None or one of"),
    ],
)
def test_arrays(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        run(sharding_of(2, 2), **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"context_lens": BATCH.context_lens[:1]},
            "context_lens: expected shape [2, 3] to match the mesh, got [1, 3]",
        ),
        (
            {"cu_seqlens_cache": BATCH.cu_seqlens_cache[:, :3]},
            "part 0 of the context: cu_seqlens_cache: expected shape [4] to match cu_seqlens_q",
        ),
        (
            {"context_lens": BATCH.context_lens + np.array([[0], [1]], np.int32)},
            "part 1 of the context: cache: expected room for the context and the new tokens of "
            "every sequence (cu_seqlens_cache), got sequence 0: 11 rows for 2 + 10",
        ),
        # The other part has no room for new tokens.
        ({"new_tokens_part": 0}, "part 0 of the context: cache: expected room"),
        ({"new_tokens_part": 2}, "new_tokens_part: expected an integer from 0 to 1, got 2"),
        ({"new_tokens_part": True}, "new_tokens_part: expected an integer from 0 to 1, got True"),
        ({"new_tokens_part": [0]}, "new_tokens_part: expected an integer from 0 to 1, got [0]"),
        (
            {"new_tokens_part": [[0], [0, 1]]},
            "new_tokens_part: expected an integer from 0 to 1, got [[0], [0, 1]]",
        ),
    ],
)
def test_batches(change, message):
    """The cache given is as it was."""
    cache = jnp.asarray(CASE.cache)
    with pytest.raises(ValueError, match=re.escape(message)):
        run(sharding_of(2, 2), cache=cache, batch=BATCH._replace(**change))
    assert not cache.is_deleted()


def test_wrong_kinds():
    with pytest.raises(TypeError, match=r"batch: expected a ShardedBatch, got PrefillBatch"):
        run(sharding_of(2, 2), batch=CASE.one_batch)
    with pytest.raises(TypeError, match=r"sharding: expected an MlaSharding, got Mesh"):
        run(mesh_of(2, 2))
    with pytest.raises(TypeError, match=r"scales: expected a LayerScales or None, got dict"):
        run(sharding_of(2, 2), scales={})
    with pytest.raises(TypeError, match=r"config: expected an MlaConfig, got dict"):
        prefill_layer_sharded(
            sharding_of(2, 2), {}, CASE.weights, CASE.hidden, CASE.cache, BATCH
        )  # fmt: skip
    with pytest.raises(TypeError, match=r"backend: expected a name or None, got list"):
        run(sharding_of(2, 2), backend=[])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda its: communication_bytes(CONFIG, its, -1), ValueError, "num_tokens: expected an"),
        (lambda its: communication_bytes(CONFIG, its, 1.5), TypeError, "num_tokens: expected an"),
        (lambda its: communication_bytes(CONFIG, 2, 1), TypeError, "sharding: expected an MlaSh"),
        (lambda its: empty_sharded_cache(CONFIG, -1, its), ValueError, "capacity: expected an"),
        (lambda its: empty_sharded_cache(CONFIG, "5", its), TypeError, "capacity: expected an"),
        (lambda its: empty_sharded_cache(None, 5, its), TypeError, "config: expected an MlaConfig"),
        (lambda its: shard_scales({}, [LAYER], its), TypeError, "artifact: expected a ScaleArt"),
        (lambda its: load_sharded_layers("x", CONFIG, [], its), ValueError, "layers: expected at"),
    ],
)
def test_arguments_of_what_places_arrays(call, error, message):
    with pytest.raises(error, match=message):
        call(sharding_of(2, 2))


def test_a_mesh_with_explicit_axes_wants_arrays_in_their_place():
    """As jax.make_mesh makes them."""
    sharding = MlaSharding(jax.make_mesh((2, 2), ("tp", "cp"), devices=jax.devices()[:4]))
    weights, cache = placed(CASE, sharding)
    scales = LayerScales(*np.ones((3, 4), np.float32))
    fp8 = {"precision": "fp8", "scales": scales}
    all_weights = "weights.g_proj, weights.kv_b_proj, weights.o_proj, weights.q_b_proj"
    for change, first, maker, names in (
        ({"weights": CASE.weights}, "weights.g_proj", "load_sharded_layers", all_weights),
        ({"weights": jax.device_put(CASE.weights)}, "weights.g_proj", "load_sh", all_weights),
        ({"cache": CASE.cache}, "cache", "empty_sharded_cache", "cache"),
        (fp8, "scales.q", "shard_scales", "scales.q, scales.k, scales.v"),
    ):
        with pytest.raises(
            ValueError, match=rf"^{first}: expected an array that lies on"
        ) as caught:
            run(sharding, **{"weights": weights, "cache": cache, **change})
        assert f"make it with {maker}" in str(caught.value)
        assert str(caught.value).endswith(f"Not so placed: {names}")
    # As far as to the compiled part.
    artifact = artifact_of(CASE, tp_size=2)
    fp8["scales"] = shard_scales(artifact, [LAYER], sharding)[LAYER]
    with pytest.raises(NameError, match=r"_prefill_layer_sharded"):
        run(sharding, weights=weights, cache=cache, **fp8)


@pytest.mark.parametrize("explicit", [("tp", "cp"), ("cp",)])
def test_traced_arrays_have_their_place_on_explicit_axes(explicit):
    types = [AxisType.Explicit if name in explicit else AxisType.Auto for name in ("tp", "cp")]
    mesh = jax.make_mesh((2, 2), ("tp", "cp"), tuple(types), devices=jax.devices()[:4])
    sharding = MlaSharding(mesh)
    weights, cache = placed(CASE, sharding)

    def trace(weights: Any, cache: Any) -> None:
        jax.jit(lambda w, c: run(sharding, weights=w, cache=c)).trace(weights, cache)

    with pytest.raises(NameError, match=r"_prefill_layer_sharded"):
        trace(weights, cache)
    with pytest.raises(ValueError, match=r"^cache: expected an array that lies on the mesh"):
        trace(weights, CASE.cache)
    error, message = NameError, r"_prefill_layer_sharded"  # JAX moves what is Auto
    if "tp" in explicit:
        error, message = ValueError, r"^weights.g_proj: expected an array that lies on the mesh"
    with pytest.raises(error, match=message):
        trace(CASE.weights, cache)


def test_an_artifact_of_another_number_of_ranks():
    message = r"artifact: expected tp_size 2, that of the mesh \('tp'\), got 4"
    with pytest.raises(ValueError, match=message):
        shard_scales(artifact_of(CASE, tp_size=4), [LAYER], sharding_of(2, 2))
    with pytest.raises(ValueError, match=r"index: expected a calibrated layer, one of 3, got 7"):
        shard_scales(artifact_of(CASE, tp_size=2), [7], sharding_of(2, 2))


def test_a_checkpoint_of_another_model(tmp_path):
    save_checkpoint(tmp_path, {LAYER: CASE.weights})
    config = dataclasses.replace(CONFIG, q_lora_rank=32)
    with pytest.raises(CheckpointError, match=r"q_a_proj.weight: expected shape \[32, 96\]"):
        load_sharded_layers(tmp_path, config, [LAYER], sharding_of(2, 2))
