# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Whatever happens during a write, the old file or the whole new one is there afterwards."""

import errno
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxfp8.scales import ScaleArtifact, merge_folder
from jaxfp8.scales.files import make_folder, write_atomically
from tests.scales import builders

OLD, NEW = builders.artifact(), builders.artifact(calibration_id="a later one")
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}


@pytest.fixture
def path(tmp_path) -> Path:
    path = tmp_path / "scales.safetensors"
    OLD.save(path)
    return path


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_killed_at_every_step_of_a_write(tmp_path, path):
    (tmp_path / "old").write_bytes(OLD.to_bytes())
    (tmp_path / "new").write_bytes(NEW.to_bytes())
    (tmp_path / "folder").mkdir()
    target = tmp_path / "folder" / path.name
    program = Path(__file__).parent / "kill_writer.py"
    arguments = [target, tmp_path / "old", tmp_path / "new"]
    result = subprocess.run(
        [sys.executable, program, *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    states = result.stdout.split("\n")[:-1]
    assert states[-1] == "new finished"
    killed = [state.split()[0] for state in states[:-1]]
    assert len(killed) >= 10
    # Old up to the rename, new from then on.
    assert killed == ["old"] * killed.count("old") + ["new"] * killed.count("new")
    assert killed.count("old") >= 6 and killed.count("new") >= 2
    # What the killed ones left lying about hinders nobody.
    assert any(name.startswith(".jaxfp8-") for name in names(target.parent))
    OLD.save(target)
    assert ScaleArtifact.read(target).to_bytes() == OLD.to_bytes()


# Forking with JAX's threads about is harmless: the children run no JAX and leave by _exit.
forks = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")


@forks
def test_killed_at_any_moment(path):
    old, new = OLD.to_bytes(), NEW.to_bytes()
    rng = random.Random(0)
    for _ in range(40):
        child = os.fork()
        if child == 0:
            while True:
                write_atomically(path, new)
                write_atomically(path, old)
        for _ in range(10):  # a reader beside it never sees anything but whole files
            assert path.read_bytes() in (old, new)
        time.sleep(rng.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert path.read_bytes() in (old, new)
    OLD.save(path)
    assert path.read_bytes() == old


def test_ranks_write_into_one_folder_at_once(tmp_path):
    shards = builders.shards(tp_size=8)
    errors = []

    def write(shard):
        try:
            for _ in range(5):
                shard.save(tmp_path / "a" / "b")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(shard,)) for shard in shards * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert names(tmp_path / "a" / "b") == sorted(shard.file_name for shard in shards)
    merged = merge_folder(tmp_path / "a" / "b")
    assert merged.to_bytes() == builders.artifact(tp_size=8).to_bytes()


def fail_with(code):
    def call(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize("name", ["open", "write", "fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
def test_a_system_call_that_fails(monkeypatch, path, name, code):
    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail_with(code))
        with pytest.raises(OSError, match="cannot write") as caught:
            NEW.save(path)
    assert caught.value.errno == code
    assert caught.value.filename == str(path)
    assert os.strerror(code) in str(caught.value)
    assert path.read_bytes() == OLD.to_bytes()
    assert names(path.parent) == [path.name]


def test_a_disk_that_fills_up_during_the_write(monkeypatch, path):
    real = os.write

    def write(fd, data):
        if len(data) <= 100:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data[:100])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        with pytest.raises(OSError, match="No space left on device"):
            NEW.save(path)
    assert path.read_bytes() == OLD.to_bytes()
    assert names(path.parent) == [path.name]


def test_short_writes_are_continued(monkeypatch, path):
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: real(fd, data[:7]))
        NEW.save(path)
    assert path.read_bytes() == NEW.to_bytes()


def test_a_folder_that_cannot_be_synced(monkeypatch, path):
    real = os.fsync

    def fsync(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(OSError, match="the new file is in place"):
            NEW.save(path)
    assert path.read_bytes() == NEW.to_bytes()


def test_interrupted_from_the_keyboard(monkeypatch, path):
    def fsync(fd):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(KeyboardInterrupt):
            NEW.save(path)
    assert path.read_bytes() == OLD.to_bytes()
    assert names(path.parent) == [path.name]


def in_child(action) -> str:
    """Runs an action in a forked process and returns the error it ended with."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            action()
            os.write(write, b"no error")
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    os.waitpid(child, 0)
    return text


@forks
def test_a_limit_on_file_size(path):
    def action():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
        NEW.save(path)

    assert in_child(action).startswith("OSError: [Errno 27] cannot write: File too large")
    assert path.read_bytes() == OLD.to_bytes()
    assert names(path.parent) == [path.name]


@forks
def test_a_read_only_folder(path):
    def action():
        os.chdir(path.parent)
        if os.getuid() == 0:  # whom no permission stops
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        NEW.save(path.name)

    path.parent.chmod(0o555)
    try:
        text = in_child(action)
    finally:
        path.parent.chmod(0o755)
    assert text == (
        "PermissionError: [Errno 13] cannot write: Permission denied: 'scales.safetensors'"
    )
    assert path.read_bytes() == OLD.to_bytes()
    assert names(path.parent) == [path.name]


def test_what_is_not_a_regular_file_is_not_replaced(tmp_path):
    target = tmp_path / "target"
    target.write_bytes(b"mine")
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, message in {
        "link": "symbolic link",
        "dangling": "symbolic link",
        "folder": "not a regular file",
        "pipe": "not a regular file",
        "folder/": "got that of a folder",
        "target/x": "Not a directory",
        "missing/x": "No such file",
    }.items():
        before = names(tmp_path)
        with pytest.raises(OSError, match=message) as caught:
            OLD.save(f"{tmp_path}/{name}")
        assert caught.value.filename == f"{tmp_path}/{name}"
        assert names(tmp_path) == before
    with pytest.raises(OSError, match="not a regular file"):
        OLD.save("/dev/null")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert target.read_bytes() == b"mine"
    assert (tmp_path / "link").is_symlink()


def test_permissions(tmp_path):
    path = tmp_path / "x"
    old = os.umask(0o027)
    try:
        write_atomically(path, b"1")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o604)
        write_atomically(path, b"2")
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o604
    assert path.read_bytes() == b"2"


def test_a_name_relative_to_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    OLD.save("scales")
    OLD.save("x" * 255)
    builders.shard(0, 0).save(".")
    builders.shard(0, 0).save("new/folder")
    assert ScaleArtifact.read("scales").to_bytes() == OLD.to_bytes()
    assert (tmp_path / "new" / "folder" / "fp8-scales-pp00-tp00.json").exists()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("file", "file/inner"):
        with pytest.raises(OSError, match="file"):
            make_folder(tmp_path / name)
