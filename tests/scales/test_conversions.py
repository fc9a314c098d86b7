# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Retargeting, exporting and comparing artifacts."""

import dataclasses

import numpy as np
import pytest
import safetensors.numpy
from safetensors import safe_open

from jaxfp8.formats import E4M3FN, E4M3FNUZ, FORMATS
from jaxfp8.scales import (
    ScaleArtifact,
    ScaleArtifactError,
    convention_factor,
    diff,
    export,
    export_tensors,
    retarget,
)
from tests.scales import builders
from tests.scales.builders import LAYERS, runtime_name, schema_1


@pytest.fixture
def artifact() -> ScaleArtifact:
    return builders.artifact()


@pytest.mark.parametrize("tp_size", [1, 2, 3, 6])
@pytest.mark.parametrize("schema", ["1", "2"])
def test_retarget_keeps_every_head(artifact, tp_size, schema):
    if schema == "1":
        artifact = ScaleArtifact.from_bytes(schema_1(artifact.to_bytes()))
    other = ScaleArtifact.from_bytes(retarget(artifact, tp_size=tp_size).to_bytes())
    assert other.schema == schema
    heads = 6 // tp_size
    assert other.identity == dataclasses.replace(
        artifact.identity, tp_size=tp_size, local_heads=heads
    )
    for index in LAYERS:
        parts = [other.layer(index, tp_rank=rank) for rank in range(tp_size)]
        for whole, *split in zip(artifact.layer(index), *parts, strict=True):
            np.testing.assert_array_equal(np.concatenate(split), whole)


def test_retarget_is_recorded(artifact):
    assert artifact.calibration_tp_size is None
    other = retarget(artifact, tp_size=6, pp_size=1)
    header, _ = builders.split(other.to_bytes())
    metadata = header["__metadata__"]
    assert metadata["calibration_tp_size"] == metadata["calibration_pp_size"] == "2"
    assert metadata["tp_size"] == "6" and metadata["local_heads"] == "1"
    assert metadata["calibration_shards"] == "4"
    again = retarget(other, tp_size=1)
    assert (again.calibration_tp_size, again.calibration_pp_size) == (2, 2)
    back = retarget(again, tp_size=2, pp_size=2)
    assert back.to_bytes() == artifact.to_bytes()


def test_an_artifact_does_not_fit_another_topology_by_itself(artifact):
    wanted = dataclasses.replace(artifact.deployment, tp_size=1, local_heads=6)
    with pytest.raises(ScaleArtifactError, match="tp_size: expected 1, got 2; local_heads"):
        artifact.check(wanted)
    retarget(artifact, tp_size=1).check(wanted)


@pytest.mark.parametrize("tp_size", [0, -1, 4, 5, 12, 2.0, "2", True])
def test_retarget_to_what_does_not_divide(artifact, tp_size):
    with pytest.raises(ValueError, match="tp_size: expected a divisor of the 6 heads"):
        retarget(artifact, tp_size=tp_size)


def test_the_same_bits_mean_twice_the_value():
    # All bit patterns that are numbers in both, sign and zero included.
    bits = np.array([b for b in range(256) if b & 0x7F != 0x7F and b != 0x80], np.uint8)
    fn = bits.view(E4M3FN.dtype).astype(np.float32)
    fnuz = bits.view(E4M3FNUZ.dtype).astype(np.float32)
    np.testing.assert_array_equal(fn, 2 * fnuz)
    np.testing.assert_array_equal(fn * convention_factor(E4M3FNUZ, E4M3FN), fnuz)
    np.testing.assert_array_equal(fnuz * convention_factor(E4M3FN, E4M3FNUZ), fn)
    assert convention_factor(E4M3FN, E4M3FN) == 1


@pytest.mark.parametrize("source", FORMATS.values(), ids=str)
@pytest.mark.parametrize("convention", [None, *FORMATS.values()], ids=str)
@pytest.mark.parametrize("per_tensor", [False, True])
def test_export(tmp_path, source, convention, per_tensor):
    made = builders.artifact(fp8_dtype=source.name)
    path = tmp_path / "scales.safetensors"
    export(made, path, convention=convention, per_tensor=per_tensor)
    tensors = safetensors.numpy.load_file(path)
    target = convention or source
    factor = {("float8_e4m3fnuz", "float8_e4m3fn"): 0.5, ("float8_e4m3fn", "float8_e4m3fnuz"): 2.0}
    scale_by = np.float32(factor.get((source.name, target.name), 1.0))
    assert len(tensors) == 6
    for row, index in enumerate(LAYERS):
        for column, qkv in enumerate("qkv"):
            scale = tensors[f"{runtime_name(index)}.{qkv}_scale"]
            expected = made.descale[row, column] * scale_by
            if per_tensor:
                expected = expected.max(keepdims=True)
                assert scale.shape == (1,)
            np.testing.assert_array_equal(scale, expected)
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    assert metadata["scale_convention"] == target.name
    assert metadata["calibrated_for"] == source.name
    assert metadata["granularity"] == ("tensor" if per_tensor else "head")
    assert metadata["revision"] == made.identity.revision
    assert metadata["format"] == "pt"


