# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Tile shapes and compiler settings of the Pallas Triton kernels.

One table, by target, precision and head dim. A file `tuned.json` beside this module, which
benchmarks/tune.py writes, takes precedence over it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from jaxfp8.ops.attention.base import Precision

TUNED_FILE = Path(__file__).with_name("tuned.json")
"""{"gfx942/fp8/192": {"block_q": 128, …}, …}: fields of KernelConfig, those left out default."""


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


# gfx942: chosen by what XLA:ROCm of JAX 0.10.2, 0.11.2 and 0.12.0 makes of them: no spills, at most
# 256 registers, so that two waves share a SIMD and hide each other's vector work. V's head dim is
# 128 in all.
#
# FP8: the 32x32x16 matrix instruction wants groups of 16 keys permuted. Scores first takes fewer
# registers than scores last, which passes 256 on one of the three.
#
# BF16: 32x32x8 wants no permutation. With 64 keys a tile Q, scores and prefetched keys together
# need about 300 registers at head dim 192 and 280 at 128. Scores first takes fewer vector
# instructions; at head dim 192 there are not the registers for it.
#
# Elsewhere: the defaults of KernelConfig, which are tested on an H200. Timed there once, 12 heads,
# 4096 rows over 65,536 keys: FP8 13.3 ms, BF16 7.5 ms. Faster there, but their numbers not checked:
# FP8 with 128 keys, 8 warps and 3 stages 7.5 ms; BF16 with 8 warps 6.1 ms.
_TABLE: dict[tuple[str, Precision, int], KernelConfig] = {
    ("gfx942", "fp8", 192): KernelConfig(permute_keys=True, scores_first=True),
    ("gfx942", "fp8", 128): KernelConfig(permute_keys=True, scores_first=True),
    ("gfx942", "bf16", 192): KernelConfig(block_k=32),
    ("gfx942", "bf16", 128): KernelConfig(block_k=32, scores_first=True),
}


def default_config(arch: str, precision: Precision, qk_head_dim: int = 192) -> KernelConfig:
    """The configuration for a target.

    Raises:
      ValueError: there is a TUNED_FILE, and it is not sound.
    """
    tuned = _tuned().get(f"{arch}/{precision}/{qk_head_dim}")
    return tuned or _TABLE.get((arch, precision, qk_head_dim), KernelConfig())


@functools.cache
def _tuned() -> dict[str, KernelConfig]:
    return load_configs(TUNED_FILE) if TUNED_FILE.exists() else {}


def load_configs(path: Path) -> dict[str, KernelConfig]:
    """Reads a file of the form of TUNED_FILE.

    Raises:
      ValueError: it is no JSON object of objects, a field is unknown, or a value is out of range.
    """
    try:
        table = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON: {error}") from None
    if not isinstance(table, dict):
        raise ValueError(f"{path}: expected an object, got {type(table).__name__}")
    return {key: _config_from_json(f"{path}: {key}", fields) for key, fields in table.items()}


def configs_to_json(configs: dict[str, KernelConfig]) -> str:
    """The text of a file that `load_configs` reads."""
    table = {key: dataclasses.asdict(config) for key, config in sorted(configs.items())}
    return json.dumps(table, indent=2) + "\n"


def _config_from_json(where: str, fields: Any) -> KernelConfig:
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: expected an object, got {type(fields).__name__}")
    known = {field.name for field in dataclasses.fields(KernelConfig)}
    for name, value in fields.items():
        if name not in known:
            raise ValueError(f"{where}: unknown field {name!r}; known: {', '.join(sorted(known))}")
        if name in ("permute_keys", "scores_first"):
            sound, expected = isinstance(value, bool), "true or false"
        else:
            integer = isinstance(value, int) and not isinstance(value, bool)
            sound, expected = integer and value >= 1, "an integer of at least 1"
            if name == "splits":
                sound, expected = sound or value is None, f"{expected}, or null"
            elif name in ("block_q", "block_k", "num_warps"):
                sound = sound and value & (value - 1) == 0
                expected = f"{expected} that is a power of two"
        if not sound:
            raise ValueError(f"{where}: {name}: expected {expected}, got {value!r}")
    if fields.get("permute_keys") and fields.get("block_k", KernelConfig.block_k) % 16:
        raise ValueError(f"{where}: permute_keys: expected block_k to be a multiple of 16")
    return KernelConfig(**fields)
