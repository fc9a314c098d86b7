# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""How long attention would take on an MI300X, by a model. Nothing here is a measurement.

    python benchmarks/gfx942_model.py
    python benchmarks/gfx942_model.py --cases=mid --precisions=fp8 --json=model.jsonl

The kernels are compiled for gfx942 (no GPU is needed) and their instructions counted. The model:

- A program has one wave on each of a compute unit's 4 SIMDs. On one key tile the wave holds the
  matrix unit for M clocks and the vector unit for V (the counts of its loop at the rates of
  jaxfp8/rocm/instructions.py).
- A wave that has its SIMD to itself takes M + V: matrix and vector work of one wave alternate. Two
  waves overlap, and take max(2 M, 2 V, M + V) / overlap for a tile of each.
- Before and after its tiles a program spends the issue clocks of the code outside its loops, and
  --start_clocks until its first operands have come from memory.
- Programs start in the library's own order, program i on die i mod 8, on the first slot of that die
  that is free. So tails, rounds and tiles of unequal length are counted.
- The key splits are merged at the bandwidth of the memory: partial outputs written and read once.

Left out: waits for LDS and memory within the loop, scalar instructions, and the power limit, under
which the clock falls below 2.1 GHz. Beside the model's time stand lower bounds: the matrix unit
alone on all compute units, and the traffic of L2 and memory. Bandwidths and peaks are published
ones (AMD CDNA3 white paper, MI300X data sheet). `sustained_gemm_ms` is the time of as many FLOPs at
the rate that GEMMs sustain on the real device: expect no less.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from common.program import Recorder, choose, run

from jaxfp8.ops.attention import pallas_triton_kernel as kernel
from jaxfp8.ops.attention.heuristics import KernelConfig, default_config, device_of
from jaxfp8.ops.attention.schedule import choose_splits, program_order
from jaxfp8.rocm.kernels import LibraryKernel, compile_kernel, kernel_specs
from jaxfp8.rocm.loops import LoopReport
from jaxfp8.rocm.plugin import start_on_cpu

_ARCH = "gfx942"
_DIES, _UNITS_PER_DIE, _SIMDS = 8, 38, 4
_MEMORY_BYTES_PER_SECOND = 5.3e12
_L2_BYTES_PER_CLOCK_AND_DIE = 2048
_QK_HEAD_DIM, _V_HEAD_DIM = 192, 128
# TFLOP/s that large GEMMs sustain on an MI300X, published by the vendor: about half of the peak,
# since power does not allow 2.1 GHz with all matrix units at work.
_SUSTAINED_GEMM_TFLOPS = {"fp8": 1273, "bf16": 708}


@dataclasses.dataclass(frozen=True)
class Case:
    """One sequence."""

    tokens_q: int
    tokens_k: int
    causal: bool


_CASES = {
    "mid": Case(4096, 65536, False),
    "mid_causal": Case(4096, 65536, True),
    "4k": Case(4096, 4096, True),
}

_SELECTED = flags.DEFINE_list("cases", list(_CASES), f"which of {', '.join(_CASES)}")
_PRECISIONS = flags.DEFINE_list("precisions", ["fp8", "bf16"], "fp8, bf16 or both")
_HEADS = flags.DEFINE_integer("heads", 12, "heads", lower_bound=1)
_SPLITS = flags.DEFINE_integer(
    "splits", None, "key splits; what the library takes if not given", lower_bound=1
)
_GHZ = flags.DEFINE_float("ghz", 2.1, "clock", lower_bound=0.1)
_OVERLAP = flags.DEFINE_float(
    "overlap", 0.98, "of the overlap of two waves that the model finds, how much there is", 0.1, 1
)
_START_CLOCKS = flags.DEFINE_integer(
    "start_clocks", 2000, "until a program's first operands are there; assumed", lower_bound=0
)