@pytest.mark.parametrize("source", FORMATS.values(), ids=str)
def test_bits_read_with_the_exported_scale_are_the_value(source):
    """Quantized by the artifact, read in the other convention: the values come back."""
    made = builders.artifact(fp8_dtype=source.name)
    target = E4M3FN if source is E4M3FNUZ else E4M3FNUZ
    tensors, _ = export_tensors(made, convention=target)
    rng = np.random.default_rng(0)
    # Up to 0.9 of the range: the last code of e4m3fnuz is the NaN of e4m3fn.
    values = rng.uniform(-0.9, 0.9, 1000).astype(np.float32) * made.amax[0, 1, 2]
    stored = (values / made.descale[0, 1, 2]).astype(source.dtype)
    native = stored.astype(np.float32) * made.descale[0, 1, 2]
    there = stored.view(target.dtype).astype(np.float32)
    exported = there * tensors[f"{runtime_name(3)}.k_scale"][2]
    same = (stored.view(np.uint8) & 0x7F) != 0  # 0x80 is a NaN of e4m3fnuz
    np.testing.assert_array_equal(exported[same], native[same])
    np.testing.assert_allclose(native, values, rtol=0.07, atol=0.01)


def test_a_scale_per_tensor_clips_no_head(artifact):
    tensors, _ = export_tensors(artifact, per_tensor=True)
    for row, index in enumerate(LAYERS):
        scale = tensors[f"{runtime_name(index)}.v_scale"]
        assert (artifact.amax[row, 2] <= scale * artifact.fmt.max).all()


def test_names_of_an_export(artifact):
    old = ScaleArtifact.from_bytes(schema_1(artifact.to_bytes()))
    with pytest.raises(ValueError, match="name_template: the artifact has no runtime names"):
        export_tensors(old)
    tensors, _ = export_tensors(old, name_template="model.layers.{layer}.self_attn")
    assert "model.layers.7.self_attn.q_scale" in tensors
    with pytest.raises(ValueError, match=r"name_template: expected '{layer}' in it"):
        export_tensors(old, name_template="model.layers.0")


def changed(artifact: ScaleArtifact, row: int, column: int, head: int, factor: float):
    amax = artifact.amax.copy()
    descale = artifact.descale.copy()
    amax[row, column, head] *= factor
    descale[row, column, head] *= factor
    return dataclasses.replace(artifact, amax=amax, descale=descale)


def test_diff_of_equals(artifact):
    result = diff(artifact, artifact)
    assert result.largest == 1
    assert (result.fields, result.only_a, result.only_b) == ((), (), ())
    assert [layer.layer for layer in result.layers] == list(LAYERS)


@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_diff_finds_the_head_that_moved(artifact, factor):
    other = changed(changed(artifact, 1, 2, 4, factor), 1, 2, 1, 1.5)
    result = diff(artifact, other)
    still, moved = result.layers
    assert still.largest == 1
    assert (moved.layer, moved.v_head) == (7, 4)
    assert moved.v == pytest.approx(factor) and moved.q == moved.k == 1
    assert result.largest == moved.largest == pytest.approx(4)
    assert diff(other, artifact).layers[1].v == pytest.approx(1 / factor)


def test_diff_of_other_fields_and_layers(artifact):
    other = builders.artifact(calibration_id="later", margin=2.25, fp8_dtype="float8_e4m3fn")
    result = diff(artifact, other)
    assert result.fields == (
        "calibration_id: 'books-2026-01' and 'later'",
        "fp8_dtype: 'float8_e4m3fnuz' and 'float8_e4m3fn'",
        "margin: 1.125 and 2.25",
    )
    assert result.largest == pytest.approx(2, rel=1e-6)  # the range doubled with the margin
    shards = [builders.shard(pp, tp, layers=(7, 11) if pp == 0 else ())
              for pp in range(2) for tp in range(2)]  # fmt: skip
    result = diff(artifact, builders.merge_shards(shards))
    assert (result.only_a, result.only_b) == ((3,), (11,))
    assert [layer.layer for layer in result.layers] == [7]


def test_diff_across_topologies(artifact):
    assert diff(artifact, retarget(artifact, tp_size=6)).largest == 1
    with pytest.raises(ValueError, match="heads: expected as many in both, got 6 and 9"):
        diff(artifact, builders.artifact(tp_size=3))


def test_diff_of_extremes(artifact):
    result = diff(artifact, changed(artifact, 0, 0, 0, 1e36))
    assert result.largest == pytest.approx(1e36)
