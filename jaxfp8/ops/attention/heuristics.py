# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Tile shapes and compiler settings of the Pallas Triton kernels."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """How the attention kernel is tiled and compiled.

    Attributes:
      block_q: query rows of a tile, and the row count to which packed sequences are aligned.
      block_k: keys of a tile, likewise.
      num_warps: warps (64 lanes on AMD, 32 on NVIDIA) that share a tile.
      num_stages: depth of the compiler's load pipeline.
      permute_keys: read K's rows in the order that leaves each probability in the register where
        the second matrix product wants it. True where matrix instructions are AMD's 32x32 ones.
    """

    block_q: int = 128
    block_k: int = 64
    num_warps: int = 4
    num_stages: int = 2
    permute_keys: bool = False


def default_config(arch: str) -> KernelConfig:
    """The configuration for a target."""
    return KernelConfig(permute_keys=arch.startswith("gfx94"))
