# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Layers from safetensors checkpoints: what is read, what is refused."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxfp8.models import CheckpointError, checkpoint, load_layers, rank_weights
from tests.models.builders import (
    TINY,
    checkpoint_tensors,
    named_tensors,
    save_checkpoint,
    tiny_weights,
)  # fmt: skip

LAYERS = (3, 7)
WEIGHTS = {layer: tiny_weights(layer) for layer in LAYERS}
INDEX = "model.safetensors.index.json"


def assert_same(actual, expected):
    for name, x, y in zip(expected._fields, actual, expected, strict=True):
        assert (x is None) == (y is None), name
        if y is not None:
            assert x.dtype == jnp.bfloat16
            np.testing.assert_array_equal(
                np.asarray(x).view(np.uint16), np.asarray(y).view(np.uint16), err_msg=name
            )


@pytest.mark.parametrize("files", [1, 3])
def test_a_rank_gets_its_heads(tmp_path, files):
    save_checkpoint(tmp_path, WEIGHTS, files=files)
    assert (tmp_path / INDEX).exists() == (files > 1)
    for tp_size in (1, 2, 4):
        for tp_rank in range(tp_size):
            loaded = load_layers(tmp_path, TINY, LAYERS, tp_rank=tp_rank, tp_size=tp_size)
            assert list(loaded) == list(LAYERS)
            for layer in LAYERS:
                assert_same(loaded[layer], rank_weights(WEIGHTS[layer], tp_rank, tp_size))


def test_a_file_by_its_path(tmp_path):
    save_checkpoint(tmp_path, WEIGHTS, files=1)
    (file,) = tmp_path.glob("*.safetensors")
    assert_same(load_layers(file, TINY, [7])[7], WEIGHTS[7])


def test_nothing_but_the_slices_of_the_heads_is_read(tmp_path, monkeypatch):
    """Every byte goes through get_slice: they are counted, and what other ranks have is NaN."""
    poisoned = {}
    for layer, weights in WEIGHTS.items():
        mine = rank_weights(weights, 1, 4)
        tensors = {}
        for name, x in checkpoint_tensors(weights).items():
            if name in ("q_b_proj", "kv_b_proj", "g_proj", "o_proj"):
                parts = np.split(x, 4, axis=1 if name == "o_proj" else 0)
                parts = [np.full_like(part, np.nan) for part in parts]
                own = checkpoint_tensors(mine)[name]
                x = np.concatenate([parts[0], own, *parts[2:]], axis=1 if name == "o_proj" else 0)
            tensors[name] = x
        poisoned |= named_tensors(layer, tensors)
    # A layer that is not asked for, and what is no attention.
    poisoned["model.layers.4.self_attn.q_a_proj.weight"] = np.ones((2, 2), np.float32)
    poisoned["model.layers.3.mlp.gate_proj.weight"] = np.ones((5, 5), np.float32)
    save_file(poisoned, tmp_path / "model.safetensors")

    read = []

    class Slice:
        def __init__(self, name, inner):
            self.name, self.inner = name, inner
            self.get_shape, self.get_dtype = inner.get_shape, inner.get_dtype

        def __getitem__(self, key):
            part = self.inner[key]
            read.append((self.name, part.size))
            return part

    class File:
        def __init__(self, inner):
            self.keys = inner.keys
            self.get_slice = lambda name: Slice(name, inner.get_slice(name))

    real = checkpoint.safe_open

    class Recorder:
        def __init__(self, path, framework):
            self.inner = real(path, framework=framework)

        def __enter__(self):
            return File(self.inner.__enter__())

        def __exit__(self, *error):
            return self.inner.__exit__(*error)

    monkeypatch.setattr(checkpoint, "safe_open", Recorder)
    loaded = load_layers(tmp_path, TINY, [7], tp_rank=1, tp_size=4)
    assert_same(loaded[7], rank_weights(WEIGHTS[7], 1, 4))
    assert all(name.startswith("model.layers.7.") for name, _ in read)
    assert sum(size for _, size in read) == sum(x.size for x in loaded[7] if x is not None)
    assert len(read) == 8


