# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from jaxfp8.scales import LayerAmax, RankShard, ScaleArtifactError, merge_folder, merge_shards
from tests.scales import builders
from tests.scales.builders import HEADS, LAYERS

KEYS = {
    *("schema", "model", "revision", "checkpoint_id", "calibration_id", "tp_size", "tp_rank"),
    *("pp_size", "pp_rank", "fp8_dtype", "cache_mode", "local_heads", "qk_head_dim", "v_head_dim"),
    *("margin", "layers"),
}


def document(pp_rank: int = 0, tp_rank: int = 1) -> dict:
    return json.loads(builders.shard(pp_rank, tp_rank).to_json())


def refused(broken: dict) -> str:
    with pytest.raises(ScaleArtifactError) as caught:
        RankShard.from_json(json.dumps(broken))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_round_trip(tmp_path):
    rng = np.random.default_rng(0)
    maxima = {i: rng.lognormal(0, 20, (3, HEADS)).astype(np.float32) for i in LAYERS}
    shard = dataclasses.replace(
        builders.shard(0, 1), layers={i: LayerAmax(f"l{i}", *m) for i, m in maxima.items()}
    )
    path = shard.save(tmp_path / "new" / "folder")
    assert path == str(tmp_path / "new" / "folder" / "fp8-scales-pp00-tp01.json")
    read = RankShard.read(path)
    assert (read.identity, read.tp_rank, read.pp_rank) == (shard.identity, 1, 0)
    for index, rows in maxima.items():
        assert read.layers[index].runtime_name == f"l{index}"
        for name, row in zip("qkv", rows, strict=True):
            np.testing.assert_array_equal(getattr(read.layers[index], name), row)
    assert read.to_json() == shard.to_json()


def test_it_has_the_keys_of_the_contract():
    made = document()
    assert set(made) == KEYS and made["schema"] == 1
    assert set(made["layers"]) == {"3", "7"}
    assert set(made["layers"]["3"]) == {"runtime_name", "q_amax", "k_amax", "v_amax"}
    assert made["layers"]["7"]["v_amax"] == [builders.amax(7, 2, head) for head in (3, 4, 5)]


def test_a_stage_without_attention_has_empty_layers(tmp_path):
    path = builders.shard(1, 0).save(tmp_path)
    assert path.endswith("fp8-scales-pp01-tp00.json")
    with open(path) as file:
        assert json.load(file)["layers"] == {}
    assert RankShard.read(path).layers == {}


@pytest.mark.parametrize("key", sorted(KEYS))
def test_a_key_that_is_missing(key):
    broken = document()
    del broken[key]
    assert key in refused(broken)


def test_keys_that_nobody_knows_mean_nothing():
    more = document() | {"host": "node7"}
    assert RankShard.from_json(json.dumps(more)).to_json() == builders.shard(0, 1).to_json()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("schema", 2),
        ("schema", "1"),
        ("schema", True),
        ("model", ""),
        ("model", 7),
        ("model", "\ud800"),
        ("revision", "main"),
        ("revision", 1234567),
        ("calibration_id", None),
        ("tp_size", "2"),
        ("tp_size", 2.0),
        ("tp_size", 0),
        ("tp_size", 10**30),
        ("tp_rank", 2),
        ("tp_rank", -1),
        ("tp_rank", "1"),
        ("tp_rank", True),
        ("pp_rank", 2),
        ("pp_rank", None),
        ("fp8_dtype", "fp8"),
        ("fp8_dtype", ["float8_e4m3fnuz"]),
        ("local_heads", 4),
        ("margin", 0.5),
        ("margin", "1.1"),
        ("layers", []),
        ("layers", {"x": {}}),
        ("layers", {"03": {}}),
        ("layers", {"-3": {}}),
        ("layers", {"3": []}),
        ("layers", {"3": {}}),
    ],
)
def test_a_value_that_cannot_be(key, value):
    text = refused(document() | {key: value})
    assert key.removesuffix("s") in text


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ([1.0, 2.0], "expected"),
        ([], "expected"),
        ([1.0, 0.0, 2.0], "expected finite values > 0, got 0.0 for head 1"),
        ([1.0, -1.0, 2.0], "expected finite values > 0, got -1.0 for head 1"),
        ([1.0, 1e39, 2.0], "got inf for head 1"),
        ([1.0, 1e-60, 2.0], "got 0.0 for head 1"),
        ([1.0, "2", 2.0], "expected a list of numbers"),
        ([1.0, True, 2.0], "expected a list of numbers"),
        ([1.0, None, 2.0], "expected a list of numbers"),
        ([[1.0], [2.0], [3.0]], "expected a list of numbers"),
        (1.0, "expected a list of numbers"),
        (None, "expected a list of numbers"),
    ],
)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_maxima_that_are_malformed(name, values, part):
    broken = document()
    broken["layers"]["7"][f"{name}_amax"] = values
    text = refused(broken)
    assert "layer 7" in text and part in text


