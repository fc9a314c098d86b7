# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
import copy
import dataclasses
import logging
import pickle
import threading

import ml_dtypes
import numpy as np
import pytest

from jaxfp8.policy import Decision, PrefillPolicy, PrefillRequest
from jaxfp8.scales import ScaleArtifactError
from tests.scales import builders

LONG = 786_432


def request(**changes) -> PrefillRequest:
    values = {
        "context_tokens": LONG,
        "num_heads": 12,
        "qk_head_dim": 192,
        "v_head_dim": 128,
        "dtype": "bfloat16",
        "arch": "gfx942",
    }
    return PrefillRequest(**(values | changes))


def static_policy(artifact=None, **changes) -> PrefillPolicy:
    artifact = artifact or builders.artifact()
    values = {
        "enabled": True,
        "artifact": artifact,
        "deployment": artifact.deployment,
        "arch": "gfx942",
    }
    return PrefillPolicy(**(values | changes))


def test_it_is_off_by_default():
    policy = PrefillPolicy()
    decision = policy.select(request())
    assert decision == Decision("bf16", decision.reason)
    assert "FP8 prefill is off" in decision.reason


@pytest.mark.parametrize("context", [LONG, LONG + 1, 1_047_552])
def test_what_it_admits(context):
    decision = PrefillPolicy(enabled=True).select(request(context_tokens=context))
    assert decision.path == "fp8" and "dynamic scales" in decision.reason
    heads = request(context_tokens=context, num_heads=3)
    assert "static scales" in static_policy().select(heads).reason


