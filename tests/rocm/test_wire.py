# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The wire formats of serialized executables."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from jaxfp8.rocm.executable import LaunchArgument, kernel_launches
from jaxfp8.rocm.wire import (
    RIEGELI_SIGNATURE,
    decompress_snappy,
    parse_message,
    read_riegeli,
    read_varint,
)


def varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def snappy_literal(data: bytes) -> bytes:
    blocks = [data[i : i + 60] for i in range(0, len(data), 60)]
    return varint(len(data)) + b"".join(bytes([len(b) - 1 << 2]) + b for b in blocks)


def riegeli(records: list[bytes], compress: bool = False) -> bytes:
    """A Riegeli file of one simple chunk, hashes left out, block headers put in."""
    sizes, values = b"".join(varint(len(r)) for r in records), b"".join(records)
    if compress:
        sizes, values = (varint(len(x)) + snappy_literal(x) for x in (sizes, values))
    data = (b"s" if compress else b"\0") + varint(len(sizes)) + sizes + values
    signature = struct.pack("<5Q", 0, 0, 0, ord("s"), 0)
    chunk = struct.pack("<5Q", 0, len(data), 0, ord("r") | len(records) << 8, 0)
    body = signature + chunk + data
    out = b""
    while body:
        header = (RIEGELI_SIGNATURE if not out else bytes(8)).ljust(24, b"\0")
        out, body = out + header + body[: (1 << 16) - 24], body[(1 << 16) - 24 :]
    return out


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**32, 2**63])
def test_varint(value):
    data = varint(value)
    assert read_varint(b"xx" + data + b"yy", 2) == (value, 2 + len(data))
    with pytest.raises(ValueError, match="truncated"):
        read_varint(b"\x80" * 3, 0)


def test_message():
    data = field(1, 5) + field(2, b"abc") + field(1, 300) + b"\x1d\1\2\3\4" + b"\x21" + bytes(8)
    assert parse_message(data) == {1: [5, 300], 2: [b"abc"], 3: [b"\1\2\3\4"], 4: [bytes(8)]}
    for broken in (data[:-1], b"\0\0", field(2, b"abc")[:-1], b"\x0b"):
        with pytest.raises(ValueError):
            parse_message(broken)


def test_snappy():
    assert decompress_snappy(snappy_literal(bytes(range(256)))) == bytes(range(256))
    # A literal "ab", then a copy that overlaps itself: 6 bytes from 2 back.
    assert decompress_snappy(b"\x08" + b"\x04ab" + bytes([(6 - 1) << 2 | 2, 2, 0])) == b"abababab"
    # A short copy: 4 bytes from 4 back. A long literal with its length in one byte.
    assert decompress_snappy(b"\x08" + b"\x0cabcd" + b"\x01\x04") == b"abcdabcd"
    assert decompress_snappy(varint(70) + bytes([60 << 2, 69]) + b"x" * 70) == b"x" * 70
    for broken in (b"\x08\x04ab", b"\x04\x02\x05\x00"):
        with pytest.raises(ValueError):
            decompress_snappy(broken)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("sizes", [[3, 0, 200], [70_000, 5, 140_000]])
def test_riegeli(compress, sizes):
    records = [bytes(i * 7 % 251 for i in range(size)) for size in sizes]
    data = b"in front" + riegeli(records, compress) + bytes(50)
    assert read_riegeli(data) == records


def test_what_is_no_riegeli_file_is_refused():
    with pytest.raises(ValueError, match="no Riegeli file"):
        read_riegeli(b"something else")


def launch(code: bytes = b"\x7fELF code") -> bytes:
    shape = field(2, 11) + field(3, varint(4) + varint(192))
    kernel = (
        field(1, b"name")
        + field(2, field(2, field(1, code)) + field(3, 1) + field(4, b"kernel_name"))
        + field(3, field(2, field(1, 32) + field(2, 12)))
        + field(4, field(1, field(1, 256)))
        + field(6, 4096)
    )
    place = field(1, 512) + field(2, 3072) + field(3, 7)
    return field(1, field(1, place) + field(2, shape)) + field(2, b"\1") + field(3, kernel)


@pytest.mark.parametrize("nested", [False, True])
def test_launches_are_found_wherever_they_are(nested):
    thunks = field(7, field(3, launch())) + field(9, b"other") + field(7, launch(b"\x7fELF 2"))
    data = riegeli([b"", b"\x7fELF some library", thunks])
    if nested:
        data = riegeli([b"options", field(1, data), b""])
    first, second = kernel_launches(data)
    assert (first.name, first.code_object, first.grid) == (
        "kernel_name",
        b"\x7fELF code",
        (32, 12, 1),
    )
    assert (first.block_threads, first.dynamic_lds_bytes) == (256, 4096)
    assert first.arguments == (LaunchArgument((4, 192), np.dtype(np.float32), (7, 512)),)
    assert second.code_object == b"\x7fELF 2"


def test_an_executable_without_kernels_is_refused():
    with pytest.raises(ValueError, match="no GPU kernel that jaxfp8 can find"):
        kernel_launches(riegeli([field(1, b"nothing")]))
