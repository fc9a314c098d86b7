# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from safetensors import safe_open

from jaxfp8.formats import FORMATS
from jaxfp8.scales import (
    Deployment,
    LayerScales,
    ScaleArtifact,
    ScaleArtifactError,
    merge_folder,
    merge_shards,
)
from tests.scales import builders
from tests.scales.builders import HEADS, LAYERS, TP, edit_metadata, edit_tensors

# Resolved: Bazel makes links of the files, and those are refused.
GOLDEN = Path(__file__).resolve().parent / "golden"


def expected_descale(margin: float, fp8_max: float) -> np.ndarray:
    amax = [[[builders.amax(i, c, h) for h in range(TP * HEADS)] for c in range(3)] for i in LAYERS]
    return np.array(amax, np.float32) * np.float32(margin) / np.float32(fp8_max)


def refused(data: bytes, deployment: Deployment | None = None) -> tuple[str, ...]:
    with pytest.raises(ScaleArtifactError) as caught:
        artifact = ScaleArtifact.from_bytes(data)
        if deployment:
            artifact.check(deployment)
    assert "\n" not in str(caught.value)
    return caught.value.problems


@pytest.fixture
def artifact() -> ScaleArtifact:
    return builders.artifact()


@pytest.fixture
def data(artifact) -> bytes:
    return artifact.to_bytes()


@pytest.mark.parametrize("fp8_dtype", FORMATS)
@pytest.mark.parametrize("margin", [1, 1.0, 1.1, 1e6])
def test_round_trip(tmp_path, fp8_dtype, margin):
    made = builders.artifact(fp8_dtype=fp8_dtype, margin=margin)
    path = tmp_path / "scales.safetensors"
    made.save(path)
    read = ScaleArtifact.load(path, made.deployment)
    assert read.identity == made.identity
    assert read.layers == LAYERS and read.schema == "2"
    np.testing.assert_array_equal(read.descale, made.descale)
    np.testing.assert_array_equal(read.amax, made.amax)
    np.testing.assert_array_equal(read.descale, expected_descale(margin, FORMATS[fp8_dtype].max))
    assert read.to_bytes() == made.to_bytes() == path.read_bytes()


def test_the_plain_library_reads_it(tmp_path, artifact):
    path = tmp_path / "scales.safetensors"
    artifact.save(path)
    tensors = safetensors.numpy.load_file(path)
    assert set(tensors) == {
        f"layers.{i}.{qkv}_{kind}" for i in LAYERS for qkv in "qkv" for kind in ("descale", "amax")
    }
    for row, index in enumerate(LAYERS):
        for column, qkv in enumerate("qkv"):
            descale = tensors[f"layers.{index}.{qkv}_descale"]
            assert descale.dtype == np.float32 and descale.shape == (TP * HEADS,)
            np.testing.assert_array_equal(descale, artifact.descale[row, column])
            np.testing.assert_array_equal(
                tensors[f"layers.{index}.{qkv}_amax"], artifact.amax[row, column]
            )
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    assert (
        metadata.items()
        >= {
            "schema": "2",
            "layers": "3,7",
            "num_layers": "2",
            "calibration_shards": "4",
            "tp_size": "2",
            "margin": "1.125",
            "fp8_dtype": "float8_e4m3fnuz",
            "content_sha256": artifact.content_sha256,
        }.items()
    )
    assert float(metadata["fp8_max"]) == 240
    assert metadata["created_by"].startswith("jaxfp8 ")


@pytest.mark.parametrize("schema", ["1", "2"])
def test_golden_files(schema):
    made = builders.artifact()
    path = GOLDEN / f"schema{schema}.safetensors"
    read = ScaleArtifact.load(path, made.deployment)
    assert read.schema == schema and read.identity == made.identity
    np.testing.assert_array_equal(read.descale, made.descale)
    plain = safetensors.numpy.load_file(path)
    for row, index in enumerate(LAYERS):
        np.testing.assert_array_equal(plain[f"layers.{index}.k_descale"], read.descale[row, 1])
    if schema == "2":
        np.testing.assert_array_equal(read.amax, made.amax)
    else:
        assert read.amax is None
    assert ScaleArtifact.from_bytes(read.to_bytes()).schema == schema