def main(recorder: Recorder) -> None:
    """Models every case and precision."""
    cases = choose("cases", _SELECTED.value, _CASES)
    precisions = choose("precisions", _PRECISIONS.value, ("fp8", "bf16"))
    start_on_cpu()
    print(f"A model of an MI300X at {_GHZ.value} GHz, code of JAX {jax.__version__}; not measured")
    for precision in precisions:
        for name in cases:
            case = _CASES[name]
            recorder.add(
                what="model",
                case=name,
                shape={**dataclasses.asdict(case), "heads": _HEADS.value},
                dtype="float8_e4m3fnuz" if precision == "fp8" else "bf16",
                backend="pallas_triton",
                device=f"model of MI300X, {_GHZ.value} GHz",
                details={"precision": precision, **model(case, precision)},
            )


def model(case: Case, precision: Any) -> dict[str, Any]:
    """The modelled milliseconds of a case, and the lower bounds."""
    config, device = default_config(_ARCH, precision), device_of(_ARCH)
    splits = _SPLITS.value or choose_splits(
        _HEADS.value, case.tokens_q, case.tokens_k, 1, _V_HEAD_DIM, case.causal, config, device
    )
    name = f"attention_{precision}{'_causal' if case.causal else ''}"
    compiled = _compile(name if splits > 1 else f"{name}_unsplit")
    jobs = [_job(compiled, *tiles) for tiles in _tiles(case, config, splits)]
    seconds = max(run_die(jobs[die::_DIES]) for die in range(_DIES)) / (_GHZ.value * 1e9)
    merge = 0.0
    if splits > 1:
        partials = 4 * splits * case.tokens_q * _HEADS.value * _V_HEAD_DIM
        merge = 2 * partials / _MEMORY_BYTES_PER_SECOND

    macs = _HEADS.value * _visible(case) * (_QK_HEAD_DIM + _V_HEAD_DIM)
    element = 1 if precision == "fp8" else 2
    matrix = sum(job.matrix for job in jobs) / (_DIES * _UNITS_PER_DIE) / (_GHZ.value * 1e9)
    tile_bytes = element * config.block_k * (_QK_HEAD_DIM + _V_HEAD_DIM)
    l2_rate = _L2_BYTES_PER_CLOCK_AND_DIE * _DIES * _GHZ.value * 1e9
    l2 = tile_bytes * sum(job.tiles for job in jobs) / l2_rate
    once = element * _HEADS.value * case.tokens_k * (_QK_HEAD_DIM + _V_HEAD_DIM)
    total = seconds + merge
    return {
        "splits": splits,
        "programs": sum(job.tiles > 0 for job in jobs),
        "model_ms": 1e3 * total,
        "merge_ms": 1e3 * merge,
        "model_tflops": 2 * macs / total / 1e12,
        "mfma_bound_ms": 1e3 * matrix,
        "l2_bound_ms": 1e3 * l2,
        "memory_bound_ms": 1e3 * once / _MEMORY_BYTES_PER_SECOND,
        "fraction_of_mfma_bound": matrix / total,
        "sustained_gemm_ms": 2 * macs / _SUSTAINED_GEMM_TFLOPS[precision] / 1e9,
    }


@dataclasses.dataclass(frozen=True)
class Job:
    """A program, in clocks of one of its waves.

    Attributes:
      alone: with its compute unit to itself.
      shared: beside another such program.
      matrix: of the matrix unit.
      tiles: key tiles.
    """

    alone: float
    shared: float
    matrix: float
    tiles: int


def _job(compiled: LibraryKernel, full: int, masked: int) -> Job:
    """A program that has `full` and `masked` key tiles to do."""
    if full + masked == 0:
        return Job(0.0, 0.0, 0.0, 0)
    loops = {loop.kind: loop for loop in compiled.kernel.loops if loop.mfma}
    total = compiled.kernel.total
    outside = total.mfma_clocks + total.vector_clocks
    outside -= sum(loop.mfma_clocks + loop.vector_clocks for loop in loops.values())
    alone = shared = float(outside + _START_CLOCKS.value)
    matrix = 0.0
    for loop, count in ((loops["full"], full), (loops["masked"], masked)):
        alone += count * (loop.mfma_clocks + loop.vector_clocks)
        shared += count * _two_waves(loop)
        matrix += count * loop.mfma_clocks
    return Job(alone, shared, matrix, full + masked)


