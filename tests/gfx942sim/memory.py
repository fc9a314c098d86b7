# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Global, local (LDS) and scratch memory.

Every load takes the byte addresses of the active lanes and returns uint32 rows of shape
[dwords, lanes]; every store takes such rows. Sub-dword loads zero-extend.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from tests.gfx942sim.errors import DataRace, MemoryFault

# Buffers get device addresses far apart, so that no 32-bit offset error can reach another buffer.
_FIRST_BUFFER_ADDRESS = 0x7000_0000_0000
_BUFFER_SPACING = 1 << 33
_ADDRESS_MASK = (1 << 48) - 1

SHARED_APERTURE = 0x2000_0000_0000_0000
PRIVATE_APERTURE = 0x1000_0000_0000_0000

_BYTE_STEPS = np.arange(16, dtype=np.int64)
_DWORD_STEPS = np.arange(4, dtype=np.int64)[:, None]


class MemoryRegion:
    """A contiguous byte array with vectorised gather and scatter."""

    def __init__(self, name: str, data: np.ndarray, base: int = 0, writable: bool = True):
        self.name = name
        self.base = base
        self.size = data.size
        self.writable = writable
        self.u8 = data
        self.u16 = data[: self.size // 2 * 2].view(np.uint16)
        self.u32 = data[: self.size // 4 * 4].view(np.uint32)

    def gather(self, offsets: np.ndarray, nbytes: int) -> np.ndarray:
        """Read `nbytes` (1, 2 or a multiple of 4) at each int64 offset."""
        if nbytes == 1:
            return self.u8[offsets].astype(np.uint32)[None]
        if nbytes == 2:
            if not (offsets & 1).any():
                return self.u16[offsets >> 1].astype(np.uint32)[None]
            return (
                self.u8[offsets].astype(np.uint32) | self.u8[offsets + 1].astype(np.uint32) << 8
            )[None]
        if not (offsets & 3).any():
            return self.u32[(offsets >> 2) + _DWORD_STEPS[: nbytes // 4]]
        return self.u8[offsets[:, None] + _BYTE_STEPS[:nbytes]].view(np.uint32).T

    def scatter(self, offsets: np.ndarray, rows: np.ndarray, nbytes: int) -> None:
        """Write `nbytes` at each int64 offset; among equal offsets the highest lane wins."""
        if nbytes == 1:
            self.u8[offsets] = rows[0]
        elif nbytes == 2:
            self.u8[offsets] = rows[0] & 0xFF
            self.u8[offsets + 1] = rows[0] >> 8 & 0xFF
        elif not (offsets & 3).any():
            self.u32[(offsets >> 2) + _DWORD_STEPS[: nbytes // 4]] = rows
        else:
            data = np.ascontiguousarray(rows.T).view(np.uint8)
            self.u8[offsets[:, None] + _BYTE_STEPS[:nbytes]] = data


class GlobalMemory:
    """Registered host buffers behind synthetic device addresses.

    A kernel that reads or writes outside every registered buffer gets a `MemoryFault`.
    """

    def __init__(self) -> None:
        self._regions: list[MemoryRegion] = []
        self._bases: list[int] = []
        self._next_address = _FIRST_BUFFER_ADDRESS
        self._known: dict[tuple[int, int, bool], int] = {}

    def register(self, array: np.ndarray, name: str = "buffer") -> int:
        """Make an array visible to kernels; return its device address.

        The array itself is read and written, so it must be C-contiguous. Registering the
        same array again returns the same address. Read-only arrays reject stores.
        """
        if not array.flags.c_contiguous:
            raise ValueError(f"{name}: only C-contiguous arrays can be registered")
        key = (array.ctypes.data, array.nbytes, array.flags.writeable)
        if key not in self._known:
            data = array.reshape(-1).view(np.uint8)
            self._known[key] = self._next_address
            self._insert(MemoryRegion(name, data, self._next_address, array.flags.writeable))
            self._next_address += -(-(data.size + 1) // _BUFFER_SPACING) * _BUFFER_SPACING
        return self._known[key]

    def map(self, data: np.ndarray, address: int, name: str) -> None:
        """Make bytes readable at a fixed address, in place of what was mapped there."""
        end = address + data.size
        self._regions = [r for r in self._regions if r.base + r.size <= address or end <= r.base]
        self._bases = [region.base for region in self._regions]
        self._insert(MemoryRegion(name, data, address, writable=False))

    def _insert(self, region: MemoryRegion) -> None:
        position = bisect_right(self._bases, region.base)
        self._bases.insert(position, region.base)
        self._regions.insert(position, region)

    def load(self, addresses: np.ndarray, nbytes: int) -> np.ndarray:
        region = self._common_region(addresses, nbytes)
        if region is not None:
            return region.gather((addresses - np.uint64(region.base)).astype(np.int64), nbytes)
        rows = np.empty((max(nbytes // 4, 1), addresses.size), np.uint32)
        for region, lanes in self._split_by_region(addresses, nbytes):
            offsets = (addresses[lanes] - np.uint64(region.base)).astype(np.int64)
            rows[:, lanes] = region.gather(offsets, nbytes)
        return rows

    def store(self, addresses: np.ndarray, rows: np.ndarray, nbytes: int) -> None:
        for region, lanes in self._split_by_region(addresses, nbytes):
            if not region.writable:
                raise MemoryFault(f"store of {nbytes} bytes to read-only {region.name}")
            offsets = (addresses[lanes] - np.uint64(region.base)).astype(np.int64)
            region.scatter(offsets, rows[:, lanes], nbytes)

    def load_scalar(self, address: int, dwords: int) -> list[int]:
        """Read consecutive dwords at one dword-aligned address."""
        address &= _ADDRESS_MASK
        region = self._region_at(address)
        if region is None or address + 4 * dwords > region.base + region.size:
            raise MemoryFault(f"scalar load of {4 * dwords} bytes at {self._describe(address)}")
        first = (address - region.base) >> 2
        return region.u32[first : first + dwords].tolist()

    def _region_at(self, address: int) -> MemoryRegion | None:
        position = bisect_right(self._bases, address) - 1
        return self._regions[position] if position >= 0 else None

    def _common_region(self, addresses: np.ndarray, nbytes: int) -> MemoryRegion | None:
        """The one region that holds all the accesses, if there is one."""
        lowest, highest = int(addresses.min()), int(addresses.max())
        region = self._region_at(lowest)
        if region is not None and highest + nbytes <= region.base + region.size:
            return region
        return None

    def _split_by_region(
        self, addresses: np.ndarray, nbytes: int
    ) -> list[tuple[MemoryRegion, np.ndarray | slice]]:
        """The regions touched, each with its lanes; raises if a lane is outside all of them."""
        if (region := self._common_region(addresses, nbytes)) is not None:
            return [(region, slice(None))]
        owners = np.searchsorted(np.array(self._bases, np.uint64), addresses, side="right") - 1
        parts = []
        for owner in np.unique(owners):
            lanes = np.nonzero(owners == owner)[0]
            if owner < 0:
                raise MemoryFault(
                    f"access of {nbytes} bytes at {self._describe(int(addresses[lanes[0]]))}"
                )
            region = self._regions[owner]
            ends = addresses[lanes] + np.uint64(nbytes)
            outside = lanes[ends > np.uint64(region.base + region.size)]
            if outside.size:
                raise MemoryFault(
                    f"access of {nbytes} bytes by {outside.size} lanes, the first at "
                    + self._describe(int(addresses[outside[0]]))
                )
            parts.append((region, lanes))
        return parts

    def _describe(self, address: int) -> str:
        region = self._region_at(address)
        if region is None:
            return f"0x{address:x}, which is below every buffer"
        offset = address - region.base
        return f"0x{address:x} = byte {offset} of {region.name}, which has {region.size} bytes"


class LocalMemory(MemoryRegion):
    """LDS of one workgroup, with an optional check for missing barriers.

    Waves of a workgroup are only ordered by barriers, so `detect_races` reports any byte that
    one wave writes and another wave touches between the same two barriers. Two waves may
    store equal bytes to one place. Atomics are exempt.
    """

    _SEVERAL_WAVES = -2

    def __init__(self, size: int, fill: int, detect_races: bool = False):
        data = np.full(-(-size // 4), fill, np.uint32).view(np.uint8)[:size]
        super().__init__("LDS", data)
        self.epoch = 0
        self._detect_races = detect_races
        if detect_races:
            self._write_epoch = np.full(size, -1, np.int32)
            self._writer = np.full(size, -1, np.int16)
            self._read_epoch = np.full(size, -1, np.int32)
            self._reader = np.full(size, -1, np.int16)

    def load(self, wave: int, offsets: np.ndarray, nbytes: int) -> np.ndarray:
        self._check_bounds(offsets, nbytes)
        if self._detect_races:
            self._check_read(wave, (offsets[:, None] + _BYTE_STEPS[:nbytes]).ravel())
        return self.gather(offsets, nbytes)

    def store(self, wave: int, offsets: np.ndarray, rows: np.ndarray, nbytes: int) -> None:
        self._check_bounds(offsets, nbytes)
        if not self._detect_races:
            self.scatter(offsets, rows, nbytes)
            return
        touched = (offsets[:, None] + _BYTE_STEPS[:nbytes]).ravel()
        before = self.u8[touched]
        self.scatter(offsets, rows, nbytes)
        self._check_write(wave, touched, before != self.u8[touched])

    def load_atomic(self, offsets: np.ndarray, nbytes: int) -> np.ndarray:
        self._check_bounds(offsets, nbytes)
        return self.gather(offsets, nbytes)

    def _check_bounds(self, offsets: np.ndarray, nbytes: int) -> None:
        if int(offsets.max()) + nbytes > self.size:
            raise MemoryFault(
                f"LDS access of {nbytes} bytes at {int(offsets.max())}; LDS has {self.size} bytes"
            )

    def _check_read(self, wave: int, touched: np.ndarray) -> None:
        racing = (self._write_epoch[touched] == self.epoch) & (self._writer[touched] != wave)
        self._report(racing, touched, self._writer, f"wave {wave} reads what wave {{}} wrote")
        shared = (self._read_epoch[touched] == self.epoch) & (self._reader[touched] != wave)
        self._reader[touched] = np.where(shared, self._SEVERAL_WAVES, wave)
        self._read_epoch[touched] = self.epoch

    def _check_write(self, wave: int, touched: np.ndarray, changed: np.ndarray) -> None:
        rewritten = (
            changed & (self._write_epoch[touched] == self.epoch) & (self._writer[touched] != wave)
        )
        self._report(
            rewritten, touched, self._writer, f"wave {wave} overwrites what wave {{}} wrote"
        )
        read = changed & (self._read_epoch[touched] == self.epoch) & (self._reader[touched] != wave)
        self._report(read, touched, self._reader, f"wave {wave} overwrites what wave {{}} read")
        self._writer[touched] = wave
        self._write_epoch[touched] = self.epoch

    def _report(
        self, racing: np.ndarray, touched: np.ndarray, owner: np.ndarray, problem: str
    ) -> None:
        if racing.any():
            byte = int(touched[np.argmax(racing)])
            other = int(owner[byte])
            who = "another" if other == self._SEVERAL_WAVES else str(other)
            raise DataRace(f"LDS byte {byte}: {problem.format(who)} with no barrier in between")


class ScratchMemory:
    """Private memory of the 64 lanes of one wave; offsets are per lane."""

    def __init__(self, bytes_per_lane: int, lanes: int, fill: int):
        self._bytes_per_lane = bytes_per_lane
        self._region = MemoryRegion(
            "scratch", np.full(-(-bytes_per_lane // 4) * lanes, fill, np.uint32).view(np.uint8)
        )
        self._stride = -(-bytes_per_lane // 4) * 4

    def load(self, lanes: np.ndarray, offsets: np.ndarray, nbytes: int) -> np.ndarray:
        return self._region.gather(self._locate(lanes, offsets, nbytes), nbytes)

    def store(self, lanes: np.ndarray, offsets: np.ndarray, rows: np.ndarray, nbytes: int) -> None:
        self._region.scatter(self._locate(lanes, offsets, nbytes), rows, nbytes)

    def _locate(self, lanes: np.ndarray, offsets: np.ndarray, nbytes: int) -> np.ndarray:
        if int(offsets.min()) < 0 or int(offsets.max()) + nbytes > self._bytes_per_lane:
            raise MemoryFault(
                f"scratch access of {nbytes} bytes at {int(offsets.max())}; "
                f"a lane has {self._bytes_per_lane} bytes"
            )
        return lanes.astype(np.int64) * self._stride + offsets