def test_golden_shards_merge():
    assert merge_folder(GOLDEN).to_bytes() == builders.artifact().to_bytes()


def test_the_order_of_tensors_and_metadata_means_nothing(data):
    header, payload = builders.split(data)
    metadata = header.pop("__metadata__")
    names = sorted(header, reverse=True)
    moved, offset, parts = {}, 0, []
    for name in names:
        start, stop = header[name]["data_offsets"]
        parts.append(payload[start:stop])
        moved[name] = header[name] | {"data_offsets": [offset, offset + stop - start]}
        offset += stop - start
    moved["__metadata__"] = dict(reversed(metadata.items()))
    read = ScaleArtifact.from_bytes(builders.join(moved, b"".join(parts)))
    assert read.to_bytes() == data


def test_layer_is_the_slice_of_a_rank(artifact):
    for row, index in enumerate(LAYERS):
        whole = artifact.layer(index)
        assert isinstance(whole, LayerScales)
        for rank in range(TP):
            scales = artifact.layer(index, tp_rank=rank)
            for column, (part, name) in enumerate(zip(scales, "qkv", strict=True)):
                assert part.shape == (HEADS,) and part.dtype == np.float32
                assert part.flags.c_contiguous
                rows = slice(rank * HEADS, (rank + 1) * HEADS)
                np.testing.assert_array_equal(part, artifact.descale[row, column, rows])
                np.testing.assert_array_equal(part, getattr(whole, name)[rows])


@pytest.mark.parametrize("index", [0, 4, -3, 100])
def test_layer_that_is_not_there(artifact, index):
    with pytest.raises(ValueError, match=rf"index: expected .* 3, 7, got {index}"):
        artifact.layer(index, tp_rank=0)


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_that_is_not_there(artifact, rank):
    with pytest.raises(ValueError, match=rf"tp_rank: expected 0 to 1, got {rank}"):
        artifact.layer(3, tp_rank=rank)


def test_its_arrays_cannot_be_changed(artifact):
    for array in (artifact.descale, artifact.amax, artifact.layer(3, tp_rank=0).q):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        artifact.layers = (1,)


def test_a_tiny_head_gets_the_least_descale():
    shards = builders.shards(pp_size=1)
    small = dataclasses.replace(shards[0].layers[3], k=[1e-30, 1.0, 2.0])
    shards[0] = dataclasses.replace(shards[0], layers={**shards[0].layers, 3: small})
    artifact = merge_shards(shards)
    assert artifact.layer(3).k[0] == np.float32(1e-12)
    assert ScaleArtifact.from_bytes(artifact.to_bytes()).layer(3).k[0] == np.float32(1e-12)