@pytest.mark.parametrize("name", ["", 7, None, "a\nb"])
def test_a_runtime_name_that_cannot_be(name):
    broken = document()
    broken["layers"]["7"]["runtime_name"] = name
    assert "layer 7: runtime_name: expected" in refused(broken)


def test_all_problems_are_in_one_error():
    broken = document() | {"revision": "main", "tp_size": 0}
    broken["layers"]["7"]["q_amax"] = [0.0, 1.0, float(1)]
    del broken["model"]
    text = refused(broken)
    for part in ("model: missing", "revision:", "tp_size:", "layer 7: q_amax"):
        assert part in text


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"schema": NaN}',
        b'{"schema": 1, "schema": 1}',
        b'{"a": ' * 100_000,
        b"1" * 10_000,
        b'{"schema": ' + b"9" * 10_000 + b"}",
    ],
)
def test_what_is_not_a_shard_at_all(text):
    with pytest.raises(ScaleArtifactError, match=r"JSON|schema"):
        RankShard.from_json(text)


def test_truncated_anywhere_it_is_refused():
    data = builders.shard(0, 1).to_json().rstrip().encode()
    for length in range(len(data)):
        with pytest.raises(ScaleArtifactError):
            RankShard.from_json(data[:length])


def test_a_name_that_contradicts_the_contents(tmp_path):
    path = tmp_path / "fp8-scales-pp00-tp00.json"
    path.write_text(builders.shard(0, 1).to_json())
    with pytest.raises(ScaleArtifactError, match="name says pp_rank 0 and tp_rank 0, its contents"):
        RankShard.read(path)


def test_maxima_that_no_layer_can_have():
    with pytest.raises(ValueError, match="q_amax: expected numbers"):
        LayerAmax("a", "text", [1.0], [1.0])
    with pytest.raises(ValueError, match="k_amax: expected one float a head"):
        LayerAmax("a", [1.0], [1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="layer 3: expected maxima of 3 heads"):
        dataclasses.replace(builders.shard(0, 0), layers={3: LayerAmax("a", [1], [1], [1])})


# Merging.


def merge_refused(shards) -> tuple[str, ...]:
    with pytest.raises(ScaleArtifactError) as caught:
        merge_shards(shards)
    assert "\n" not in str(caught.value)
    return caught.value.problems


def test_heads_are_in_global_order_and_shards_in_any():
    made = merge_shards(reversed(builders.shards()))
    assert made.to_bytes() == builders.artifact().to_bytes()
    for row, index in enumerate(LAYERS):
        for column in range(3):
            expected = [builders.amax(index, column, head) for head in range(2 * HEADS)]
            np.testing.assert_array_equal(made.amax[row, column], expected)


def test_layers_of_all_stages_come_together():
    shards = [builders.shard(pp, tp, layers=(7,) if pp == 0 else (3,))
              for pp in range(2) for tp in range(2)]  # fmt: skip
    assert merge_shards(shards).to_bytes() == builders.artifact().to_bytes()


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    for shard in builders.shards():
        shard.save(tmp_path)
    (tmp_path / ".jaxfp8-0011.tmp").write_bytes(b"half a sh")
    (tmp_path / "fp8-scales-pp00-tp00.json.incomplete").write_text("{")
    (tmp_path / "fp8-scales-pp00-tp00.json.bak").write_text("{")
    (tmp_path / "notes.json").write_text("{")
    (tmp_path / "sub").mkdir()
    assert merge_folder(tmp_path).to_bytes() == builders.artifact().to_bytes()


def test_both_names_of_one_rank_are_one_too_many(tmp_path):
    for shard in builders.shards():
        path = shard.save(tmp_path)
    (tmp_path / "kimi-k3-fp8-scales-pp01-tp01.json").write_text(Path(path).read_text())
    with pytest.raises(ScaleArtifactError, match=r"pp_rank 1 tp_rank 1: 2 shards: fp8-.*, kimi-k3"):
        merge_folder(tmp_path)


def test_a_missing_rank():
    assert merge_refused(builders.shards()[1:]) == ("1 of 4 shards missing: pp_rank 0 tp_rank 0",)
    many = [builders.shard(0, 3, tp_size=60000)]
    (problem,) = merge_refused(many)
    assert problem.startswith("119999 of 120000 shards missing: pp_rank 0 tp_rank 0, ")
    assert len(problem) < 250


def test_a_doubled_rank():
    shards = builders.shards()
    assert merge_refused([*shards, shards[0]]) == (
        "pp_rank 0 tp_rank 0: 2 shards: shard 0, shard 4",
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "other"),
        ("revision", "abcdef0"),
        ("checkpoint_id", "other"),
        ("calibration_id", "other"),
        ("tp_size", 3),
        ("pp_size", 3),
        ("fp8_dtype", "float8_e4m3fn"),
        ("cache_mode", "other"),
        ("local_heads", 4),
        ("qk_head_dim", 128),
        ("v_head_dim", 64),
        ("margin", 1.25),
    ],
)
def test_a_field_that_differs(name, value):
    shards = builders.shards()
    shards[2] = builders.shard(1, 0, **{name: value})
    problems = merge_refused(shards)
    assert problems[0].startswith(f"{name}: the shards differ: ")
    assert "shard 2" in problems[0] and repr(value) in problems[0]


