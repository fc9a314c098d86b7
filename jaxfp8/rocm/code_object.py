# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""AMDGPU code objects: ELF sections, the metadata note and kernel descriptors."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

_SHT_SYMTAB = 2
_SHT_NOTE = 7
_SHT_DYNSYM = 11
_PT_LOAD = 1
_NT_AMDGPU_METADATA = 32
_KERNEL_DESCRIPTOR_SIZE = 64


@dataclass(frozen=True)
class Symbol:
    """A named place in the loaded image."""

    name: str
    value: int
    size: int


@dataclass(frozen=True)
class Segment:
    """One loadable ELF segment: its virtual address and its bytes in memory."""

    address: int
    data: bytes


@dataclass(frozen=True)
class KernelArgument:
    """Where one argument lies in the kernarg segment, in bytes, and what it is."""

    offset: int
    size: int
    value_kind: str

    @property
    def is_hidden(self) -> bool:
        return self.value_kind.startswith("hidden_")

    @property
    def is_pointer(self) -> bool:
        return self.value_kind in ("global_buffer", "dynamic_shared_pointer")


def _bits(word: int, low: int, width: int) -> int:
    return (word >> low) & ((1 << width) - 1)


@dataclass(frozen=True)
class KernelDescriptor:
    """The 64-byte kernel descriptor (`<kernel>.kd`), with the gfx942 fields decoded."""

    address: int
    group_segment_fixed_size: int
    private_segment_fixed_size: int
    kernarg_size: int
    entry_offset: int
    rsrc3: int
    rsrc1: int
    rsrc2: int
    code_properties: int
    kernarg_preload: int

    @classmethod
    def parse(cls, address: int, raw: bytes) -> KernelDescriptor:
        lds, scratch, kernarg, _, entry = struct.unpack_from("<IIIIq", raw, 0)
        rsrc3, rsrc1, rsrc2, properties, preload = struct.unpack_from("<IIIHH", raw, 44)
        return cls(address, lds, scratch, kernarg, entry, rsrc3, rsrc1, rsrc2, properties, preload)

    @property
    def entry(self) -> int:
        """Virtual address of the first instruction."""
        return self.address + self.entry_offset

    @property
    def total_vgprs(self) -> int:
        """Rows of the unified vector register file that each wave owns."""
        return (_bits(self.rsrc1, 0, 6) + 1) * 8

    @property
    def accum_offset(self) -> int:
        """Row of the unified register file at which AGPR a0 lives."""
        return (_bits(self.rsrc3, 0, 6) + 1) * 4

    @property
    def float_mode(self) -> int:
        """Initial MODE[7:0]: round modes of f32 and f16/f64, denormal modes of f32 and f16/f64."""
        return _bits(self.rsrc1, 12, 8)

    @property
    def dx10_clamp(self) -> bool:
        return bool(_bits(self.rsrc1, 21, 1))

    @property
    def ieee_mode(self) -> bool:
        return bool(_bits(self.rsrc1, 23, 1))

    @property
    def fp16_ovfl(self) -> bool:
        return bool(_bits(self.rsrc1, 26, 1))

    @property
    def user_sgpr_count(self) -> int:
        return _bits(self.rsrc2, 1, 5)

    @property
    def workgroup_id_enabled(self) -> tuple[bool, bool, bool]:
        x, y, z = (bool(_bits(self.rsrc2, 7 + axis, 1)) for axis in range(3))
        return x, y, z

    @property
    def workitem_id_dimensions(self) -> int:
        """Number of workitem-id components packed into v0 (10 bits each)."""
        return _bits(self.rsrc2, 11, 2) + 1

    @property
    def user_sgprs(self) -> list[tuple[str, int]]:
        """(name, SGPR count) of the enabled user SGPRs, in register order."""
        layout = (
            ("private_segment_buffer", 4),
            ("dispatch_ptr", 2),
            ("queue_ptr", 2),
            ("kernarg_segment_ptr", 2),
            ("dispatch_id", 2),
            ("flat_scratch_init", 2),
            ("private_segment_size", 1),
        )
        return [item for bit, item in enumerate(layout) if _bits(self.code_properties, bit, 1)]

    @property
    def kernarg_preload_length(self) -> int:
        """Number of kernarg dwords preloaded into the user SGPRs."""
        return _bits(self.kernarg_preload, 0, 7)

    @property
    def kernarg_preload_offset(self) -> int:
        """First preloaded kernarg dword."""
        return _bits(self.kernarg_preload, 7, 9)


@dataclass(frozen=True)
class KernelInfo:
    """Everything that the ELF says about one kernel."""

    name: str
    descriptor: KernelDescriptor
    code_size: int
    arguments: tuple[KernelArgument, ...]
    metadata: dict[str, Any]