MISMATCHES = {
    "model": ("other/model", "model: expected 'other/model', got 'moonshotai/Kimi-K3'"),
    "revision": ("0123456", "revision: expected '0123456', got '0123456789abcdef"),
    "checkpoint_id": ("sha256:00", "checkpoint_id: expected 'sha256:00', got 'sha256:5a"),
    "tp_size": (4, "tp_size: expected 4, got 2"),
    "pp_size": (1, "pp_size: expected 1, got 2"),
    "cache_mode": ("fp8_cache", "cache_mode: expected 'fp8_cache', got 'bf16_latent_cache'"),
    "fp8_dtype": ("float8_e4m3fn", "fp8_dtype: expected 'float8_e4m3fn', got 'float8_e4m3fnuz'"),
    "local_heads": (12, "local_heads: expected 12, got 3"),
    "qk_head_dim": (128, "qk_head_dim: expected 128, got 192"),
    "v_head_dim": (192, "v_head_dim: expected 192, got 128"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_mismatch_with_the_deployment(tmp_path, artifact, name):
    value, message = MISMATCHES[name]
    path = tmp_path / "scales.safetensors"
    artifact.save(path)
    deployment = dataclasses.replace(artifact.deployment, **{name: value})
    with pytest.raises(ScaleArtifactError) as caught:
        ScaleArtifact.load(path, deployment)
    (problem,) = caught.value.problems
    assert problem.startswith(message)
    assert str(path) in str(caught.value)
    assert artifact.mismatches(deployment) == [problem]


def test_layer_coverage_in_both_directions(artifact):
    deployment = dataclasses.replace(artifact.deployment, layers=(11, 7, 12))
    assert artifact.mismatches(deployment) == [
        "layers: no scales for 11, 12, which the deployment has",
        "layers: scales for 3, which the deployment lacks",
    ]


def test_all_mismatches_are_in_one_error(tmp_path, artifact):
    changes = {name: value for name, (value, _) in MISMATCHES.items()}
    deployment = dataclasses.replace(artifact.deployment, **changes, layers=(3, 11))
    path = tmp_path / "scales.safetensors"
    broken = edit_tensors(artifact.to_bytes(), rehash=False, layers__3__q_descale=None)
    path.write_bytes(edit_metadata(broken, num_layers="9", schema="7", margin=None))
    with pytest.raises(ScaleArtifactError) as caught:
        ScaleArtifact.load(path, deployment)
    text = str(caught.value)
    for name, (_, message) in MISMATCHES.items():
        assert message in text, name
    for message in ("no scales for 11", "scales for 7", "schema: expected 1 or 2, got '7'"):
        assert message in text
    assert "metadata missing: margin" in text
    path.write_bytes(edit_metadata(broken, num_layers="9"))
    with pytest.raises(ScaleArtifactError) as caught:
        ScaleArtifact.load(path, deployment)
    for part in ("num_layers", "content_sha256", "tensors missing: layers.3.q_descale", "tp_size"):
        assert part in str(caught.value)


def test_some_fields_can_be_compared(artifact, data):
    assert artifact.differences({"tp_size": 2, "layers": (3, 7)}) == []
    assert artifact.differences({"tp_size": 4}) == ["tp_size: expected 4, got 2"]
    ScaleArtifact.from_bytes(data, expected={"tp_size": 2})
    with pytest.raises(ScaleArtifactError, match="tp_size: expected 4, got 2"):
        ScaleArtifact.from_bytes(data, expected={"tp_size": 4})
    for call in (artifact.differences, lambda e: ScaleArtifact.from_bytes(data, expected=e)):
        with pytest.raises(ValueError, match="expected fields of Deployment, got tp"):
            call({"tp": 4})


def test_load_wants_a_deployment(tmp_path, artifact):
    artifact.save(tmp_path / "x")
    with pytest.raises(TypeError, match="deployment: expected a Deployment, got NoneType"):
        ScaleArtifact.load(tmp_path / "x", None)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model", ""),
        ("model", "a\nb"),
        ("revision", "main"),
        ("revision", "v1.0"),
        ("revision", "012345"),
        ("revision", "0" * 65),
        ("calibration_id", ""),
        ("tp_size", "0"),
        ("tp_size", "-2"),
        ("tp_size", "2.0"),
        ("tp_size", "02"),
        ("tp_size", " 2"),
        ("tp_size", "٢"),
        ("tp_size", "9" * 5000),
        ("local_heads", "eight"),
        ("margin", "0.99"),
        ("margin", "nan"),
        ("margin", "inf"),
        ("margin", "1e999"),
        ("margin", "1_1"),
        ("fp8_dtype", "float8_e5m2"),
        ("layers", "7,3"),
        ("layers", "3,3"),
        ("layers", ""),
        ("layers", "3,7,"),
        ("num_layers", "3"),
        ("calibration_shards", "3"),
        ("fp8_max", "448"),
        ("fp8_max", "nan"),
        ("schema", "3"),
        ("schema", "2.0"),
        ("content_sha256", "00" * 32),
        ("created_by", ""),
        ("calibration_tp_size", "2"),
        ("runtime_names", "{"),
        ("runtime_names", '{"3": "a"}'),
        ("runtime_names", '{"3": "a", "7": "a"}'),
        ("runtime_names", '{"3": "a", "7": 7}'),
        ("runtime_names", '{"3": ["a"], "7": "b"}'),
    ],
)
def test_metadata_that_cannot_be(data, name, text):
    problems = refused(edit_metadata(data, **{name: text}))
    if not name.startswith("calibration_tp"):
        assert any(problem.startswith(f"{name}: ") for problem in problems), problems