def test_everything_wrong_is_in_one_error(tmp_path, monkeypatch):
    tensors = {}
    for layer, weights in WEIGHTS.items():
        tensors |= named_tensors(layer, checkpoint_tensors(weights))
    del tensors["model.layers.3.self_attn.o_proj.weight"]
    tensors["model.layers.3.self_attn.q_proj.weight"] = np.ones((3, 3), ml_dtypes.bfloat16)
    norm = "model.layers.3.self_attn.q_a_layernorm.weight"
    tensors[norm] = tensors[norm].astype(np.float32)
    kv_b = "model.layers.7.self_attn.kv_b_proj.weight"
    tensors[kv_b] = tensors[kv_b].T.copy()
    save_file(tensors, tmp_path / "model.safetensors")
    monkeypatch.setattr(checkpoint._Tensors, "slice_of", no_values(checkpoint._Tensors.slice_of))
    with pytest.raises(CheckpointError) as caught:
        load_layers(tmp_path, TINY, LAYERS)
    assert caught.value.problems == (
        "missing: model.layers.3.self_attn.o_proj.weight",
        "not part of the layer: model.layers.3.self_attn.q_proj.weight",
        f"{norm}: expected dtype BF16, got F32",
        f"{kv_b}: expected shape [1024, 64], got [64, 1024]",
    )
    assert str(caught.value).startswith(f"'{tmp_path}': 4 problems: missing: ")
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems


def no_values(slice_of):
    """slice_of, of slices that can be looked at but not read."""

    class Header:
        def __init__(self, inner):
            self.get_shape, self.get_dtype = inner.get_shape, inner.get_dtype

    return lambda self, name: Header(slice_of(self, name))


def test_without_an_output_gate(tmp_path):
    config = dataclasses.replace(TINY, output_gate=False)
    weights = tiny_weights(5, config)
    save_checkpoint(tmp_path, {3: weights})
    assert_same(load_layers(tmp_path, config, [3])[3], weights)
    with pytest.raises(CheckpointError, match=r"missing: model.layers.3.self_attn.g_proj.weight"):
        load_layers(tmp_path, TINY, [3])


def test_files_that_do_not_hold_what_the_index_says(tmp_path):
    save_checkpoint(tmp_path, WEIGHTS, files=3)
    index = json.loads((tmp_path / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    names = {
        file: [name for name, its in index["weight_map"].items() if its == file] for file in files
    }
    (tmp_path / files[0]).unlink()
    (tmp_path / files[1]).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    moved = names[files[0]][0]
    index["weight_map"][moved] = files[2]
    outside = names[files[2]][0]
    index["weight_map"][outside] = "../elsewhere.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        load_layers(tmp_path, TINY, LAYERS)
    problems = "\n".join(caught.value.problems)
    # What is in files that cannot be read is not said to be missing too.
    assert len(caught.value.problems) == 4
    for expected in (
        f"{files[0]}: cannot be read: ",
        f"{files[1]}: cannot be read: ",
        f"{moved}: not in {files[2]}, where {INDEX} has it",
        f"{INDEX}: expected file names, got '../elsewhere.safetensors'",
    ):
        assert expected in problems


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}'])
def test_an_index_that_is_none(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=INDEX):
        load_layers(tmp_path, TINY, [3])


def test_no_checkpoint_at_all(tmp_path):
    with pytest.raises(CheckpointError, match=r"expected model.safetensors.index.json or"):
        load_layers(tmp_path, TINY, [3])
    with pytest.raises(CheckpointError, match=r"cannot be read"):
        load_layers(tmp_path / "missing", TINY, [3])


def test_a_file_that_is_cut_short_is_one_problem(tmp_path):
    save_checkpoint(tmp_path, WEIGHTS)
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:1000])
    for path in (tmp_path, file):
        with pytest.raises(CheckpointError) as caught:
            load_layers(path, TINY, LAYERS)
        assert len(caught.value.problems) == 1
        assert "model.safetensors: cannot be read: " in str(caught.value)


