# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""One artifact for both doors: calibrated from either, used from either, bit for bit."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jaxfp8  # noqa: E402
import jaxfp8_torch  # noqa: E402
from jaxfp8.scales import (  # noqa: E402
    Identity,
    ScaleArtifact,
    ScaleArtifactError,
    merge_folder,
    merge_shards,
)
from tests.inputs import cu_seqlens, qkv  # noqa: E402
from tests.interop.tensors import (  # noqa: E402
    DEVICES,
    assert_same_bits,
    native,
    on_jax,
    tensor,
    tensors,
)

on_each_device = pytest.mark.parametrize("device", DEVICES)
LAYERS = {3: "layers.3.attn", 7: "layers.7.attn"}


def identity(fmt=jaxfp8.E4M3FNUZ):
    return Identity(
        model="model",
        revision="0123456789abcdef",
        checkpoint_id="checkpoint",
        calibration_id="data",
        tp_size=1,
        pp_size=1,
        fp8_dtype=fmt.name,
        local_heads=3,
        qk_head_dim=192,
        v_head_dim=128,
        margin=1.125,
    )


def observations():
    rng = np.random.default_rng(0)
    return [(layer, qkv(rng, 20, 30, num_heads=3)) for layer in LAYERS for _ in range(3)]


def calibrator(door, **options):
    made = door.Calibrator(
        identity(options.pop("fmt", jaxfp8.E4M3FNUZ)),
        tp_rank=0,
        pp_rank=0,
        layers=LAYERS,
        **options,
    )
    made.arm()
    return made


@on_each_device
def test_both_doors_make_the_same_shard(device, tmp_path):
    ours, other = calibrator(jaxfp8_torch), calibrator(jaxfp8)
    for layer, arrays in observations():
        ours.observe(layer, *tensors(arrays, device))
        other.observe(layer, *arrays)
    a, b = (
        Path(made.save(tmp_path / name)).read_bytes() for made, name in ((ours, "a"), (other, "b"))
    )
    assert a == b


@on_each_device
def test_an_artifact_from_one_door_is_used_from_the_other(device, tmp_path):
    fmt = native(device)
    for made, give in (
        (calibrator(jaxfp8_torch, fmt=fmt), lambda arrays: tensors(arrays, device)),
        (calibrator(jaxfp8, fmt=fmt), lambda arrays: arrays),
    ):
        for layer, arrays in observations():
            made.observe(layer, *give(arrays))
        path = tmp_path / "scales.safetensors"
        merge_shards([made.shard()]).save(path)
        artifact = ScaleArtifact.read(path)
        there = artifact.layer(7, tp_rank=0)
        loaded = jaxfp8_torch.ScaleArtifact.load(path, artifact.deployment, device=device)
        here = loaded.layer(7, tp_rank=0)
        for a, b in zip(here, there, strict=True):
            assert a.device.type == device
            assert_same_bits(a, b)
        q, k, v = qkv(np.random.default_rng(9), 256, 256, num_heads=3)
        arrays = (q, k, v, cu_seqlens([256]), cu_seqlens([256]))
        ours = jaxfp8_torch.prefill_attention(*tensors(arrays, device), causal=True, scales=here)
        other = jaxfp8.prefill_attention(
            *on_jax(arrays, device), causal=True,
            scales=jaxfp8.LayerScales(*on_jax(there, device)),
        )  # fmt: skip
        assert_same_bits(ours.out, other.out)
        assert_same_bits(ours.lse, other.lse)


def test_an_artifact_that_does_not_fit_is_refused(tmp_path):
    made = calibrator(jaxfp8_torch)
    for layer, arrays in observations():
        made.observe(layer, *tensors(arrays, "cpu"))
    artifact = merge_shards([made.shard()])
    artifact.save(tmp_path / "scales.safetensors")
    other = jaxfp8.scales.Deployment(
        **{
            name: getattr(artifact.deployment, name)
            for name in artifact.deployment.__dataclass_fields__
        }
        | {"local_heads": 4}
    )
    with pytest.raises(ScaleArtifactError, match="local_heads"):
        jaxfp8_torch.ScaleArtifact.load(tmp_path / "scales.safetensors", other)
    with pytest.raises(TypeError, match="artifact: expected a jaxfp8.scales.ScaleArtifact"):
        jaxfp8_torch.ScaleArtifact("scales.safetensors")
    with pytest.raises(ValueError, match="tp_rank"):
        jaxfp8_torch.ScaleArtifact(artifact).layer(3, tp_rank=5)
    for index in (3.0, [3], "3", True):
        with pytest.raises(TypeError, match="index: expected an integer, got"):
            jaxfp8_torch.ScaleArtifact(artifact).layer(index)
    with pytest.raises(TypeError, match="tp_rank: expected an integer, got float"):
        jaxfp8_torch.ScaleArtifact(artifact).layer(3, tp_rank=0.0)


