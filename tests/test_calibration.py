# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
import contextlib
import dataclasses
import json
import os
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8.calibration import Calibrator
from jaxfp8.head_slice import HeadSlice
from jaxfp8.scales import RankShard, ScaleArtifactError, merge_folder
from tests.scales import builders
from tests.scales.builders import HEADS, LAYERS, runtime_name

NAMES = {layer: runtime_name(layer) for layer in LAYERS}


def calibrator(layers=None, *, tp_rank=0, pp_rank=0, directory=None, **changes) -> Calibrator:
    return Calibrator(
        builders.identity(**changes),
        tp_rank=tp_rank,
        pp_rank=pp_rank,
        layers=NAMES if layers is None else layers,
        directory=directory,
    )


def values(seed: int, tokens: int = 9, dtype=jnp.bfloat16) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    return [
        jnp.asarray(rng.normal(size=(tokens, HEADS, dim)) * rng.uniform(1, 30), dtype)
        for dim in (192, 192, 128)
    ]


def maxima(arrays) -> np.ndarray:
    return np.stack([np.abs(np.asarray(x, np.float32)).max(axis=(0, 2)) for x in arrays])


def amax_of(shard: RankShard, layer: int) -> np.ndarray:
    return np.stack([getattr(shard.layers[layer], name) for name in "qkv"])


def test_it_keeps_the_largest_of_all_it_sees(tmp_path):
    watched = calibrator()
    watched.arm()
    expected = {}
    for seed in range(6):
        layer = LAYERS[seed % 2]
        arrays = values(seed, tokens=seed + 1, dtype=(jnp.bfloat16, jnp.float32)[seed % 3 == 0])
        watched.observe(layer, *arrays)
        expected[layer] = np.maximum(expected.get(layer, 0), maxima(arrays))
    path = watched.save(tmp_path / "shards")
    assert os.path.basename(path) == "fp8-scales-pp00-tp00.json"
    shard = RankShard.read(path)
    assert shard.identity == builders.identity()
    for layer in LAYERS:
        np.testing.assert_array_equal(amax_of(shard, layer), expected[layer])
        assert shard.layers[layer].runtime_name == runtime_name(layer)


def test_it_agrees_with_the_public_function():
    watched = calibrator({3: "a"})
    watched.arm()
    arrays = values(0)
    watched.observe(3, *arrays)
    expected = [np.asarray(jaxfp8.per_head_amax(x)) for x in arrays]
    np.testing.assert_array_equal(amax_of(watched.shard(), 3), expected)


def test_maxima_that_the_caller_has():
    watched = calibrator({3: "a"})
    watched.arm()
    rows = np.random.default_rng(0).uniform(1, 9, (4, 3, HEADS)).astype(np.float32)
    for row in rows[:2]:
        watched.observe_amax(3, *row)
    watched.observe_amax(3, *map(jnp.asarray, rows[2]))
    np.testing.assert_array_equal(amax_of(watched.shard(), 3), rows[:3].max(axis=0))
    arrays = values(1)
    watched.observe(3, *arrays)
    expected = np.maximum(rows[:3].max(axis=0), maxima(arrays))
    np.testing.assert_array_equal(amax_of(watched.shard(), 3), expected)


def test_nothing_is_recorded_before_arm():
    watched = calibrator({3: "a"})
    assert not watched.armed
    large = [100 * x for x in values(0)]
    watched.observe(3, *large)
    watched.observe_amax(3, *maxima(large))
    with pytest.raises(ScaleArtifactError, match=r"arm\(\) was not called, .* of layer 3 \(a\)"):
        watched.shard()
    watched.arm()
    assert watched.armed
    with pytest.raises(ScaleArtifactError, match=r"never observed: layer 3 \(a\)"):
        watched.shard()
    arrays = values(1)
    watched.observe(3, *arrays)
    np.testing.assert_array_equal(amax_of(watched.shard(), 3), maxima(arrays))


def test_tokens_past_the_number_given_are_ignored():
    watched = calibrator({3: "a"})
    watched.arm()
    arrays = values(0, tokens=9)
    padded = [jnp.concatenate([x, jnp.full_like(x, jnp.nan)]) for x in arrays]
    for count in (4, 9):
        watched.observe(3, *padded, num_tokens=count)
        expected = maxima([x[:count] for x in arrays])
        np.testing.assert_array_equal(amax_of(watched.shard(), 3), expected)