REFUSALS = {
    "short": ({"context_tokens": LONG - 1}, "cached context is shorter than 786432 tokens"),
    "empty": ({"context_tokens": 0}, "cached context is shorter than 786432 tokens"),
    "arch": ({"arch": "sm90"}, "device sm90 is not one of gfx942"),
    "dtype": ({"dtype": "float16"}, "inputs are float16, not bfloat16"),
    "dims": ({"qk_head_dim": 128}, "head dims (128, 128) are not among [(192, 128)]"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_it_refuses(name):
    changes, reason = REFUSALS[name]
    decision = PrefillPolicy(enabled=True).select(request(**changes))
    assert decision.path == "bf16" and reason in decision.reason


def test_each_refusal_has_its_own_reason():
    policy = static_policy()
    requests = [request(num_heads=3, **changes) for changes, _ in REFUSALS.values()]
    requests += [request(num_heads=3), request(num_heads=6)]
    reasons = {policy.select(r).reason for r in requests}
    reasons.add(PrefillPolicy().select(request()).reason)
    assert len(reasons) == len(REFUSALS) - 1 + 3  # "short" and "empty" are one


def test_a_static_policy_refuses_what_the_artifact_lacks():
    policy = static_policy(head_dims=[(192, 128), (128, 128)])
    assert "12 heads are not the 3 a rank" in policy.select(request()).reason
    decision = policy.select(request(num_heads=3, qk_head_dim=128))
    assert decision.path == "bf16" and "are not those of the artifact" in decision.reason


def test_the_switch_can_be_given_by_position_and_nothing_else():
    assert PrefillPolicy(True).select(request()).path == "fp8"
    with pytest.raises(TypeError):
        PrefillPolicy(True, 5)


def test_every_bound_can_be_set():
    policy = PrefillPolicy(
        enabled=True,
        min_context=10,
        archs=["gfx942", "sm90"],
        dtypes=("float32",),
        head_dims=[(128, 128)],
    )
    served = request(context_tokens=10, arch="sm90", dtype="float32", qk_head_dim=128)
    assert policy.select(served).path == "fp8"
    for changes in (
        {"context_tokens": 9},
        {"arch": "cpu"},
        {"dtype": "bfloat16"},
        {"qk_head_dim": 192},
    ):
        assert policy.select(dataclasses.replace(served, **changes)).path == "bf16"
    assert dataclasses.replace(policy, min_context=0).select(request()).path == "bf16"


@pytest.mark.parametrize(
    "dtype", ["bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)], ids=str
)
def test_a_dtype_can_be_given_in_many_ways(dtype):
    assert PrefillPolicy(enabled=True).select(request(dtype=dtype)).path == "fp8"


@pytest.mark.parametrize("dtype", [None, object(), "torch.bfloat16", np.float64, np.dtype("i4")])
def test_any_other_dtype_is_bf16_and_no_error(dtype):
    assert PrefillPolicy(enabled=True).select(request(dtype=dtype)).path == "bf16"


@pytest.mark.parametrize(
    "changes",
    [
        {"fp8_dtype": "float8_e4m3fn"},
        {"tp_size": 4},
        {"local_heads": 12},
        {"qk_head_dim": 128},
        {"v_head_dim": 64},
        {"model": "other"},
        {"layers": (3, 7, 11)},
    ],
)
def test_an_artifact_that_does_not_fit_is_refused_at_construction(changes):
    deployment = dataclasses.replace(builders.artifact().deployment, **changes)
    with pytest.raises(ScaleArtifactError, match=next(iter(changes))):
        static_policy(deployment=deployment)


def test_all_mismatches_of_an_artifact_are_listed():
    deployment = dataclasses.replace(builders.artifact().deployment, tp_size=4, model="x")
    with pytest.raises(ScaleArtifactError, match=r"2 problems: model: .*; tp_size: "):
        static_policy(deployment=deployment)


def test_an_artifact_that_would_never_be_used_is_refused_at_construction():
    with pytest.raises(ValueError, match=r"arch: expected one of gfx942 \(archs\).*got 'sm90'"):
        static_policy(arch="sm90")
    with pytest.raises(ValueError, match="deployment: expected head dims among"):
        static_policy(builders.artifact(qk_head_dim=128))
    fn = builders.artifact(fp8_dtype="float8_e4m3fn")
    with pytest.raises(ValueError, match="artifact: expected scales for float8_e4m3fnuz, the FP8"):
        static_policy(fn)
    assert static_policy(fn, arch="sm90", archs=("sm90",)).artifact is fn
    for name in ("deployment", "arch"):
        with pytest.raises(ValueError, match=f"{name}: needed to tell whether the artifact"):
            static_policy(**{name: None})


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"enabled": 1}, TypeError),
        ({"enabled": "1"}, TypeError),
        ({"min_context": -1}, ValueError),
        ({"min_context": 1.5}, ValueError),
        ({"min_context": True}, ValueError),
        ({"archs": "gfx942"}, TypeError),
        ({"archs": 5}, TypeError),
        ({"archs": (5,)}, TypeError),
        ({"archs": ()}, ValueError),
        ({"dtypes": "bfloat16"}, TypeError),
        ({"dtypes": None}, TypeError),
        ({"head_dims": 192}, TypeError),
        ({"head_dims": (192, 128)}, TypeError),
        ({"head_dims": []}, ValueError),
        ({"artifact": "scales.safetensors"}, TypeError),
        ({"deployment": {}}, TypeError),
        ({"arch": 942}, TypeError),
    ],
)
@pytest.mark.parametrize("enabled", [False, True])
def test_bounds_that_make_no_sense(changes, error, enabled):
    """Whether FP8 is on or off: a mistake is noticed before the day that it is switched on."""
    with pytest.raises(error, match=f"^{next(iter(changes))}: expected"):
        PrefillPolicy(**({"enabled": enabled} | changes))


def test_bounds_from_arrays_and_dtypes():
    policy = PrefillPolicy(True, min_context=np.int64(10), dtypes=[ml_dtypes.bfloat16])
    assert policy == PrefillPolicy(True, min_context=10)
    assert policy.select(request(context_tokens=np.int32(10))).path == "fp8"


def test_policies_of_equal_artifacts_are_equal():
    assert static_policy() == static_policy() and hash(static_policy()) == hash(static_policy())


