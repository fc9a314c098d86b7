# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The identity of a checkpoint in a Hugging Face style folder."""

from __future__ import annotations

import hashlib
import itertools
import os
import stat
from pathlib import Path

from jaxfp8.scales.arguments import require_path
from jaxfp8.scales.errors import ScaleArtifactError, shown
from jaxfp8.scales.fields import REVISION
from jaxfp8.scales.files import read_regular_file
from jaxfp8.scales.safetensors_file import parse_json

_MAX_HEADER_BYTES = 100_000_000  # what the safetensors format allows
_MAX_INDEX_BYTES = 256 << 20


def checkpoint_id(folder: str | os.PathLike[str]) -> str:
    """A digest of what tensors a checkpoint holds and where: "sha256:" and 64 hex digits.

    It covers the safetensors index and the header of every safetensors file (names, dtypes,
    shapes, offsets), and does not read the weights: a terabyte takes milliseconds. So it tells
    apart checkpoints that are laid out differently, not two trainings of one architecture; for
    those there is the revision.

    SHA-256 over, for the index (if there is one) and then for each safetensors file in the order
    of their names: the name, a zero byte, the number of bytes that follow (8 bytes, little-endian),
    and the bytes: the whole index; of a safetensors file, its header with the 8 bytes of length
    before it.

    Args:
      folder: holds one `*.safetensors.index.json` and the files that it names, or, without an
        index, the `*.safetensors` files of the checkpoint.

    Raises:
      ScaleArtifactError: the folder holds no such checkpoint, or files of it are missing or
        malformed; all of them are listed.
      TypeError: folder is not a path.
    """
    require_path("folder", folder)
    root = Path(folder)
    try:
        names = sorted(os.listdir(root))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ScaleArtifactError(folder, [f"cannot be read: {reason}"]) from error
    indices = [name for name in names if name.endswith(".safetensors.index.json")]
    if len(indices) > 1:
        raise ScaleArtifactError(folder, [f"expected one safetensors index, got {indices}"])
    digest = hashlib.sha256()
    if indices:
        data = read_regular_file(root / indices[0], _MAX_INDEX_BYTES, follow_link=True)
        files = _files_of_index(data, str(root / indices[0]))
        _update(digest, indices[0], data)
    else:
        files = [name for name in names if name.endswith(".safetensors")]
    if not files:
        raise ScaleArtifactError(folder, ["expected a safetensors index or *.safetensors files"])
    problems = []
    for name in files:
        try:
            _update(digest, name, _read_header(root / name))
        except OSError as error:
            problems.append(f"{_printable(name)}: cannot be read: {error.strerror}")
        except ValueError as error:
            problems.append(f"{_printable(name)}: {error}")
    if problems:
        raise ScaleArtifactError(folder, problems)
    return f"sha256:{digest.hexdigest()}"


def snapshot_revision(path: str | os.PathLike[str]) -> str:
    """The commit in a path .../snapshots/<commit>[/...], as Hugging Face caches have them.

    A symbolic link to such a folder is followed where the path itself has no such part.

    Raises:
      ValueError: there is no such part, or what follows "snapshots" is not a commit.
      TypeError: path is not a path.
    """
    require_path("path", path)
    for candidate in (os.path.abspath(path), os.path.realpath(path)):
        parts = Path(candidate).parts
        following = [b for a, b in itertools.pairwise(parts) if a == "snapshots"]
        if not following:
            continue
        if not REVISION.fullmatch(following[-1]):
            raise ValueError(
                "path: expected a commit of 7 to 64 hex digits after 'snapshots', got "
                f"{following[-1]!r} in {os.fspath(path)!r}"
            )
        return following[-1]
    raise ValueError(
        f"path: expected .../snapshots/<commit>, got {os.fspath(path)!r}; give the revision itself"
    )


def _files_of_index(data: bytes, source: str) -> list[str]:
    try:
        index = parse_json(data)
    except ValueError as error:
        raise ScaleArtifactError(source, [f"not sound JSON: {error}"]) from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ScaleArtifactError(source, ["expected an object with a non-empty weight_map"])
    files = set(weight_map.values()) if all(map(_is_plain_name, weight_map.values())) else set()
    if not files:
        wrong = next(name for name in weight_map.values() if not _is_plain_name(name))
        raise ScaleArtifactError(
            source, [f"weight_map: expected names of files in the same folder, got {shown(wrong)}"]
        )
    return sorted(files)


def _is_plain_name(name: object) -> bool:
    return isinstance(name, str) and bool(name) and name == os.path.basename(name) != ".."


def _printable(name: str) -> str:
    """A name as it is, if a message can hold it: not every one can be encoded."""
    return name if name.isprintable() else shown(name)


def _read_header(path: Path) -> bytes:
    """The header of a safetensors file with its length before it; the rest is not read."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # before it is opened: a pipe would block
        raise ValueError("expected a regular file")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
            raise ValueError("not a safetensors file: it has no header (is it a Git LFS pointer?)")
        # Its first byte alone at first: what is no header may be long.
        first = file.read(1)
        if length < 2 or first != b"{":
            raise ValueError("not a safetensors file: its header is not a JSON object")
        return prefix + first + file.read(length - 1)


def _update(digest: hashlib._Hash, name: str, data: bytes) -> None:
    digest.update(name.encode("utf-8", "surrogateescape") + b"\0")
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data)
