# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""`jaxfp8 codegen`: what the library's kernels compile to on gfx942, seen without a GPU."""

from __future__ import annotations

import argparse
import fnmatch
import json
from pathlib import Path
from typing import Any

from jaxfp8.cli import REFUSED, CommandError, require_place_for

_DESCRIPTION = """
Compiles the kernels with XLA:ROCm, which needs no GPU, and prints registers, LDS, occupancy and
instruction counts.
"""
_EPILOG = """
A line of the table is a loop with matrix instructions (full: every key of the tile is seen;
masked: some may not be), or the whole of a kernel that has none. MFMA, VALU and trans count
instructions of one wave and pass; vector/MFMA compares their clocks (4 a vector instruction, 16 a
transcendental; 32 a 32x32 matrix instruction, 16 a 16x16 one); load B is the narrowest load of a
lane in bytes; waves is how many fit on a SIMD.
"""


def add_parser(subparsers: Any) -> None:
    """Adds the `codegen` command to what ArgumentParser.add_subparsers returned."""
    parser = subparsers.add_parser(
        "codegen",
        help="compile the kernels for gfx942, without a GPU",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--save-dir",
        type=Path,
        metavar="DIR",
        help="write NAME.hsaco, the code object, and NAME.json, how to launch it, for each kernel",
    )
    parser.add_argument("--json", metavar="FILE", help="write all counts here")
    parser.add_argument(
        "--kernel",
        action="append",
        metavar="NAME",
        help="only this kernel; may be repeated, and may be a pattern such as 'attention_*'",
    )
    parser.add_argument("--list", action="store_true", help="print the kernels' names and stop")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
      The exit status, 0.

    Raises:
      CommandError: there is no such kernel, a path cannot be written, or something that
        compilation needs is missing.
    """
    import jax
    from tqdm import tqdm

    from jaxfp8.rocm.errors import MissingToolError
    from jaxfp8.rocm.kernels import KernelSpec, compile_kernel, kernel_specs
    from jaxfp8.rocm.plugin import start_on_cpu
    from jaxfp8.rocm.report import counts_as_json, save, table, write_atomically

    def chosen(spec: KernelSpec) -> bool:
        patterns = args.kernel or ["*"]
        return any(fnmatch.fnmatchcase(spec.name, pattern) for pattern in patterns)

    all_specs = kernel_specs()
    for pattern in args.kernel or []:
        if not any(fnmatch.fnmatchcase(spec.name, pattern) for spec in all_specs):
            names = ", ".join(spec.name for spec in all_specs)
            raise CommandError(f"--kernel {pattern}: there is no such kernel, only {names}")
    specs = [spec for spec in all_specs if chosen(spec)]
    if args.list:
        print("\n".join(spec.name for spec in specs))
        return 0
    if args.save_dir:
        args.save_dir.mkdir(parents=True, exist_ok=True)
    require_place_for("--json", args.json)
    start_on_cpu()
    compiled = []
    try:
        for spec in tqdm(specs, unit="kernel", leave=False, disable=None):
            for kernel in compile_kernel(spec):
                compiled.append(kernel)
                if args.save_dir:
                    save(kernel, args.save_dir)
        counts = [counts_as_json(kernel) for kernel in compiled]
        print(f"gfx942, compiled by XLA:ROCm of JAX {jax.__version__}; not run")
        print(table(compiled))
    except MissingToolError as error:
        raise CommandError(str(error), REFUSED) from None
    if args.json:
        write_atomically(Path(args.json), (json.dumps(counts, indent=1) + "\n").encode())
    return 0