@pytest.mark.parametrize(
    "value", [["a"], None, 7, "", ".", "..", "a/b", "a\0b", "\ud800", "/etc/a"]
)
def test_an_index_with_values_that_are_no_files(tmp_path, value):
    names = [*named_tensors(3, checkpoint_tensors(WEIGHTS[3]))]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, value)}))
    with pytest.raises(CheckpointError) as caught:
        load_layers(tmp_path, TINY, [3])
    assert caught.value.problems == (f"{INDEX}: expected file names, got {value!r}",)


def test_a_prefix_and_layers_that_are_read_once(tmp_path):
    """As in a checkpoint of a multimodal model, where a vision tower has layers too."""
    tensors = {}
    for layer, weights in WEIGHTS.items():
        for name, x in named_tensors(layer, checkpoint_tensors(weights)).items():
            tensors[f"language_model.{name}"] = x
            tensors[f"vision_tower.{name}"] = np.ones(3, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = load_layers(
        tmp_path, TINY, (layer for layer in LAYERS), prefix="language_model.model.layers"
    )
    assert list(loaded) == list(LAYERS)
    for layer in LAYERS:
        assert_same(loaded[layer], WEIGHTS[layer])
    with pytest.raises(CheckpointError, match=r"missing: model.layers.3.self_attn.g_proj"):
        load_layers(tmp_path, TINY, [3])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"layers": "3"}, TypeError, "layers: expected layer indices, got str"),
        ({"layers": 3}, TypeError, "layers: expected layer indices, got int"),
        ({"layers": ["3"]}, TypeError, "layers: expected an integer, got str"),
        ({"layers": [True]}, TypeError, "layers: expected an integer, got bool"),
        ({"layers": [-1]}, ValueError, "layers: expected an integer >= 0, got -1"),
        ({"layers": []}, ValueError, "layers: expected at least one layer index, got none"),
        ({"layers": [3, 7, 3]}, ValueError, "layers: expected distinct layer indices, got 3, 7, 3"),
        ({"tp_rank": "0"}, TypeError, "tp_rank: expected an integer, got str"),
        ({"tp_rank": 0.5}, TypeError, "tp_rank: expected an integer, got float"),
        ({"tp_rank": True}, TypeError, "tp_rank: expected an integer, got bool"),
        ({"path": None}, TypeError, "path: expected a path, got NoneType"),
        (
            {"device": "cpu"},
            TypeError,
            "device: expected a jax.Device, a Sharding or None, got str",
        ),
        ({"config": {}}, TypeError, "config: expected an MlaConfig, got dict"),
        ({"prefix": None}, TypeError, "prefix: expected the name before a layer's index, got"),
        ({"prefix": ""}, ValueError, "prefix: expected a name such as 'model.layers'"),
        ({"prefix": "model.layers."}, ValueError, "without a dot at its end, got 'model.layers.'"),
    ],
)
def test_arguments_that_cannot_be(tmp_path, change, error, message):
    given = {"path": tmp_path, "config": TINY, "layers": [3], **change}
    with pytest.raises(error, match=re.escape(message)):
        load_layers(given.pop("path"), given.pop("config"), given.pop("layers"), **given)


def test_a_tensor_in_two_files(tmp_path):
    save_checkpoint(tmp_path, WEIGHTS, files=1)
    save_file(named_tensors(3, {"o_proj": np.ones((2, 2), np.float32)}), tmp_path / "z.safetensors")
    with pytest.raises(CheckpointError, match=r"o_proj.weight: in model.safetensors and in z\."):
        load_layers(tmp_path, TINY, LAYERS)


def test_ranks_that_cannot_be(tmp_path):
    with pytest.raises(ValueError, match=r"tp_size: expected a divisor of the 4 heads .* got 3"):
        load_layers(tmp_path, TINY, [3], tp_size=3)
    with pytest.raises(ValueError, match=r"tp_rank: expected 0 to 1, got 2"):
        load_layers(tmp_path, TINY, [3], tp_rank=2, tp_size=2)
