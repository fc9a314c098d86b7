# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""What `jaxfp8 codegen` says of a compiled kernel: table rows, JSON, files."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxfp8.rocm.kernels import LibraryKernel
from jaxfp8.rocm.loops import LoopReport

_HEADER = (
    "kernel", "loop", "VGPR", "AGPR", "SGPR", "spills", "scratch", "LDS", "waves", "MFMA", "VALU",
    "trans", "vector/MFMA", "LDS ops", "memory", "load B", "barriers",
)  # fmt: skip


def counts_as_json(compiled: LibraryKernel) -> dict[str, Any]:
    """One entry of the `--json` list: registers, LDS, occupancy and loop counts of a kernel.

    Beside the keys of the contract it has "total", the counts of the whole kernel with every
    instruction once, and "grid" and "block_threads" of the launch.
    """
    kernel = compiled.kernel
    return {
        "kernel": compiled.name,
        "op": compiled.spec.op,
        "precision": compiled.spec.precision,
        "jax": jax.__version__,
        "config": compiled.config,
        "vgpr": kernel.vgpr,
        "agpr": kernel.agpr,
        "sgpr": kernel.sgpr,
        "spills": kernel.spills,
        "scratch_bytes": kernel.scratch_bytes,
        "lds_bytes": kernel.lds_bytes,
        "waves_per_simd": kernel.waves_per_simd,
        "grid": list(kernel.grid),
        "block_threads": kernel.block_threads,
        "loops": [dataclasses.asdict(loop) for loop in kernel.loops],
        "total": dataclasses.asdict(kernel.total),
    }


def launch_as_json(compiled: LibraryKernel) -> dict[str, Any]:
    """NAME.json: what it takes to launch NAME.hsaco by hand or in a simulator.

    Beside the keys of the contract it has "symbol", the kernel's name in the code object, and
    "same_as" in an argument that is the memory of the earlier one it names.
    """
    kernel = compiled.kernel
    args: list[dict[str, Any]] = []
    for arg in kernel.args:
        args.append({"name": arg.name, "shape": list(arg.shape), "dtype": str(arg.dtype)})
        if arg.same_as is not None:
            args[-1]["same_as"] = arg.same_as
    return {
        "kernel": compiled.name,
        "symbol": kernel.name,
        "grid": list(kernel.grid),
        "block_threads": kernel.block_threads,
        "dynamic_lds_bytes": kernel.dynamic_lds_bytes,
        "args": args,
        "jax": jax.__version__,
        "config": compiled.config,
    }


def save(compiled: LibraryKernel, folder: Path) -> None:
    """Writes NAME.hsaco and NAME.json into the folder."""
    write_atomically(folder / f"{compiled.name}.hsaco", compiled.kernel.code_object)
    text = json.dumps(launch_as_json(compiled), indent=1)
    write_atomically(folder / f"{compiled.name}.json", (text + "\n").encode())


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file so that a failure leaves what was there before."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def table(kernels: Sequence[LibraryKernel]) -> str:
    """One line a loop with matrix instructions; a kernel without any has its totals."""
    rows = [row for compiled in kernels for row in _rows(compiled)]
    widths = [max(len(row[i]) for row in [_HEADER, *rows]) for i in range(len(_HEADER))]
    lines = []
    for row in [_HEADER, *rows]:
        cells = [
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _rows(compiled: LibraryKernel) -> list[tuple[str, ...]]:
    kernel = compiled.kernel
    loops = [loop for loop in kernel.loops if loop.mfma]
    registers = (
        kernel.vgpr, kernel.agpr, kernel.sgpr, kernel.spills, kernel.scratch_bytes,
        kernel.lds_bytes, kernel.waves_per_simd,
    )  # fmt: skip
    shown: list[tuple[str, LoopReport]] = [(loop.kind, loop) for loop in loops]
    rows = []
    for name, loop in shown or [("(all)", kernel.total)]:
        ratio = f"{loop.vector_clocks / loop.mfma_clocks:.3f}" if loop.mfma_clocks else "-"
        counts = (
            loop.mfma, loop.valu, loop.transcendental, ratio, loop.lds, loop.memory,
            loop.narrowest_load_bytes or "-", loop.barrier,
        )  # fmt: skip
        rows.append((compiled.name, name, *map(str, registers + counts)))
    return rows