def test_a_slice_of_a_wider_array():
    watched = calibrator({3: "a"})
    watched.arm()
    q, k, v = values(0)
    wide = jnp.concatenate([k[:, :, :128] * 100, v], axis=2)
    watched.observe(3, q, k, HeadSlice(wide, 128, 128))
    np.testing.assert_array_equal(amax_of(watched.shard(), 3), maxima([q, k, v]))


def test_numpy_arrays():
    watched = calibrator({3: "a"})
    watched.arm()
    arrays = [np.asarray(x) for x in values(0)]
    watched.observe(3, *arrays)
    np.testing.assert_array_equal(amax_of(watched.shard(), 3), maxima(arrays))


def test_calls_without_tokens():
    watched = calibrator({3: "a"})
    watched.arm()
    watched.observe(3, *values(0, tokens=0))
    watched.observe(3, *values(0), num_tokens=0)
    with pytest.raises(ScaleArtifactError, match="never observed"):
        watched.shard()
    q, k, v = values(0)
    watched.observe(3, q[:0], k, v)  # a context segment
    with pytest.raises(ScaleArtifactError, match="q is zero throughout, heads 0, 1, 2"):
        watched.shard()
    watched.observe(3, q, k[:0], v[:0])
    np.testing.assert_array_equal(amax_of(watched.shard(), 3), maxima([q, k, v]))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "f32"])
def test_what_is_not_finite_is_not_hidden(tmp_path, bad, which, dtype):
    watched = calibrator()
    watched.arm()
    watched.observe(3, *values(0, dtype=dtype))
    arrays = values(1, dtype=dtype)
    arrays[which] = arrays[which].at[4, 1, 7].set(bad)
    watched.observe(7, *arrays)
    watched.observe(7, *values(2, dtype=dtype))  # it sticks
    with pytest.raises(ScaleArtifactError) as caught:
        watched.save(tmp_path)
    assert caught.value.problems == (
        f"layer 7 ({runtime_name(7)}): NaN or infinity in {'qkv'[which]}, heads 1",
    )
    assert os.listdir(tmp_path) == []


def test_maxima_that_are_not_finite_are_not_hidden():
    watched = calibrator({3: "a"})
    watched.arm()
    rows = np.ones((3, HEADS), np.float32)
    rows[1, 2] = np.nan
    watched.observe_amax(3, *rows)
    watched.observe_amax(3, *np.ones_like(rows))
    watched.observe_amax(3, *(np.array([1, -1, 1], np.float32) for _ in "qkv"))
    with pytest.raises(ScaleArtifactError) as caught:
        watched.shard()
    what = "NaN or infinity (or a negative maximum given to observe_amax)"
    assert f"{what} in k, heads 1, 2" in str(caught.value)
    assert f"{what} in v, heads 1" in str(caught.value)


def test_a_head_that_is_zero_throughout():
    watched = calibrator({3: "a"})
    watched.arm()
    q, k, v = values(0)
    watched.observe(3, q, k, v.at[:, 1].set(0))
    with pytest.raises(ScaleArtifactError, match=r"layer 3 \(a\): v is zero throughout, heads 1"):
        watched.shard()


def test_all_problems_are_named_at_once():
    watched = calibrator({3: "a", 7: "b", 11: "c", 15: "d"})
    watched.arm()
    q, k, v = values(0)
    watched.observe(7, q.at[0, 0, 0].set(jnp.nan), k, v)
    watched.observe(11, q, k * 0, v)
    with pytest.raises(ScaleArtifactError) as caught:
        watched.shard()
    assert caught.value.problems == (
        "never observed: layer 3 (a); layer 15 (d)",
        "layer 7 (b): NaN or infinity in q, heads 0",
        "layer 11 (c): k is zero throughout, heads 0, 1, 2",
    )


def test_a_stage_without_attention_writes_an_empty_shard(tmp_path):
    path = calibrator({}, pp_rank=1).save(tmp_path)
    assert json.loads(Path(path).read_text())["layers"] == {}
    with pytest.raises(ValueError, match="one of none, got 3"):
        calibrator({}).observe(3, *values(0))


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.make_jaxpr])
def test_a_traced_value_is_refused(transform):
    watched = calibrator({3: "a"})
    watched.arm()
    q, k, v = values(0)
    rows = maxima((q, k, v))

    def observe(k):
        watched.observe(3, q, k, v)
        return k

    def observe_amax(row):
        watched.observe_amax(3, rows[0], row, rows[2])
        return row

    def observe_slice(v):
        watched.observe(3, q, k, HeadSlice(v, 0, 128))
        return v

    batched = (lambda x: x[None]) if transform is jax.vmap else (lambda x: x)
    for function, x in ((observe, k), (observe_amax, rows[1]), (observe_slice, v)):
        with pytest.raises(TypeError, match="expected a concrete array, got a traced one"):
            transform(function)(batched(jnp.asarray(x)))
    with pytest.raises(ScaleArtifactError, match="never observed"):
        watched.shard()


