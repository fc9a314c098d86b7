# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""From a policy to precision and scales; artifacts of other models."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from jaxfp8 import PrefillPolicy, scales
from jaxfp8.models import KIMI_K3, deployment, plan_prefill

LAYERS = (3, 7)
SERVED = deployment(
    KIMI_K3,
    model="moonshotai/Kimi-K3",
    revision="0123456789abcdef",
    checkpoint_id="sha256:" + "5" * 64,
    tp_size=8,
    layers=LAYERS,
    fp8_dtype="float8_e4m3fnuz",
)
LONG, SHORT = [800_000, 3], [70_000, 20]


def artifact_for(served):
    rng = np.random.default_rng(0)
    fields = {field.name: getattr(served, field.name) for field in dataclasses.fields(served)}
    del fields["layers"]
    identity = scales.Identity(calibration_id="test", margin=1.0, **fields)
    heads = served.tp_size * served.local_heads
    amax = rng.uniform(1, 9, (len(served.layers), 3, heads)).astype(np.float32)
    return scales.ScaleArtifact(
        identity=identity,
        layers=served.layers,
        descale=amax / np.float32(identity.fmt.max),
        amax=amax,
        created_by="test",
    )


def policy(served=SERVED, **options):
    return PrefillPolicy(
        enabled=True, artifact=artifact_for(served), deployment=served, arch="gfx942", **options
    )


def test_static():
    its = policy()
    for rank in (0, 5):
        plan = plan_prefill(its, SERVED, LONG, arch="gfx942", tp_rank=rank)
        assert (plan.precision, plan.new_tokens_precision) == ("fp8", "bf16")
        assert set(plan.scales) == set(LAYERS)
        for layer in LAYERS:
            expected = its.artifact.layer(layer, tp_rank=rank)
            for x, y in zip(plan.scales[layer], expected, strict=True):
                assert x.shape == (12,)
                np.testing.assert_array_equal(x, y)
    plan = plan_prefill(its, SERVED, LONG, arch="gfx942", new_tokens_fp8=True)
    assert plan.new_tokens_precision == "fp8"


@pytest.mark.parametrize(
    ("its", "context", "arch", "precision"),
    [
        (PrefillPolicy(enabled=True), LONG, "gfx942", "fp8"),
        (PrefillPolicy(enabled=True), LONG, "sm90", "bf16"),
        (PrefillPolicy(), LONG, "gfx942", "bf16"),
        (policy(), SHORT, "gfx942", "bf16"),
        (policy(min_context=0), [], "gfx942", "fp8"),
    ],
)
def test_decisions(its, context, arch, precision):
    plan = plan_prefill(its, SERVED, context, arch=arch, new_tokens_fp8=True)
    assert plan.precision == plan.new_tokens_precision == precision
    assert bool(plan.scales) == (precision == "fp8" and its.artifact is not None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "deepseek-ai/DeepSeek-V3"}, "model: expected 'deepseek-ai/DeepSeek-V3'"),
        ({"revision": "fedcba9"}, "revision: expected 'fedcba9'"),
        ({"layers": (3, 7, 11)}, "layers"),
        ({"tp_size": 4, "local_heads": 24}, "tp_size: expected 4"),
    ],
)
def test_an_artifact_of_another_model_is_refused(change, message):
    """Also where the context is short: before the first long one comes."""
    served = dataclasses.replace(SERVED, **change)
    for context in (LONG, SHORT):
        with pytest.raises(scales.ScaleArtifactError, match=re.escape(message)):
            plan_prefill(policy(), served, context, arch="gfx942")


def test_a_policy_that_is_off_wants_no_artifact():
    served = dataclasses.replace(SERVED, model="another")
    off = dataclasses.replace(policy(), enabled=False)
    assert plan_prefill(off, served, LONG, arch="gfx942").precision == "bf16"


def test_scales_of_a_layer():
    plan = plan_prefill(policy(), SERVED, LONG, arch="gfx942")
    assert plan.layer_scales(np.int64(7)) is plan.scales[7]
    with pytest.raises(ValueError, match=r"layer: expected one with static scales, 3, 7, got 11"):
        plan.layer_scales(11)
    with pytest.raises(TypeError, match=r"layer: expected an integer, got str"):
        plan.layer_scales("3")
    for its, context in ((PrefillPolicy(enabled=True), LONG), (policy(), SHORT)):
        assert plan_prefill(its, SERVED, context, arch="gfx942").layer_scales(3) is None


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"policy": None}, TypeError, "policy: expected a PrefillPolicy, got NoneType"),
        ({"served": None}, TypeError, "served: expected a Deployment, got NoneType"),
        ({"context_lens": 7}, TypeError, "context_lens: expected integers [B], got int"),
        ({"context_lens": "70"}, TypeError, "context_lens: expected integers [B], got str"),
        ({"context_lens": ["70"]}, TypeError, "context_lens: expected integers [B], got dtype <U2"),
        ({"context_lens": [7.0]}, TypeError, "context_lens: expected integers [B], got dtype fl"),
        ({"context_lens": [[7], []]}, TypeError, "context_lens: expected integers [B], got uneven"),
        ({"context_lens": [[7], [8]]}, ValueError, "context_lens: expected shape [B], got [2, 1];"),
        ({"context_lens": [-1, 8]}, ValueError, "context_lens: expected lengths >= 0, got -1"),
        ({"new_tokens_fp8": "no"}, TypeError, "new_tokens_fp8: expected True or False, got str"),
        ({"arch": None}, TypeError, "arch: expected the name of a device, got NoneType"),
        ({"tp_rank": "0"}, TypeError, "tp_rank: expected an integer, got str"),
        ({"tp_rank": -1}, ValueError, "tp_rank: expected 0 to 7, got -1"),
    ],
)
def test_arguments_that_cannot_be(change, error, message):
    given = {
        "policy": PrefillPolicy(), "served": SERVED, "context_lens": SHORT, "arch": "gfx942",
        **change,
    }  # fmt: skip
    with pytest.raises(error, match=re.escape(message)):
        plan_prefill(**given)


def test_layers_that_are_none():
    with pytest.raises(TypeError, match=r"layers: expected layer indices, got str"):
        deployment(
            KIMI_K3, model="m", revision="0123456", checkpoint_id="c", tp_size=8, layers="37",
            fp8_dtype="float8_e4m3fnuz",
        )  # fmt: skip


def test_ranks_that_cannot_be():
    with pytest.raises(ValueError, match=r"tp_rank: expected 0 to 7, got 8"):
        plan_prefill(policy(), SERVED, LONG, arch="gfx942", tp_rank=8)
    with pytest.raises(ValueError, match=r"tp_size: expected a divisor of the 96 heads"):
        deployment(
            KIMI_K3, model="m", revision="0123456", checkpoint_id="c", tp_size=7, layers=LAYERS,
            fp8_dtype="float8_e4m3fnuz",
        )  # fmt: skip