@on_each_device
def test_strided_views_and_capacity(device):
    ours, expected = calibrator(jaxfp8_torch), calibrator(jaxfp8)
    for layer, (q, k, v) in observations():
        wide = tensor(np.concatenate([np.full_like(v, 1000), v], axis=2), device)
        tail = [
            torch.cat([x, torch.full_like(x, torch.nan)]) for x in tensors((q[:20], k[:20]), device)
        ]
        ours.observe(layer, *tail, wide[:, :, 128:], num_tokens=20)
        expected.observe(layer, q[:20], k[:20], v[:20])
    assert merge_shards([ours.shard()]).to_bytes() == merge_shards([expected.shard()]).to_bytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_sticks(bad):
    made = calibrator(jaxfp8_torch)
    for layer, arrays in observations():
        q, k, v = tensors(arrays, "cpu")
        if layer == 7:
            k[3, 1, 5] = bad
        made.observe(layer, q, k, v)
    with pytest.raises(ScaleArtifactError, match=r"layer 7 .*NaN or infinity in k, heads 1"):
        made.shard()


def test_maxima_that_the_caller_has():
    made, other = calibrator(jaxfp8_torch), calibrator(jaxfp8)
    for layer in LAYERS:
        maxima = np.random.default_rng(layer).uniform(1, 2, (3, 3)).astype(np.float32)
        made.observe_amax(layer, *tensors(maxima, "cpu"))
        other.observe_amax(layer, *maxima)
    assert merge_shards([made.shard()]).to_bytes() == merge_shards([other.shard()]).to_bytes()
    made.observe_amax(3, *(-torch.ones(3) for _ in range(3)))
    with pytest.raises(ScaleArtifactError, match="or a negative maximum given to observe_amax"):
        made.shard()


def test_as_a_context_manager(tmp_path):
    with calibrator(jaxfp8_torch, directory=tmp_path) as made:
        assert made.armed
        for layer, arrays in observations():
            made.observe(layer, *tensors(arrays, "cpu"))
    assert merge_folder(tmp_path).layers == (3, 7)
    with (
        pytest.raises(KeyError, match="the model's own"),
        calibrator(jaxfp8_torch, directory=tmp_path) as made,
    ):
        for layer, arrays in observations():
            made.observe(layer, *tensors(arrays, "cpu"))
        raise KeyError("the model's own")
    assert list(tmp_path.glob("*.incomplete"))


def test_nothing_is_recorded_before_arming():
    made = jaxfp8_torch.Calibrator(identity(), tp_rank=0, pp_rank=0, layers=LAYERS)
    for layer, arrays in observations():
        made.observe(layer, *tensors(arrays, "cpu"))
    with pytest.raises(ScaleArtifactError, match="arm"):
        made.shard()


REFUSED = {
    "layer": (lambda q, k, v: (5, q, k, v), ValueError, "layer: expected .* one of 3, 7, got 5"),
    "no layer": (lambda q, k, v: ([3], q, k, v), TypeError, "layer: expected an integer, got list"),
    "array": (lambda q, k, v: (3, q.numpy(force=True), k, v), TypeError, "q: expected a torch"),
    "dtype": (lambda q, k, v: (3, q.half(), k, v), TypeError, "q: expected dtype bfloat16 or"),
    "heads": (lambda q, k, v: (3, q, k[:, :2], v), ValueError, r"k: expected shape \[T, 3, 192\]"),
    "dim": (lambda q, k, v: (3, q, k, k), ValueError, r"v: expected shape \[T, 3, 128\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    make, error, message = REFUSED[case]
    q, k, v = (x.float() for x in tensors(observations()[0][1], "cpu"))
    made = calibrator(jaxfp8_torch)
    with pytest.raises(error, match=message):
        made.observe(*make(q, k, v))


def test_more_tokens_than_there_are():
    with pytest.raises(ValueError, match="num_tokens: expected a number of tokens within"):
        calibrator(jaxfp8_torch).observe(3, *tensors(observations()[0][1], "cpu"), num_tokens=21)
    for count in ("3", True, 3.0):
        with pytest.raises(TypeError, match="num_tokens: expected an integer, got"):
            calibrator(jaxfp8_torch).observe(
                3, *tensors(observations()[0][1], "cpu"), num_tokens=count
            )


@on_each_device
def test_threads(device):
    made, other = calibrator(jaxfp8_torch), calibrator(jaxfp8)
    for layer, arrays in observations():
        other.observe(layer, *arrays)

    def work(part):
        for layer, arrays in part:
            made.observe(layer, *tensors(arrays, device))

    threads = [threading.Thread(target=work, args=(observations()[n::3],)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert merge_shards([made.shard()]).to_bytes() == merge_shards([other.shard()]).to_bytes()
