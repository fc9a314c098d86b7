# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Tile shapes and compiler settings of the Pallas Triton kernels."""

from __future__ import annotations

import dataclasses

from jaxfp8.ops.attention.base import Precision


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """How the attention kernel is tiled and compiled.

    Attributes:
      block_q: query rows of a tile, and the row count to which packed sequences are aligned.
      block_k: keys of a tile, likewise.
      num_warps: warps (64 lanes on AMD, 32 on NVIDIA) that share a tile.
      num_stages: depth of the compiler's load pipeline.
      permute_keys: read K's rows in the order that leaves each probability in the register where
        the second matrix product wants it.
      scores_first: in a tile, compute the next tile's scores before P V, not after it.
      splits: parts into which each tile's keys are split; None takes what schedule.py's model says.
    """

    block_q: int = 128
    block_k: int = 64
    num_warps: int = 4
    num_stages: int = 2
    permute_keys: bool = False
    scores_first: bool = False
    splits: int | None = None


@dataclasses.dataclass(frozen=True)
class Device:
    """What the order of a launch depends on.

    Attributes:
      slots: programs that run at a time.
      dies: parts of the GPU with an L2 cache each, to which programs go in turn.
    """

    slots: int
    dies: int = 1


# MI300X and MI325X: 304 compute units, two programs of 256 threads and 256 registers on each.
# H100 and H200: 132 multiprocessors. Elsewhere (interpret mode on a CPU) splitting gains nothing.
_DEVICES = {"gfx942": Device(slots=608, dies=8), "sm90": Device(slots=132)}


def device_of(arch: str) -> Device:
    """The device model of a target."""
    return _DEVICES.get(arch, Device(slots=1))


# Chosen by what XLA:ROCm of JAX 0.10.2, 0.11.2 and 0.12.0 makes of them: no spills, at most 256
# registers, so that two waves share a SIMD and hide each other's vector work.
#
# FP8: the 32x32x16 matrix instruction wants groups of 16 keys permuted. Scores first takes 227 to
# 250 registers, scores last up to 257.
#
# BF16: 32x32x8 wants no permutation. With 64 keys a tile Q, scores and prefetched keys together
# need about 300 registers; with 32 keys and scores last 246 to 250.
_GFX942: dict[Precision, KernelConfig] = {
    "fp8": KernelConfig(permute_keys=True, scores_first=True),
    "bf16": KernelConfig(block_k=32),
}


# Measured on one H200 with JAX 0.11.2, 12 heads, 4096 rows over 65,536 keys: FP8 7.5 ms (13.3 ms
# with four warps and 64 keys), BF16 6.1 ms (7.5 ms with four warps).
_NVIDIA: dict[Precision, KernelConfig] = {
    "fp8": KernelConfig(block_k=128, num_warps=8, num_stages=3),
    "bf16": KernelConfig(num_warps=8),
}


def default_config(arch: str, precision: Precision) -> KernelConfig:
    """The configuration for a target."""
    if arch.startswith("gfx94"):
        return _GFX942[precision]
    if arch.startswith("sm"):
        return _NVIDIA[precision]
    return KernelConfig()