def test_concrete_values_within_jit_are_refused_too():
    watched = calibrator({3: "a"})
    watched.arm()
    arrays = values(0)

    @jax.jit
    def step(x):
        watched.observe(3, *arrays)
        return x

    with contextlib.suppress(TypeError):
        step(1.0)
    # Whatever JAX made of it, nothing traced was kept.
    watched.observe(3, *arrays)
    np.testing.assert_array_equal(amax_of(watched.shard(), 3), maxima(arrays))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda q, k, v: (q[0], k, v), ValueError, "q: expected shape [T, 3, 192], got"),
        (lambda q, k, v: (q[:, :2], k, v), ValueError, "q: expected shape [T, 3, 192] to match"),
        (lambda q, k, v: (q, v, v), ValueError, "k: expected shape [T, 3, 192] to match"),
        (lambda q, k, v: (q, k, k), ValueError, "v: expected shape [T, 3, 128] to match"),
        (lambda q, k, v: (q, k, v.astype(jnp.float16)), TypeError, "v: expected dtype bfloat16 or"),
        (lambda q, k, v: (q, k, v.astype(int)), TypeError, "v: expected dtype bfloat16 or"),
        (lambda q, k, v: (q, k, [1.0]), TypeError, "v: expected a JAX or NumPy array"),
        (lambda q, k, v: (q, k, None), TypeError, "v: expected a JAX or NumPy array"),
    ],
)
@pytest.mark.parametrize("armed", [False, True])
def test_arguments_that_cannot_be(change, error, message, armed):
    watched = calibrator({3: "a"})
    if armed:
        watched.arm()
    with pytest.raises(error) as caught:
        watched.observe(3, *change(*values(0)))
    assert str(caught.value).startswith(message)


def test_more_arguments_that_cannot_be():
    watched = calibrator({3: "a"})
    arrays = values(0)
    rows = maxima(arrays)
    with pytest.raises(ValueError, match=r"layer: expected .* one of 3, got 4"):
        watched.observe(4, *arrays)
    with pytest.raises(ValueError, match=r"layer: expected .* one of 3, got 4"):
        watched.observe_amax(4, *rows)
    for count in (-1, 10):
        with pytest.raises(ValueError, match=f"num_tokens: expected .* got {count} for 9, 9 and 9"):
            watched.observe(3, *arrays, num_tokens=count)
    with pytest.raises(ValueError, match=r"k_amax: expected shape \[3\] to match"):
        watched.observe_amax(3, rows[0], rows[1][:2], rows[2])
    with pytest.raises(TypeError, match="k_amax: expected dtype float32"):
        watched.observe_amax(3, rows[0], rows[1].astype(np.float64), rows[2])


@pytest.mark.parametrize("layer", [[3], 3.0, "3", True, None, (3, 7)])
def test_what_is_no_integer_is_no_layer(layer):
    watched = calibrator({1: "a", 3: "b"})
    arrays = values(0)
    with pytest.raises(TypeError, match="layer: expected an integer, got"):
        watched.observe(layer, *arrays)
    with pytest.raises(TypeError, match="layer: expected an integer, got"):
        watched.observe_amax(layer, *maxima(arrays))


@pytest.mark.parametrize("count", ["3", 3.0, True, [3], np.float32(3), np.array(3)])
def test_what_is_no_integer_is_no_number_of_tokens(count):
    with pytest.raises(TypeError, match="num_tokens: expected an integer, got"):
        calibrator({3: "a"}).observe(3, *values(0), num_tokens=count)


def test_numpy_integers_are_integers():
    watched = calibrator({np.int64(3): "a"}, tp_rank=np.int32(1))
    watched.arm()
    arrays = values(0)
    watched.observe(np.int64(3), *arrays, num_tokens=np.int32(4))
    np.testing.assert_array_equal(amax_of(watched.shard(), 3), maxima([x[:4] for x in arrays]))
    watched.observe_amax(np.uint8(3), *(2 * maxima(arrays)))
    assert watched.shard().file_name == "fp8-scales-pp00-tp01.json"
    np.testing.assert_array_equal(amax_of(watched.shard(), 3), 2 * maxima(arrays))


