# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Safetensors files in memory, parsed with suspicion and written deterministically.

Layout: an unsigned little-endian 64-bit header length, the header (a JSON object of that many
bytes, padded with spaces), the tensors' bytes. See https://huggingface.co/docs/safetensors.

Why not the safetensors package: it raises its own errors, keeps the last of two equal keys, and
does not fix the order of the metadata. What is written here is read by it (the tests do).
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from jaxfp8.scales.errors import ScaleArtifactError, shown

MAX_FILE_BYTES = 64 << 20
"""Some 300 times the scales of a model of 93 layers and 96 heads."""
MAX_HEADER_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """A tensor's entry in the header.

    Attributes:
      dtype: the safetensors name of its dtype, "F32" for float32.
      shape: its shape.
      data: its bytes, little-endian.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def float32(self) -> npt.NDArray[np.float32]:
        """The values, where dtype is "F32", as a read-only array."""
        return np.frombuffer(self.data, "<f4").reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class SafetensorsFile:
    """The contents of a safetensors file.

    Attributes:
      metadata: its metadata; empty where it has none.
      tensors: its tensors by name, their shapes consistent with the number of their bytes.
    """

    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorInfo]


def parse(data: bytes, source: str) -> SafetensorsFile:
    """Parses the bytes of a safetensors file.

    Raises:
      ScaleArtifactError: `source` is not a sound safetensors file, with the reason.
    """
    try:
        return _parse(data)
    except _MalformedError as error:
        raise ScaleArtifactError(source, [str(error)]) from None


def serialize(tensors: Mapping[str, npt.NDArray[np.float32]], metadata: Mapping[str, str]) -> bytes:
    """The bytes of a safetensors file: the same for the same contents, whatever their order.

    Args:
      tensors: float32 arrays of any shape.
      metadata: strings that UTF-8 can encode.
    """
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    parts = []
    offset = 0
    for name in sorted(tensors):
        data = little_endian(tensors[name])
        header[name] = {
            "dtype": "F32",
            "shape": list(tensors[name].shape),
            "data_offsets": [offset, offset + len(data)],
        }
        parts.append(data)
        offset += len(data)
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned in a mapped file
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def little_endian(array: npt.NDArray[np.float32]) -> bytes:
    """The little-endian bytes of a float32 array in C order, strided or not."""
    return array.astype("<f4").tobytes()


def content_sha256(items: Iterable[tuple[str, bytes | memoryview]]) -> str:
    """Hex SHA-256 over name, then bytes, of every tensor, in the order of their names."""
    digest = hashlib.sha256()
    for name, data in sorted(items, key=lambda item: item[0]):
        digest.update(name.encode())
        digest.update(data)
    return digest.hexdigest()


class _MalformedError(Exception):
    pass


def _parse(data: bytes) -> SafetensorsFile:
    if len(data) < 8:
        raise _MalformedError(f"truncated: {len(data)} bytes are too few for a safetensors file")
    header_bytes = int.from_bytes(data[:8], "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise _MalformedError(
            f"not a scale artifact: a header of {header_bytes} bytes, at most {MAX_HEADER_BYTES}"
            " are expected"
        )
    if header_bytes > len(data) - 8:
        raise _MalformedError(
            f"truncated: the header has {header_bytes} bytes, the file {len(data) - 8} after its"
            " length"
        )
    header = _parse_header(data[8 : 8 + header_bytes])
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise _MalformedError("the metadata is not a JSON object")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise _MalformedError(f"metadata {shown(key)}: expected a string, got {shown(value)}")
    return SafetensorsFile(metadata, _tensors(header, memoryview(data)[8 + header_bytes :]))


def _parse_header(text: bytes) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise _MalformedError("the header does not begin with a JSON object")
    try:
        header = parse_json(text)
    except ValueError as error:
        raise _MalformedError(f"the header is not sound JSON: {error}") from None
    if not isinstance(header, dict):
        raise _MalformedError("the header is not a JSON object")
    return header


def parse_json(text: bytes) -> Any:
    """Parses UTF-8 JSON, strictly: no key twice in an object, no NaN or Infinity.

    Raises:
      ValueError: it is not sound, with the reason.
    """
    try:
        return json.loads(
            text.decode(), object_pairs_hook=_object_of, parse_constant=_refuse_constant
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        counts = collections.Counter(key for key, _ in pairs)
        twice = counts.most_common(1)[0][0]
        raise ValueError(f"the key {shown(twice)} occurs twice")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _tensors(header: dict[str, Any], data: memoryview) -> dict[str, TensorInfo]:
    """Reads the entries; their bytes must cover the data without gap or overlap."""
    entries = []
    for name, entry in header.items():
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            raise _MalformedError(f"tensor {shown(name)}: a name that UTF-8 cannot hold")
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise _MalformedError(
                f"tensor {shown(name)}: expected dtype, shape and data_offsets, got {shown(entry)}"
            )
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets):
            raise _MalformedError(f"tensor {shown(name)}: malformed entry {shown(entry)}")
        if len(offsets) != 2 or offsets[0] > offsets[1]:
            raise _MalformedError(f"tensor {shown(name)}: malformed offsets {shown(offsets)}")
        entries.append((offsets[0], offsets[1], name, dtype, tuple(shape)))
    end = 0
    tensors = {}
    for start, stop, name, dtype, shape in sorted(entries):
        if start != end:
            raise _MalformedError(
                f"tensor {shown(name)}: its data begins at {start}, expected {end}, where the"
                " data before it ends"
            )
        end = stop
        if dtype == "F32" and stop - start != 4 * math.prod(shape):
            raise _MalformedError(
                f"tensor {shown(name)}: {stop - start} bytes do not hold float32 {list(shape)}"
            )
        tensors[name] = TensorInfo(dtype, shape, data[start:stop])
    if end != len(data):
        kind = "truncated" if end > len(data) else "trailing bytes"
        raise _MalformedError(f"{kind}: the tensors have {end} bytes, the file holds {len(data)}")
    return tensors


def _are_sizes(values: object) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= 8
        and all(type(value) is int and 0 <= value < 2**48 for value in values)
    )
