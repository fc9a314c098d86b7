# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Calibration of the model on two ranks, each a process, and the model run on what came of it."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxfp8
from jaxfp8 import models, scales
from tests import oracle as attention_oracle
from tests.inputs import cu_seqlens
from tests.models import oracle
from tests.models.builders import (
    TINY,
    checkpoint_tensors,
    hidden_states,
    save_checkpoint,
    tiny_weights,
)  # fmt: skip
from tests.models.calibrate_rank import CU_SEQLENS, IDENTITY, LAYERS, TP_SIZE
from tests.models.processes import run_processes
from tests.tolerances import relative_error

pytestmark = pytest.mark.usefixtures("compiled_fast")

WEIGHTS = {layer: tiny_weights(layer) for layer in LAYERS}
SERVED = models.deployment(
    TINY,
    model=IDENTITY.model,
    revision=IDENTITY.revision,
    checkpoint_id=IDENTITY.checkpoint_id,
    tp_size=TP_SIZE,
    layers=LAYERS,
    fp8_dtype=IDENTITY.fp8_dtype,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the two processes leave."""
    folder = tmp_path_factory.mktemp("calibration")
    (folder / "checkpoint").mkdir()
    save_checkpoint(folder / "checkpoint", WEIGHTS, files=3)
    prompts = np.concatenate(hidden_states(np.random.default_rng(4), np.diff(CU_SEQLENS)))
    # What lies past the last prompt does not count.
    prompts = np.concatenate([prompts, np.full((4, prompts.shape[1]), np.nan, prompts.dtype)])
    np.save(folder / "prompts.npy", prompts.view(np.uint16))
    run_processes(
        "tests.models.calibrate_rank", TP_SIZE, folder, JAX_DISABLE_MOST_OPTIMIZATIONS="1"
    )
    return folder


@pytest.fixture(scope="module")
def inputs(folder):
    """float64 inputs of each layer, and what it makes of each prompt: from the oracle alone."""
    hidden = np.load(folder / "prompts.npy").view(ml_dtypes.bfloat16).astype(np.float64)
    prompts = [hidden[a:b] for a, b in itertools.pairwise(CU_SEQLENS)]
    layers = {}
    for layer, weights in WEIGHTS.items():
        whole = [oracle.layer(TINY, checkpoint_tensors(weights), x) for x in prompts]
        layers[layer] = (prompts, whole)
        prompts = [x + its.out for x, its in zip(prompts, whole, strict=True)]
    layers["end"] = (prompts, None)
    return layers


def test_the_stack_in_bf16_is_the_model(folder, inputs):
    hidden = np.load(folder / "hidden.npy").view(ml_dtypes.bfloat16)[: CU_SEQLENS[-1]]
    first, last = np.concatenate(inputs[LAYERS[0]][0]), np.concatenate(inputs["end"][0])
    # Two layers' errors, and two roundings of the sum: less than one layer's of the whole. What
    # the layers have added is far more than that.
    assert relative_error(hidden, last) < oracle.LAYER_ERROR["bf16"]
    assert relative_error(first, last) > 10 * oracle.LAYER_ERROR["bf16"]


def test_maxima_are_those_of_all_heads_in_order(folder, inputs):
    artifact = scales.merge_folder(folder / "shards")
    assert artifact.layers == LAYERS
    assert artifact.descale.shape == (2, 3, TINY.num_heads)
    for row, layer in enumerate(LAYERS):
        _, whole = inputs[layer]
        for i, name in enumerate("qkv"):
            expected = attention_oracle.amax(np.concatenate([getattr(x, name) for x in whole]))
            np.testing.assert_allclose(artifact.amax[row, i], expected, rtol=0.03)


def test_static_passes_on_the_calibrated_scales(folder, inputs):
    """Prompt by prompt: the context is in the cache, the last tokens are new."""
    scales.merge_folder(folder / "shards").save(folder / "scales.safetensors")
    artifact = scales.ScaleArtifact.load(folder / "scales.safetensors", SERVED)
    policy = jaxfp8.PrefillPolicy(
        enabled=True, min_context=1, archs=("cpu",), artifact=artifact, deployment=SERVED,
        arch="cpu",
    )  # fmt: skip
    context = np.array([33, 12], np.int32)
    batch = models.PrefillBatch(cu_seqlens(np.diff(CU_SEQLENS) - context), context, CU_SEQLENS)
    outs = dict.fromkeys(LAYERS, 0.0)
    for rank in range(TP_SIZE):
        plan = models.plan_prefill(policy, SERVED, context, arch="cpu", tp_rank=rank)
        assert plan.precision == "fp8"
        loaded = models.load_layers(
            folder / "checkpoint", TINY, LAYERS, tp_rank=rank, tp_size=TP_SIZE
        )
        for layer in LAYERS:
            prompts, whole = inputs[layer]
            new = np.concatenate([x[n:] for x, n in zip(prompts, context, strict=True)])
            cache = np.concatenate([x.latents for x in whole])
            result = models.prefill_layer(
                TINY, loaded[layer], jnp.asarray(new, jnp.bfloat16),
                jnp.asarray(cache, jnp.bfloat16), batch, segment=32, precision=plan.precision,
                new_tokens_precision=plan.new_tokens_precision, scales=plan.scales[layer],
            )  # fmt: skip
            outs[layer] = outs[layer] + np.asarray(result.out, np.float64)
    for layer in LAYERS:
        _, whole = inputs[layer]
        expected = np.concatenate([x.out[n:] for x, n in zip(whole, context, strict=True)])
        error = relative_error(outs[layer], expected)
        assert oracle.LAYER_ERROR["bf16"] < error < oracle.LAYER_ERROR["fp8"]


def test_calibration_is_for_eager_code():
    calibrator = jaxfp8.Calibrator(IDENTITY, tp_rank=0, pp_rank=0, layers={3: "layer"})
    weights = models.rank_weights(WEIGHTS[3], 0, TP_SIZE)
    with pytest.raises(TypeError, match=r"expected concrete arrays, got traced ones"):
        jax.eval_shape(
            lambda hidden: models.calibrate_layer(
                calibrator, 3, TINY, weights, hidden, jnp.asarray(CU_SEQLENS)
            ),
            jax.ShapeDtypeStruct((60, TINY.hidden_size), jnp.bfloat16),
        )


def test_weights_of_another_rank_count_are_refused():
    calibrator = jaxfp8.Calibrator(IDENTITY, tp_rank=0, pp_rank=0, layers={3: "layer"})
    hidden = hidden_states(np.random.default_rng(5), [60])[0]
    with pytest.raises(ValueError, match=r"q: expected shape \[T, 2, 192\] to match the identity"):
        models.calibrate_layer(calibrator, 3, TINY, WEIGHTS[3], hidden, CU_SEQLENS)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"calibrator": None}, TypeError, "calibrator: expected a Calibrator, got NoneType"),
        ({"config": {}}, TypeError, "config: expected an MlaConfig, got dict"),
        ({"hidden": np.ones((60, 96))}, TypeError, "hidden: expected dtype bfloat16, got float64"),
        ({"hidden": np.ones((60, 90))}, ValueError, r"hidden: expected shape \[T, 96\]"),
        ({"weights": WEIGHTS[3]._replace(g_proj=None)}, ValueError, "weights.g_proj: expected an"),
        ({"weights": tuple(WEIGHTS[3])}, TypeError, "weights: expected an MlaWeights, got tuple"),
    ],
)
def test_arguments_that_cannot_be(change, error, message):
    """What a calibration without the gate would see of later layers is not what the model has."""
    given = {
        "calibrator": jaxfp8.Calibrator(IDENTITY, tp_rank=0, pp_rank=0, layers={3: "layer"}),
        "layer": 3,
        "config": TINY,
        "weights": models.rank_weights(WEIGHTS[3], 0, TP_SIZE),
        "hidden": hidden_states(np.random.default_rng(5), [60])[0],
        "cu_seqlens": CU_SEQLENS,
        **change,
    }
    with pytest.raises(error, match=message):
        models.calibrate_layer(**given)