def test_slices_have_no_maxima():
    rows = maxima(values(0))
    with pytest.raises(TypeError, match=r"k_amax: expected a JAX .* shape \[H\], got HeadSlice"):
        calibrator({3: "a"}).observe_amax(3, rows[0], HeadSlice(rows[1], 0, 3), rows[2])


def test_a_constructor_that_is_refused(tmp_path):
    with pytest.raises(TypeError, match="identity: expected an Identity, got dict"):
        Calibrator({}, tp_rank=0, pp_rank=0, layers={})
    with pytest.raises(ValueError, match="tp_rank: expected an integer from 0 to 1, got 2"):
        calibrator(tp_rank=2)
    with pytest.raises(ValueError, match="layers: expected a layer index"):
        calibrator({-1: "a"})
    for name in ("", 5, ["a"]):
        with pytest.raises(ValueError, match="runtime_name: expected"):
            calibrator({1: name})
    with pytest.raises(TypeError, match="layers: expected runtime names by layer index, got list"):
        calibrator([3])
    with pytest.raises(ValueError, match="layers: expected distinct runtime names, got 'a' twice"):
        calibrator({1: "a", 2: "a"})
    with pytest.raises(TypeError, match="directory: expected a path, got int"):
        calibrator(directory=5)
    with pytest.raises(TypeError, match="directory: expected a path, got int"):
        calibrator({}).save(5)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        calibrator(directory=tmp_path / "file")
    with pytest.raises(ValueError, match="directory: expected a folder"):
        calibrator().__enter__()


def test_a_directory_that_cannot_be_written_is_noticed_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # a superuser may write anywhere
    with pytest.raises(PermissionError, match="cannot write shards here"):
        calibrator(directory=tmp_path)


def test_observing_waits_for_nothing_and_reads_nothing_back():
    watched = calibrator({3: "a"})
    watched.arm()
    arrays = values(0)
    watched.observe(3, *arrays)
    with jax.transfer_guard_device_to_host("disallow"):
        watched.observe(3, *arrays)
        watched.observe(3, *arrays, num_tokens=4)
    assert all(isinstance(seen, jax.Array) for seen in watched._maxima.values())


def test_it_compiles_once_a_shape(caplog):
    watched = calibrator()
    watched.arm()
    arrays = values(0, tokens=17)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for step in range(6):
            watched.observe(LAYERS[step % 2], *arrays, num_tokens=step + 1)
    compiled = [r for r in caplog.records if "Finished XLA compilation" in r.getMessage()]
    assert len([r for r in compiled if "_max_with_values" in r.getMessage()]) <= 1


def test_many_threads():
    watched = calibrator({3: "a"})
    watched.arm()
    per_thread = [[values(10 * t + i) for i in range(4)] for t in range(4)]
    threads = [
        threading.Thread(target=lambda many=many: [watched.observe(3, *a) for a in many])
        for many in per_thread
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = np.max([maxima(a) for many in per_thread for a in many], axis=0)
    np.testing.assert_array_equal(amax_of(watched.shard(), 3), expected)


# As a context manager.


def test_it_saves_at_the_end_of_the_block(tmp_path):
    with calibrator(directory=tmp_path / "new") as watched:
        watched.arm()
        for layer in LAYERS:
            watched.observe(layer, *values(layer))
        assert os.listdir(tmp_path / "new") == []
    shard = RankShard.read(tmp_path / "new" / "fp8-scales-pp00-tp00.json")
    np.testing.assert_array_equal(amax_of(shard, 7), maxima(values(7)))


def test_an_error_while_saving_comes_after_the_clean_up(tmp_path):
    events = []
    with pytest.raises(ScaleArtifactError, match="never observed") as caught:
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(events.append, "outer clean-up")
                watched = stack.enter_context(calibrator(directory=tmp_path))
                stack.callback(events.append, "inner clean-up")
                watched.arm()
        finally:
            events.append("finally")
    assert events == ["inner clean-up", "outer clean-up", "finally"]
    assert caught.value.__context__ is None
    assert os.listdir(tmp_path) == []


def test_an_error_in_the_block_is_not_hidden(tmp_path):
    with (
        pytest.raises(ZeroDivisionError) as caught,
        calibrator(directory=tmp_path) as watched,
    ):
        watched.arm()
        1 / 0  # noqa: B018
    assert caught.value.__notes__ == [
        "the calibration ended early and was not written: 'calibration': never observed: "
        f"layer 3 ({runtime_name(3)}); layer 7 ({runtime_name(7)})"
    ]


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt(), SystemExit(3)])
def test_what_was_seen_before_an_error_is_kept_and_not_taken_for_complete(tmp_path, error, caplog):
    with pytest.raises(type(error)) as caught, calibrator(directory=tmp_path) as watched:
        watched.arm()
        for layer in LAYERS:
            watched.observe(layer, *values(layer))
        raise error
    assert caught.value is error
    path = tmp_path / "fp8-scales-pp00-tp00.json.incomplete"
    assert os.listdir(tmp_path) == [path.name]
    (note,) = error.__notes__
    assert str(path) in note and note in caplog.text
    np.testing.assert_array_equal(amax_of(RankShard.read(path), 3), maxima(values(3)))
    with pytest.raises(ScaleArtifactError, match="no shards"):
        merge_folder(tmp_path)


