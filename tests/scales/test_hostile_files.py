# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Paths and files that are nothing of the kind: one error, at once, without allocating what they
claim.

Time is that of the processor, so that a busy machine fails no test; what blocks is stopped by an
alarm.
"""

import os
import resource
import signal
import socket
import time
import tracemalloc
from pathlib import Path

import pytest

from jaxfp8.scales import (
    RankShard,
    ScaleArtifact,
    ScaleArtifactError,
    checkpoint_id,
    merge_folder,
)
from tests.scales import builders
from tests.scales.builders import join, split

DATA = builders.artifact().to_bytes()


@pytest.fixture(autouse=True)
def alarm():
    """Interrupts a test that waits for something, such as the other end of a pipe."""

    def interrupt(*_):
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def with_length(length: int) -> bytes:
    return length.to_bytes(8, "little") + DATA[8:]


def deep() -> bytes:
    text = b'{"a":' * 100_000
    return len(text).to_bytes(8, "little") + text


def latin_1() -> bytes:
    header, tensors = split(DATA)
    header["__metadata__"]["model"] = "caf\xe9"
    text = join(header, b"")[8:].decode().replace("\\u00e9", "\xe9").encode("latin-1")
    return len(text).to_bytes(8, "little") + text + tensors


def doubled_key() -> bytes:
    length = int.from_bytes(DATA[:8], "little")
    text = DATA[8 : 8 + length].replace(b'"tp_size":"2"', b'"tp_size":"4","tp_size":"2"')
    return len(text).to_bytes(8, "little") + text + DATA[8 + length :]


CONTENTS = {
    "0 bytes": (b"", "truncated"),
    "7 bytes": (DATA[:7], "truncated"),
    "8 bytes": (bytes(8), "does not begin with a JSON object"),
    "all zero": (bytes(1000), "does not begin with a JSON object"),
    "header length 2**63": (with_length(2**63), "a header of 9223372036854775808 bytes"),
    "header length 2**64-1": (with_length(2**64 - 1), "a header of 18446744073709551615 bytes"),
    "header length 1 MiB": (with_length(1 << 20), "truncated: the header has 1048576 bytes"),
    "header length 1": (with_length(1), "not sound JSON"),
    "metadata in Latin-1": (latin_1(), "not UTF-8 at byte"),
    "nested 100,000 deep": (deep(), "nested too deeply"),
    "a key twice": (doubled_key(), "the key 'tp_size' occurs twice"),
    "a shard": (builders.shard(0, 0).to_json().encode(), "a header of"),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\n", "a header of"),
    "a pickle": (b"PK\x03\x04" + bytes(100), "truncated|a header of"),
    "no metadata": (join({}, b""), "metadata missing: model, revision"),
    "a tensor of 2**47": (
        join({"a": {"dtype": "F32", "shape": [2**45], "data_offsets": [0, 2**47]}}, b""),
        "truncated: the tensors have 140737488355328 bytes",
    ),
    "a shape of 2**62 elements": (
        join({"a": {"dtype": "F32", "shape": [2**31, 2**31], "data_offsets": [0, 4]}}, b"abcd"),
        "4 bytes do not hold float32",
    ),
    "overlapping tensors": (
        join(
            {n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in ("a", "b")},
            b"abcd",
        ),
        "'b': its data begins at 0, expected 4",
    ),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_contents(tmp_path, name):
    content, message = CONTENTS[name]
    path = tmp_path / "file"
    path.write_bytes(content)
    is_refused(path, message)


def is_refused(path, message: str, read=ScaleArtifact.read) -> None:
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(ScaleArtifactError, match=message) as caught:
            read(path)
        assert time.process_time() - start < 1
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize("read", [ScaleArtifact.read, RankShard.read])
def test_paths(tmp_path, read):
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "link to a folder").symlink_to("folder")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        working = os.getcwd()
        os.chdir(tmp_path)  # a socket's path must be short
        server.bind("socket")
        os.chdir(working)
        for name, message in {
            "folder": "expected a regular file, got a folder",
            "link to a folder": "expected a regular file, got a symbolic link",
            "pipe": "got a device, pipe or socket",
            "socket": "got a device, pipe or socket",
            "dangling": "expected a regular file, got a symbolic link",
            "missing": "No such file",
            "loop": "expected a regular file, got a symbolic link",
            "x" * 300: "File name too long",
            "with\0nul": "null",
        }.items():
            is_refused(f"{tmp_path}/{name}", message, read)
    for name in ("/dev/zero", "/dev/null", "/dev/random"):
        is_refused(name, "got a device", read)
    is_refused("", "No such file", read)
    is_refused("/proc/self/status", "truncated|JSON", read)


@pytest.mark.parametrize("read", [ScaleArtifact.read, RankShard.read])
def test_10_gb_sparse(tmp_path, read):
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.write(DATA)
        file.truncate(10 * 10**9)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    is_refused(path, "size: expected at most 67108864 bytes, got 10000000000", read)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_a_large_file_within_the_bound(tmp_path):
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.write(DATA)
        file.truncate(60 << 20)
    with pytest.raises(ScaleArtifactError, match="trailing bytes"):
        ScaleArtifact.read(path)


def test_a_header_full_of_entries(tmp_path):
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    path = tmp_path / "file"
    path.write_bytes(join({f"t{i}": entry for i in range(14_000)}, b""))
    start = time.process_time()
    with pytest.raises(ScaleArtifactError, match="metadata missing"):
        ScaleArtifact.read(path)
    assert time.process_time() - start < 1


def test_a_link_to_a_sound_file_is_refused_and_a_linked_folder_is_not(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(DATA)
    (tmp_path / "link").symlink_to("folder/file")
    is_refused(tmp_path / "link", "got a symbolic link; name the file that it points to")
    (tmp_path / "linked folder").symlink_to("folder")
    assert ScaleArtifact.read(tmp_path / "linked folder" / "file").to_bytes() == DATA
    path = builders.shard(0, 0).save(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    for shard in builders.shards()[1:]:
        shard.save(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / Path(path).name).symlink_to(path)
    is_refused(tmp_path / "elsewhere", "got a symbolic link", merge_folder)


def test_a_shard_folder_with_traps(tmp_path):
    (tmp_path / "fp8-scales-pp00-tp00.json").mkdir()
    os.mkfifo(tmp_path / "fp8-scales-pp00-tp01.json")
    (tmp_path / "fp8-scales-pp01-tp00.json").write_bytes(b"")
    (tmp_path / "fp8-scales-pp01-tp01.json").symlink_to("/dev/zero")
    start = time.process_time()
    with pytest.raises(ScaleArtifactError) as caught:
        merge_folder(tmp_path)
    assert time.process_time() - start < 1
    assert len(caught.value.problems) == 4


def test_a_checkpoint_with_traps(tmp_path):
    os.mkfifo(tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").symlink_to("/dev/zero")
    (tmp_path / "c.safetensors").mkdir()
    (tmp_path / "d.safetensors").write_bytes(with_length(2**63))
    with (tmp_path / "e.safetensors").open("wb") as file:
        file.write((90_000_000).to_bytes(8, "little"))
        file.truncate(10 * 10**9)
    start = time.process_time()
    with pytest.raises(ScaleArtifactError) as caught:
        checkpoint_id(tmp_path)
    assert time.process_time() - start < 1
    assert [problem[:13] for problem in caught.value.problems] == [
        f"{letter}.safetensors" for letter in "abcde"
    ]