REQUIRED = (
    *("schema", "model", "revision", "checkpoint_id", "calibration_id", "tp_size", "pp_size"),
    *("num_layers", "layers", "fp8_dtype", "fp8_max", "cache_mode", "local_heads", "qk_head_dim"),
    *("v_head_dim", "margin", "calibration_shards", "content_sha256", "created_by"),
)


@pytest.mark.parametrize("name", REQUIRED)
def test_metadata_that_is_missing(data, name):
    problems = refused(edit_metadata(data, **{name: None}))
    assert any(name in problem for problem in problems)


@pytest.mark.parametrize(
    "name",
    [n for n in REQUIRED if n not in ("layers", "fp8_max", "content_sha256", "created_by")],
)
def test_metadata_that_is_missing_in_schema_1(data, name):
    old = builders.schema_1(data)
    assert ScaleArtifact.from_bytes(old).schema == "1"
    assert any(name in problem for problem in refused(edit_metadata(old, **{name: None})))


@pytest.mark.parametrize("schema", ["1", "2"])
def test_a_file_without_tensors(data, schema):
    data = data if schema == "2" else builders.schema_1(data)
    header, _ = builders.split(data)
    metadata = {"__metadata__": header["__metadata__"]}
    assert refused(builders.join(metadata, b""))
    other = {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    assert refused(builders.join(metadata | other, b"abcd"))
    far = {"layers.99999.q_descale": other["x"]}
    assert refused(builders.join(metadata | far, b"abcd"))


def test_a_schema_must_be_what_it_says(data):
    assert "tensors not expected: 'layers.3.k_amax'" in str(
        refused(edit_metadata(data, schema="1"))
    )
    old = edit_metadata(builders.schema_1(data), schema="2")
    assert "metadata missing: layers, fp8_max, content_sha256, created_by" in str(refused(old))


@pytest.mark.parametrize(
    ("array", "part"),
    [
        (None, "tensors missing: layers.3.q_descale"),
        (builders.ones(5), "expected to be F32 [6], got layers.3.q_descale (F32 [5])"),
        (builders.ones(0), "layers.3.q_descale (F32 [0])"),
        (builders.ones().reshape(2, 3), "layers.3.q_descale (F32 [2, 3])"),
        (builders.ones().reshape(1, 6), "layers.3.q_descale (F32 [1, 6])"),
        (np.ones(6, np.float64), "layers.3.q_descale (F64 [6])"),
        (np.ones(12, np.float16), "layers.3.q_descale (F16 [12])"),
        (builders.ones() * np.nan, "finite and > 0, and are not: layers.3.q_descale"),
        (builders.ones() * np.inf, "finite and > 0, and are not: layers.3.q_descale"),
        (builders.ones() * 0, "finite and > 0, and are not: layers.3.q_descale"),
        (-builders.ones(), "finite and > 0, and are not: layers.3.q_descale"),
        (builders.ones(), "layers 3: the descales do not follow from the maxima"),
    ],
)
def test_a_tensor_that_cannot_be(data, array, part):
    assert part in "; ".join(refused(edit_tensors(data, layers__3__q_descale=array)))


def test_an_extra_tensor(data):
    broken = edit_tensors(data, layers__11__q_descale=builders.ones())
    assert refused(broken) == ("tensors not expected: 'layers.11.q_descale'",)


def test_a_changed_tensor_fails_the_hash(data):
    changed = edit_tensors(data, rehash=False, layers__3__q_amax=builders.ones())
    assert "content_sha256: expected" in str(refused(changed))


def test_a_margin_that_the_descales_do_not_have(data):
    assert "do not follow from the maxima" in str(refused(edit_metadata(data, margin="1.5")))


def test_a_format_that_the_descales_do_not_have(data):
    changed = edit_metadata(data, fp8_dtype="float8_e4m3fn", fp8_max="448")
    assert "do not follow from the maxima" in str(refused(changed))


def test_schema_1_is_for_one_maximum(data):
    """It does not say which: an artifact of another format must be of schema 2."""
    wrong = edit_metadata(builders.schema_1(data), fp8_dtype="float8_e4m3fn")
    message = "fp8_dtype: expected a format of maximum 240, which schema 1 is for, got float8_e4m"
    assert any(problem.startswith(message) for problem in refused(wrong))
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(builders.artifact(fp8_dtype="float8_e4m3fn"), amax=None)


def test_errors_travel_between_processes():
    error = ScaleArtifactError("file", ["one", "two"])
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.source, copy.problems) == (str(error), "file", ("one", "two"))
    assert str(error) == "'file': 2 problems: one; two"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ""}, "model: expected a non-empty"),
        ({"model": "\ud800"}, "model: expected"),
        ({"revision": "main"}, "revision: expected an immutable revision"),
        ({"calibration_id": ""}, "calibration_id: expected a non-empty"),
        ({"tp_size": 0}, "tp_size: expected an integer"),
        ({"tp_size": True}, "tp_size: expected an integer"),
        ({"tp_size": 2.0}, "tp_size: expected an integer"),
        ({"fp8_dtype": "e4m3"}, "fp8_dtype: expected one of float8_e4m3fnuz, float8_e4m3fn"),
        ({"margin": 0.5}, "margin: expected a finite number of at least 1, got 0.5"),
        ({"margin": float("nan")}, "margin: expected"),
        ({"margin": float("inf")}, "margin: expected"),
        ({"margin": "1.1"}, "margin: expected"),
    ],
)
def test_an_identity_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        builders.identity(**changes)