def test_an_error_in_the_block_and_one_while_saving(tmp_path):
    folder = tmp_path / "folder"
    with pytest.raises(RuntimeError) as caught, calibrator(directory=folder) as watched:
        watched.arm()
        for layer in LAYERS:
            watched.observe(layer, *values(layer))
        folder.rmdir()
        folder.write_text("in the way")
        raise RuntimeError("the model's own")
    assert str(caught.value) == "the model's own"
    assert "was not written: [Errno 17]" in caught.value.__notes__[0]


@pytest.mark.parametrize("code", [0, None])
def test_a_server_told_to_stop_ends_well(tmp_path, code):
    with pytest.raises(SystemExit), calibrator(directory=tmp_path) as watched:
        watched.arm()
        for layer in LAYERS:
            watched.observe(layer, *values(layer))
        raise SystemExit(code)
    assert os.listdir(tmp_path) == ["fp8-scales-pp00-tp00.json"]


# From calibration to attention.


def test_calibrate_merge_and_load(tmp_path):
    """Two TP ranks and two stages, the second one empty; the ranks' heads come back in order."""
    seen = {}
    for tp_rank in range(2):
        calibrator({}, tp_rank=tp_rank, pp_rank=1).save(tmp_path)
        with calibrator(tp_rank=tp_rank, directory=tmp_path) as watched:
            watched.arm()
            for layer in LAYERS:
                seen[layer, tp_rank] = values(10 * layer + tp_rank)
                watched.observe(layer, *seen[layer, tp_rank])
    artifact = merge_folder(tmp_path)
    for (layer, tp_rank), arrays in seen.items():
        scales = artifact.layer(layer, tp_rank=tp_rank)
        for descale, x in zip(scales, arrays, strict=True):
            expected = jaxfp8.descale_from_amax(
                jaxfp8.per_head_amax(x), jaxfp8.E4M3FNUZ, margin=artifact.identity.margin
            )
            np.testing.assert_array_equal(descale, np.asarray(expected))
    other = dataclasses.replace(artifact.deployment, tp_size=1)
    with pytest.raises(ScaleArtifactError, match="tp_size"):
        artifact.check(other)


def test_static_scales_that_equal_the_dynamic_ones_give_the_same_output(tmp_path):
    q, k, v = values(0, tokens=33)
    watched = calibrator({3: "a"}, tp_size=1, pp_size=1, margin=1.0)
    watched.arm()
    watched.observe(3, q, k, v)
    watched.save(tmp_path)
    scales = merge_folder(tmp_path).layer(3, tp_rank=0)
    cu_seqlens = jnp.array([0, 10, 33], jnp.int32)
    call = dict(causal=True, precision="fp8", backend="xla")
    static = jaxfp8.prefill_attention(q, k, v, cu_seqlens, cu_seqlens, scales=scales, **call)
    dynamic = jaxfp8.prefill_attention(q, k, v, cu_seqlens, cu_seqlens, **call)
    np.testing.assert_array_equal(np.asarray(static.out), np.asarray(dynamic.out))
    np.testing.assert_array_equal(np.asarray(static.lse), np.asarray(dynamic.lse))
    assert float(jnp.abs(static.out.astype(jnp.float32)).max()) > 0.1
