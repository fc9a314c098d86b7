# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
import hashlib
import json
import os
import time

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxfp8.scales import ScaleArtifactError, checkpoint_id, snapshot_revision

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "model-00001-of-00002.safetensors": {"a.weight": (2, 3), "b.weight": (4,)},
    "model-00002-of-00002.safetensors": {"c.weight": (5,)},
}


def write_checkpoint(folder, *, seed=0, files=FILES, index=True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    weight_map = {}
    for name, tensors in files.items():
        arrays = {n: rng.normal(size=s).astype(np.float32) for n, s in tensors.items()}
        save_file(arrays, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    if index:
        text = json.dumps({"metadata": {"total_size": 60}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)


def framed(name: str, data: bytes) -> bytes:
    return name.encode() + b"\0" + len(data).to_bytes(8, "little") + data


def test_it_is_the_digest_that_is_documented(tmp_path):
    write_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "other.safetensors").write_bytes(b"not in the index, not read")
    text = framed(
        "model.safetensors.index.json", (tmp_path / "model.safetensors.index.json").read_bytes()
    )
    for name in FILES:
        data = (tmp_path / name).read_bytes()
        text += framed(name, data[: 8 + int.from_bytes(data[:8], "little")])
    assert checkpoint_id(tmp_path) == "sha256:" + hashlib.sha256(text).hexdigest()


def test_it_depends_on_the_layout_and_not_on_the_weights_or_the_place(tmp_path):
    write_checkpoint(tmp_path / "a", seed=0)
    write_checkpoint(tmp_path / "b", seed=1)
    shapes = {**FILES, "model-00002-of-00002.safetensors": {"c.weight": (6,)}}
    write_checkpoint(tmp_path / "c", files=shapes)
    write_checkpoint(tmp_path / "d", index=False)
    a, b, c, d = (checkpoint_id(tmp_path / name) for name in "abcd")
    assert a == b and len({a, c, d}) == 3


def test_a_cache_of_links_is_the_same_checkpoint(tmp_path):
    write_checkpoint(tmp_path / "plain")
    snapshot = tmp_path / "cache" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted((tmp_path / "plain").iterdir())):
        blob = tmp_path / "cache" / f"blob{number}"
        blob.write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blob{number}")
    assert checkpoint_id(snapshot) == checkpoint_id(tmp_path / "plain")
    assert snapshot_revision(snapshot) == COMMIT


def test_it_does_not_read_the_weights(tmp_path):
    header = json.dumps(
        {"w": {"dtype": "BF16", "shape": [10**11 // 2], "data_offsets": [0, 10**11]}}
    ).encode()
    for number in range(50):
        with (tmp_path / f"m{number}.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + 10**11)
    start = time.process_time()
    checkpoint_id(tmp_path)
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not sound JSON"),
        ("[]", "weight_map"),
        ("{}", "weight_map"),
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": {"a": 3}}', "names of files in the same folder, got 3"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "got '../x.safetensors'"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "got '/etc/passwd'"),
        ('{"weight_map": {"a": ".."}}', "got '..'"),
        ('{"weight_map": {"a": ""}}', "got ''"),
        ('{"weight_map": {"a": "x.safetensors"}}', "x.safetensors: cannot be read: No such file"),
    ],
)
def test_an_index_that_cannot_be(tmp_path, index, message):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ScaleArtifactError) as caught:
        checkpoint_id(tmp_path)
    assert message in str(caught.value)


def test_all_bad_files_are_named(tmp_path):
    write_checkpoint(tmp_path)
    first, second = FILES
    (tmp_path / first).write_text("version https://git-lfs.github.com/spec/v1\n")
    (tmp_path / second).unlink()
    with pytest.raises(ScaleArtifactError) as caught:
        checkpoint_id(tmp_path)
    assert f"{first}: not a safetensors file" in str(caught.value)
    assert "Git LFS pointer" in str(caught.value)
    assert f"{second}: cannot be read: No such file" in str(caught.value)


def test_a_folder_that_is_no_checkpoint(tmp_path):
    with pytest.raises(ScaleArtifactError, match="expected a safetensors index or"):
        checkpoint_id(tmp_path)
    with pytest.raises(ScaleArtifactError, match="cannot be read: No such file"):
        checkpoint_id(tmp_path / "missing")
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(ScaleArtifactError, match="expected one safetensors index"):
        checkpoint_id(tmp_path)


def test_a_file_name_that_cannot_be_encoded_can_be_shown(tmp_path):
    index = {"weight_map": {"a": "model\ud800.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ScaleArtifactError) as caught:
        checkpoint_id(tmp_path)
    assert rb"'model\ud800.safetensors'" in str(caught.value).encode()


def test_revision_of_a_snapshot(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--a--b" / "snapshots" / COMMIT
    (snapshot / "sub").mkdir(parents=True)
    (tmp_path / "current").symlink_to(snapshot)
    (tmp_path / "snapshots" / "models").mkdir(parents=True)
    assert snapshot_revision(snapshot) == COMMIT
    assert snapshot_revision(f"{snapshot}/") == COMMIT
    assert snapshot_revision(snapshot / "sub") == COMMIT
    assert snapshot_revision(tmp_path / "current") == COMMIT
    assert snapshot_revision(f"/snapshots/old/snapshots/{COMMIT}/x") == COMMIT
    monkeypatch.chdir(snapshot)
    assert snapshot_revision(os.curdir) == COMMIT


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/models/kimi", "expected .../snapshots/<commit>, got '/models/kimi'"),
        ("/models/snapshots", "expected .../snapshots/<commit>"),
        ("/models/snapshots/main", "got 'main' in '/models/snapshots/main'"),
        ("/models/snapshots/012345", "got '012345'"),
    ],
)
def test_a_path_without_a_revision(path, message):
    with pytest.raises(ValueError, match="path: expected") as caught:
        snapshot_revision(path)
    assert message in str(caught.value)