def test_every_field_of_an_identity_that_is_wrong_is_named():
    with pytest.raises(ValueError, match=r"revision: .*; tp_size: .*; margin: "):
        builders.identity(revision="main", tp_size=-1, margin=0)


@pytest.mark.parametrize("layers", [(), (3, 3), (-1,), ("3",), (70000,)])
def test_a_deployment_with_layers_that_cannot_be(artifact, layers):
    with pytest.raises(ValueError, match="layers: expected distinct layer indices"):
        dataclasses.replace(artifact.deployment, layers=layers)


def test_a_deployment_takes_layers_in_any_order(artifact):
    assert dataclasses.replace(artifact.deployment, layers=[7, 3]) == artifact.deployment
    assert dataclasses.replace(artifact.deployment, layers={3, 7}) == artifact.deployment
    with pytest.raises(TypeError, match="layers: expected layer indices, got int"):
        dataclasses.replace(artifact.deployment, layers=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"descale": np.ones((2, 3, 5), np.float32)}, r"descale: expected shape \(2, 3, 6\)"),
        ({"amax": np.zeros((2, 3, 6), np.float32)}, "amax: expected finite values > 0"),
        ({"layers": (7, 3)}, "layers: expected distinct"),
        ({"runtime_names": ("a",)}, "runtime_names: expected"),
        ({"created_by": None}, "created_by: expected"),
        ({"calibration_tp_size": 8}, "expected both or neither"),
    ],
)
def test_an_artifact_that_cannot_be_is_not_made(artifact, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(artifact, **changes)
