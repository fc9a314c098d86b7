# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Architectural state of one wave of 64 lanes, and of the workgroup that it belongs to."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from tests.gfx942sim.errors import UnsupportedInstruction
from tests.gfx942sim.memory import GlobalMemory, LocalMemory, ScratchMemory

WAVE_SIZE = 64
ALL_LANES = (1 << WAVE_SIZE) - 1
LANE_IDS = np.arange(WAVE_SIZE, dtype=np.uint32)

SGPR_COUNT = 128  # s0..s101, then FLAT_SCRATCH, XNACK_MASK, VCC, TTMPs, M0 and EXEC
VCC = 106
M0 = 124
EXEC = 126

MODE_ROUND = 0x0F
MODE_DENORM_F32 = 0x30
MODE_DENORM_F16_F64 = 0xC0
MODE_DX10_CLAMP = 1 << 8
MODE_IEEE = 1 << 9
MODE_FP16_OVFL = 1 << 23


@lru_cache(maxsize=4096)
def lanes_of(mask: int) -> np.ndarray:
    """A 64-bit lane mask as a read-only bool array."""
    packed = np.frombuffer(mask.to_bytes(8, "little"), np.uint8)
    lanes = np.unpackbits(packed, bitorder="little").view(np.bool_)
    lanes.flags.writeable = False
    return lanes


def mask_of(lanes: np.ndarray) -> int:
    """A bool array of 64 lanes as a 64-bit mask."""
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")


@dataclass
class TrafficCounters:
    """Bytes that active lanes moved."""

    global_load_bytes: int = 0
    global_store_bytes: int = 0
    lds_load_bytes: int = 0
    lds_store_bytes: int = 0


@dataclass
class Workgroup:
    """State that the waves of one workgroup share."""

    ids: tuple[int, int, int]
    memory: GlobalMemory
    lds: LocalMemory
    traffic: TrafficCounters = field(default_factory=TrafficCounters)


class Wave:
    """Registers of one wave.

    Vector registers are rows of one array of shape [rows, 64], the unified register file:
    v0 is row 0 and a0 is row `accum_offset`. `u32`, `i32` and `f32` are lists of its rows.
    """

    __slots__ = (
        "exec_full",
        "exec_lanes",
        "f32",
        "i32",
        "index",
        "mode",
        "pc",
        "scc",
        "scratch",
        "sgpr",
        "u32",
        "vgpr",
        "vgpr16",
        "vgpr_f32",
        "workgroup",
    )  # fmt: skip

    def __init__(
        self, index: int, workgroup: Workgroup, scratch: ScratchMemory, vgpr_rows: int, fill: int
    ):
        self.index = index
        self.workgroup = workgroup
        self.scratch = scratch
        self.vgpr = np.full((vgpr_rows, WAVE_SIZE), fill, np.uint32)
        self.vgpr16 = self.vgpr.view(np.uint16)
        self.vgpr_f32 = self.vgpr.view(np.float32)
        self.u32 = list(self.vgpr)
        self.i32 = list(self.vgpr.view(np.int32))
        self.f32 = list(self.vgpr_f32)
        self.sgpr = [fill] * SGPR_COUNT
        self.scc = 0
        self.pc = 0
        self.mode = 0
        self.set_exec(ALL_LANES)

    def get_s64(self, index: int) -> int:
        return self.sgpr[index] | self.sgpr[index + 1] << 32

    def set_s32(self, index: int, value: int) -> None:
        """Write one SGPR with a value in [0, 2**32)."""
        self.sgpr[index] = value
        if index >= EXEC:
            self._update_exec()

    def set_s64(self, index: int, value: int) -> None:
        """Write an SGPR pair with a value in [0, 2**64)."""
        self.sgpr[index] = value & 0xFFFFFFFF
        self.sgpr[index + 1] = value >> 32
        if index == EXEC:
            self._update_exec()

    @property
    def exec(self) -> int:
        return self.get_s64(EXEC)

    def set_exec(self, mask: int) -> None:
        self.set_s64(EXEC, mask)

    def _update_exec(self) -> None:
        mask = self.exec
        self.exec_lanes = lanes_of(mask)
        self.exec_full = mask == ALL_LANES

    @property
    def vcc_lanes(self) -> np.ndarray:
        return lanes_of(self.get_s64(VCC))

    @property
    def fp16_ovfl(self) -> bool:
        return bool(self.mode & MODE_FP16_OVFL)

    @property
    def flushes_f32(self) -> bool:
        return self.mode & MODE_DENORM_F32 != MODE_DENORM_F32

    def set_mode(self, mode: int) -> None:
        """Write MODE. Its IEEE and DX10_CLAMP bits are taken to be set, as compilers set them."""
        if mode & MODE_ROUND:
            raise UnsupportedInstruction(
                f"MODE 0x{mode:x}: only round-to-nearest-even is simulated"
            )
        if mode & MODE_DENORM_F16_F64 != MODE_DENORM_F16_F64:
            raise UnsupportedInstruction(
                f"MODE 0x{mode:x}: f16/f64 denormal flushing is not simulated"
            )
        if mode & MODE_DENORM_F32 not in (0, MODE_DENORM_F32):
            raise UnsupportedInstruction(
                f"MODE 0x{mode:x}: f32 denormals must be flushed for both inputs and outputs"
            )
        self.mode = mode

    def write(self, row: np.ndarray, value: np.ndarray) -> None:
        """Write the active lanes of a register row (or of a stack of rows)."""
        if self.exec_full:
            row[...] = value
        else:
            np.copyto(row, value, where=self.exec_lanes, casting="unsafe")

    def __str__(self) -> str:
        return f"workgroup {self.workgroup.ids} wave {self.index}"