@pytest.mark.parametrize(
    "changes", [{"context_tokens": -1}, {"num_heads": 1.5}, {"v_head_dim": True}]
)
def test_requests_that_make_no_sense(changes):
    with pytest.raises(ValueError, match=f"{next(iter(changes))}: expected an integer"):
        request(**changes)


def test_counts_and_logs_once_a_reason(caplog):
    policy = PrefillPolicy(enabled=True)
    with caplog.at_level(logging.INFO, logger="jaxfp8.policy"):
        for context in (0, 5, 1000, LONG, LONG + 5, 7):
            policy.select(request(context_tokens=context))
        policy.select(request(arch="cpu"))
    short, fp8, arch = policy.counts
    assert policy.counts == {short: 4, fp8: 2, arch: 1}
    assert [record.getMessage() for record in caplog.records] == [
        f"prefill in bf16: {short}",
        f"prefill in fp8: {fp8}",
        f"prefill in bf16: {arch}",
    ]
    policy.counts.clear()  # a copy
    assert sum(policy.counts.values()) == 7


def test_counts_from_many_threads():
    policy = PrefillPolicy(enabled=True)
    threads = [
        threading.Thread(target=lambda: [policy.select(request()) for _ in range(500)])
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(policy.counts.values()) == [4000]


def test_it_can_be_copied_and_sent_to_other_processes():
    policy = static_policy()
    policy.select(request())
    for other in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        assert other.counts == policy.counts
        assert other.select(request(num_heads=3)).path == "fp8"
    assert len(policy.counts) == 1


# from_env


@pytest.mark.parametrize("value", [None, "", "0"])
def test_the_environment_leaves_it_off(value):
    environ = {"JAXFP8_SCALES": "/missing"} | ({} if value is None else {"JAXFP8_PREFILL": value})
    policy = PrefillPolicy.from_env(environ=environ)
    assert not policy.enabled and policy.artifact is None


@pytest.mark.parametrize("value", ["true", "2", " 1", "yes"])
def test_a_switch_that_is_neither(value):
    with pytest.raises(ValueError, match="JAXFP8_PREFILL: expected 1, 0 or nothing, got"):
        PrefillPolicy.from_env(environ={"JAXFP8_PREFILL": value})


def test_the_environment_switches_it_on(monkeypatch):
    monkeypatch.setenv("JAXFP8_PREFILL", "1")
    monkeypatch.delenv("JAXFP8_SCALES", raising=False)
    monkeypatch.setenv("JAXFP8_MIN_CONTEXT", "1")  # no other variable is read
    policy = PrefillPolicy.from_env()
    assert policy.enabled and policy.artifact is None and policy.min_context == LONG
    assert PrefillPolicy.from_env(min_context=5).min_context == 5


def test_the_environment_names_the_artifact(tmp_path, monkeypatch):
    made = builders.artifact()
    path = tmp_path / "scales.safetensors"
    made.save(path)
    monkeypatch.setenv("JAXFP8_PREFILL", "1")
    monkeypatch.setenv("JAXFP8_SCALES", str(path))
    policy = PrefillPolicy.from_env(deployment=made.deployment, arch="gfx942")
    assert policy.artifact.to_bytes() == made.to_bytes()
    with pytest.raises(ValueError, match="deployment: needed to tell whether JAXFP8_SCALES="):
        PrefillPolicy.from_env(arch="gfx942")
    with pytest.raises(ValueError, match="arch: needed"):
        PrefillPolicy.from_env(deployment=made.deployment)
    other = dataclasses.replace(made.deployment, tp_size=4)
    with pytest.raises(ScaleArtifactError, match=r"scales.safetensors.*tp_size"):
        PrefillPolicy.from_env(deployment=other, arch="gfx942")
    monkeypatch.setenv("JAXFP8_SCALES", str(tmp_path / "missing"))
    with pytest.raises(ScaleArtifactError, match="cannot be read"):
        PrefillPolicy.from_env(deployment=made.deployment, arch="gfx942")