def _two_waves(loop: LoopReport) -> float:
    """Clocks in which two waves on one SIMD both do a tile."""
    matrix, vector = loop.mfma_clocks, loop.vector_clocks
    return max(2 * matrix, 2 * vector, matrix + vector) / _OVERLAP.value


def run_die(jobs: Sequence[Job]) -> float:
    """Clocks until the last program of a die ends: two slots a compute unit, taken in order.

    A program does 1 / shared of its work a clock while its unit has another, else 1 / alone.
    """
    waiting = iter([job for job in jobs if job.tiles])
    units: list[list[list[Any]]] = [[] for _ in range(_UNITS_PER_DIE)]  # of [job, work left]
    since = [0.0] * _UNITS_PER_DIE

    def rate(unit: int, job: Job) -> float:
        return 1 / (job.shared if len(units[unit]) > 1 else job.alone)

    def advance(unit: int, now: float) -> None:
        for entry in units[unit]:
            entry[1] -= (now - since[unit]) * rate(unit, entry[0])
        since[unit] = now

    ends: list[tuple[float, int, int]] = []  # time, unit, version of the unit's content
    version = [0] * _UNITS_PER_DIE

    def expect(unit: int) -> None:
        version[unit] += 1
        if units[unit]:
            left = min(entry[1] / rate(unit, entry[0]) for entry in units[unit])
            heapq.heappush(ends, (since[unit] + max(left, 0.0), unit, version[unit]))

    for _ in range(2):
        for unit in range(_UNITS_PER_DIE):
            if (job := next(waiting, None)) is not None:
                units[unit].append([job, 1.0])
    for unit in range(_UNITS_PER_DIE):
        expect(unit)
    now = 0.0
    while ends:
        time, unit, of = heapq.heappop(ends)
        if of != version[unit]:
            continue
        now = time
        advance(unit, now)
        done = min(units[unit], key=lambda entry: entry[1])
        units[unit].remove(done)
        if (job := next(waiting, None)) is not None:
            units[unit].append([job, 1.0])
        expect(unit)
    return now


def _tiles(case: Case, config: KernelConfig, splits: int) -> list[tuple[int, int]]:
    """(full, masked) key tiles of every program, in the order of their launch."""
    cu_q = jnp.array([0, case.tokens_q], jnp.int32)
    cu_k = jnp.array([0, case.tokens_k], jnp.int32)
    table = np.asarray(
        kernel.work_table(cu_q, cu_k, case.tokens_q, causal=case.causal, config=config)
    )
    num_tiles = table.shape[1] - 1
    order = program_order(_HEADS.value, splits, num_tiles, _DIES, case.causal)
    programs = []
    for item in order.tolist():
        pair, rank = divmod(item, num_tiles + 1)
        first, full, end = (
            int(table[row, rank]) for row in (kernel._FIRST, kernel._FULL, kernel._END)
        )
        split = pair % splits
        begin = first + (end - first) * split // splits
        stop = first + (end - first) * (split + 1) // splits
        unmasked = min(max(full, begin), stop) - begin
        programs.append((unmasked, stop - begin - unmasked))
    return programs


def _visible(case: Case) -> int:
    """Pairs of query and key that a head computes."""
    if not case.causal:
        return case.tokens_q * case.tokens_k
    seen = np.arange(case.tokens_q) + 1 + case.tokens_k - case.tokens_q
    return int(np.clip(seen, 0, case.tokens_k).sum())


_COMPILED: dict[str, LibraryKernel] = {}


def _compile(name: str) -> LibraryKernel:
    if name not in _COMPILED:
        (spec,) = [spec for spec in kernel_specs() if spec.name == name]
        (_COMPILED[name],) = compile_kernel(spec)
    return _COMPILED[name]


if __name__ == "__main__":
    run("gfx942_model", main)