class CodeObject:
    """A parsed gfx942 HSACO."""

    def __init__(self, image: bytes):
        if image[:4] != b"\x7fELF" or image[4] != 2:
            raise ValueError("not a 64-bit ELF file")
        self.image = image
        self._sections = self._parse_sections()
        self.segments = self._parse_segments()
        self.symbols = self._parse_symbols()
        self.metadata = self._parse_metadata()
        self.kernels = {info.name: info for info in self._parse_kernels()}

    def read(self, address: int, size: int) -> bytes:
        """Bytes at a virtual address of the loaded image."""
        for segment in self.segments:
            offset = address - segment.address
            if offset >= 0 and offset + size <= len(segment.data):
                return segment.data[offset : offset + size]
        raise ValueError(f"address 0x{address:x} is in no loadable segment")

    def _parse_sections(self) -> list[tuple[int, ...]]:
        (offset,) = struct.unpack_from("<Q", self.image, 0x28)
        entry_size, count = struct.unpack_from("<HH", self.image, 0x3A)
        return [
            struct.unpack_from("<IIQQQQIIQQ", self.image, offset + entry_size * i)
            for i in range(count)
        ]

    def _parse_segments(self) -> list[Segment]:
        (offset,) = struct.unpack_from("<Q", self.image, 0x20)
        entry_size, count = struct.unpack_from("<HH", self.image, 0x36)
        segments = []
        for i in range(count):
            kind, _, file_offset, address, _, file_size, memory_size, _ = struct.unpack_from(
                "<IIQQQQQQ", self.image, offset + entry_size * i
            )
            if kind == _PT_LOAD:
                data = self.image[file_offset : file_offset + file_size].ljust(memory_size, b"\0")
                segments.append(Segment(address, data))
        return segments

    def _parse_symbols(self) -> dict[str, Symbol]:
        symbols = {}
        for _, kind, _, _, offset, size, link, _, _, _ in self._sections:
            if kind not in (_SHT_SYMTAB, _SHT_DYNSYM):
                continue
            names = self._sections[link][4]
            for entry in range(offset, offset + size, 24):
                name_offset, _, _, _, value, symbol_size = struct.unpack_from(
                    "<IBBHQQ", self.image, entry
                )
                end = self.image.index(b"\0", names + name_offset)
                name = self.image[names + name_offset : end].decode()
                if name:
                    symbols[name] = Symbol(name, value, symbol_size)
        return symbols

    def _parse_metadata(self) -> dict[str, Any]:
        for _, kind, _, _, offset, size, *_ in self._sections:
            if kind != _SHT_NOTE:
                continue
            position = offset
            while position < offset + size:
                name_size, desc_size, note_type = struct.unpack_from("<III", self.image, position)
                desc = position + 12 + _align(name_size, 4)
                if note_type == _NT_AMDGPU_METADATA:
                    return _unpack_msgpack(self.image[desc : desc + desc_size])
                position = desc + _align(desc_size, 4)
        return {}

    def _parse_kernels(self) -> list[KernelInfo]:
        by_symbol = {
            kernel[".symbol"]: kernel for kernel in self.metadata.get("amdhsa.kernels", [])
        }
        kernels = []
        for symbol in self.symbols.values():
            if not symbol.name.endswith(".kd"):
                continue
            name = symbol.name.removesuffix(".kd")
            descriptor = KernelDescriptor.parse(
                symbol.value, self.read(symbol.value, _KERNEL_DESCRIPTOR_SIZE)
            )
            metadata = by_symbol.get(symbol.name, {})
            arguments = tuple(
                KernelArgument(arg[".offset"], arg[".size"], arg[".value_kind"])
                for arg in metadata.get(".args", [])
            )
            function = self.symbols.get(name)
            kernels.append(
                KernelInfo(name, descriptor, function.size if function else 0, arguments, metadata)
            )
        return kernels


def _align(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def _unpack_msgpack(data: bytes) -> Any:
    """Decode one MessagePack object (the subset that AMDGPU metadata uses)."""
    value, _ = _unpack_msgpack_at(data, 0)
    return value


_MSGPACK_FIXED = {
    0xCA: ">f", 0xCB: ">d",
    0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
    0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
_MSGPACK_LENGTH = {
    0xC4: (">B", "bin"), 0xC5: (">H", "bin"), 0xC6: (">I", "bin"),
    0xD9: (">B", "str"), 0xDA: (">H", "str"), 0xDB: (">I", "str"),
    0xDC: (">H", "array"), 0xDD: (">I", "array"),
    0xDE: (">H", "map"), 0xDF: (">I", "map"),
}  # fmt: skip


def _unpack_msgpack_at(data: bytes, position: int) -> tuple[Any, int]:
    tag = data[position]
    position += 1
    if tag < 0x80:
        return tag, position
    if tag >= 0xE0:
        return tag - 0x100, position
    if tag in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[tag], position
    if tag in _MSGPACK_FIXED:
        layout = _MSGPACK_FIXED[tag]
        return struct.unpack_from(layout, data, position)[0], position + struct.calcsize(layout)
    if tag < 0x90:
        kind, length = "map", tag & 0x0F
    elif tag < 0xA0:
        kind, length = "array", tag & 0x0F
    elif tag < 0xC0:
        kind, length = "str", tag & 0x1F
    elif tag in _MSGPACK_LENGTH:
        layout, kind = _MSGPACK_LENGTH[tag]
        (length,) = struct.unpack_from(layout, data, position)
        position += struct.calcsize(layout)
    else:
        raise ValueError(f"unsupported MessagePack tag 0x{tag:02x}")
    if kind in ("str", "bin"):
        raw = data[position : position + length]
        return (raw.decode() if kind == "str" else raw), position + length
    if kind == "array":
        items = []
        for _ in range(length):
            item, position = _unpack_msgpack_at(data, position)
            items.append(item)
        return items, position
    mapping = {}
    for _ in range(length):
        key, position = _unpack_msgpack_at(data, position)
        mapping[key], position = _unpack_msgpack_at(data, position)
    return mapping, position