def test_a_layer_in_two_stages():
    shards = builders.shards()
    shards[2:] = [builders.shard(1, tp, layers=(7, 11)) for tp in range(2)]
    assert merge_refused(shards) == ("layer 7: in two stages, pp_rank 0, 1",)


def test_ranks_of_a_stage_with_different_layers():
    shards = builders.shards()
    shards[1] = builders.shard(0, 1, layers=(3,))
    assert merge_refused(shards) == (
        "pp_rank 0: its ranks have different layers: 3, 7 in shard 0; 3 in shard 1",
    )


def test_names_that_differ_or_are_not_unique():
    shards = builders.shards()
    layers = {i: dataclasses.replace(shards[0].layers[i], runtime_name="same") for i in LAYERS}
    shards[0] = dataclasses.replace(shards[0], layers=layers)
    problems = merge_refused(shards)
    assert len(problems) == 3
    assert problems[0] == (
        "layer 3: the shards call it differently: model.layers.3.self_attn.attn, same"
    )
    assert problems[2] == "runtime_name 'same': used by layers 3 and 7"


def test_an_empty_result():
    empty = [builders.shard(pp, tp, layers=()) for pp in range(2) for tp in range(2)]
    assert merge_refused(empty) == ("empty result: no shard has an attention layer",)
    assert "no shards" in merge_refused([])[0]


def test_a_margin_that_passes_float32():
    shards = builders.shards(margin=1e38)
    assert merge_refused(shards) == ("the margin takes the maxima of layers 3, 7 past float32",)


def test_all_problems_of_a_merge_are_in_one_error():
    shards = builders.shards()
    shards[1] = builders.shard(0, 1, layers=(3,), model="other", margin=2.0)
    shards.append(shards[0])
    del shards[2]
    text = "; ".join(merge_refused(shards))
    for part in ("model: ", "margin: ", "2 shards", "1 of 4 shards missing", "different layers"):
        assert part in text


def test_all_malformed_shards_of_a_folder_are_named(tmp_path):
    for shard in builders.shards():
        shard.save(tmp_path)
    (tmp_path / "fp8-scales-pp00-tp00.json").write_text("{")
    (tmp_path / "fp8-scales-pp01-tp00.json").write_text("[]")
    with pytest.raises(ScaleArtifactError) as caught:
        merge_folder(tmp_path)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "fp8-scales-pp00-tp00.json",
        "fp8-scales-pp01-tp00.json",
    ]


def test_a_folder_that_is_none(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "missing"):
        with pytest.raises(ScaleArtifactError, match="cannot be read"):
            merge_folder(path)
    with pytest.raises(ScaleArtifactError, match="no shards"):
        merge_folder(tmp_path)
