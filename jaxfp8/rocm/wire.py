# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The wire formats inside a serialized XLA executable: Riegeli records, Snappy blocks, protobuf.

Only what XLA writes is read. Formats: google/riegeli doc/riegeli_records_file_format.md,
google/snappy format_description.txt, and the protocol buffer encoding guide.
"""

from __future__ import annotations

import struct

RIEGELI_SIGNATURE = bytes.fromhex("83af70d10d884a3f")
"""Hash of the first block header: every Riegeli file starts with it."""

_BLOCK = 1 << 16  # a Riegeli file repeats a block header at every multiple of this
_BLOCK_HEADER = 24
_CHUNK_HEADER = 40

Message = dict[int, list[int | bytes]]
"""A decoded protobuf message: the values of each field number, in order."""


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """A base-128 integer and the position after it.

    Raises:
      ValueError: the data ends within it.
    """
    value = shift = 0
    while position < len(data):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise ValueError("truncated varint")


def parse_message(data: bytes) -> Message:
    """Splits a protobuf message into its fields; 32 and 64-bit fields stay bytes.

    Raises:
      ValueError: the data is no protobuf message.
    """
    fields: Message = {}
    position = 0
    while position < len(data):
        key, position = read_varint(data, position)
        number, wire_type = key >> 3, key & 7
        if number == 0:
            raise ValueError("field number 0")
        if wire_type == 0:
            value, position = read_varint(data, position)
            fields.setdefault(number, []).append(value)
            continue
        if wire_type == 2:
            size, position = read_varint(data, position)
        elif wire_type in (1, 5):
            size = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"wire type {wire_type}")
        if position + size > len(data):
            raise ValueError("truncated field")
        fields.setdefault(number, []).append(data[position : position + size])
        position += size
    return fields


def decompress_snappy(data: bytes) -> bytes:
    """Decodes one Snappy block.

    Raises:
      ValueError: the data is no Snappy block.
    """
    size, position = read_varint(data, 0)
    out = bytearray()
    while len(out) < size and position < len(data):
        tag = data[position]
        position += 1
        kind = tag & 3
        if kind == 0:  # literal bytes
            length = tag >> 2
            if length >= 60:
                width = length - 59
                length = int.from_bytes(data[position : position + width], "little")
                position += width
            length += 1
            out += data[position : position + length]
            position += length
            continue
        if kind == 1:  # a short copy of earlier output
            length, offset = ((tag >> 2) & 7) + 4, (tag >> 5) << 8 | data[position]
            position += 1
        else:
            width = 2 if kind == 2 else 4
            length = (tag >> 2) + 1
            offset = int.from_bytes(data[position : position + width], "little")
            position += width
        if not 0 < offset <= len(out):
            raise ValueError("copy from before the start of the block")
        if offset >= length:
            out += out[len(out) - offset : len(out) - offset + length]
        else:  # the copy overlaps what it writes: its bytes repeat
            pattern = bytes(out[-offset:])
            out += (pattern * (length // offset + 1))[:length]
    if len(out) != size:
        raise ValueError(f"a Snappy block of {size} bytes decoded to {len(out)}")
    return bytes(out)


def read_riegeli(data: bytes) -> list[bytes]:
    """The records of the Riegeli file that starts at the first signature in the data.

    Raises:
      ValueError: there is no such file, or it uses a chunk or compression type that XLA is not
        known to write.
    """
    start = data.find(RIEGELI_SIGNATURE)
    if start < 0:
        raise ValueError("no Riegeli file")
    body = b"".join(
        data[block + _BLOCK_HEADER : block + _BLOCK] for block in range(start, len(data), _BLOCK)
    )
    records: list[bytes] = []
    position = 0
    while position + _CHUNK_HEADER <= len(body):
        _, size, _, kind_and_count, _ = struct.unpack_from("<5Q", body, position)
        kind, count = chr(kind_and_count & 0xFF), kind_and_count >> 8
        begin, end = position + _CHUNK_HEADER, position + _CHUNK_HEADER + size
        if kind not in "srmp" or end > len(body):
            break  # what follows the file in its container
        if kind == "r":
            records += _simple_chunk(body[begin:end], count)
        position = max(end, position + count)
    return records


def _simple_chunk(data: bytes, count: int) -> list[bytes]:
    compression = data[0]
    sizes_length, position = read_varint(data, 1)
    sizes, values = data[position : position + sizes_length], data[position + sizes_length :]
    if compression == ord("s"):
        # Each buffer has its decoded size in front, and then the Snappy block, which has it too.
        sizes, values = (
            decompress_snappy(buffer[read_varint(buffer, 0)[1] :]) for buffer in (sizes, values)
        )
    elif compression != 0:
        raise ValueError(f"Riegeli compression {chr(compression)!r}")
    records = []
    position = begin = 0
    for _ in range(count):
        size, position = read_varint(sizes, position)
        records.append(values[begin : begin + size])
        begin += size
    return records
