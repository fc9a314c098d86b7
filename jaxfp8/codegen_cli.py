# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""`jaxfp8 codegen`: what the library's kernels compile to on gfx942, seen without a GPU."""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from pathlib import Path
from typing import Any

_EPILOG = """
A line of the table is a loop with matrix instructions (full: every key of the tile is seen;
masked: some may not be), or the whole of a kernel that has none. MFMA, VALU and trans count
instructions of one wave and pass; vector/MFMA compares their clocks (4 a vector instruction, 16 a
transcendental; 32 a 32x32 matrix instruction, 16 a 16x16 one); load B is the narrowest load of a
lane in bytes; waves is how many fit on a SIMD.
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand; the parsed arguments carry its function as `func(args) -> int`."""
    parser = subparsers.add_parser(
        "codegen",
        help="compile the kernels for gfx942 and show registers and instruction counts",
        description=__doc__,
        epilog=_EPILOG,
    )
    _add_arguments(parser)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--save-dir", type=Path, metavar="DIR", help="write NAME.hsaco and NAME.json here"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all counts here")
    parser.add_argument(
        "--kernel",
        action="append",
        metavar="NAME",
        help="only this kernel; may be repeated, and may be a pattern such as 'attention_*'",
    )
    parser.add_argument("--list", action="store_true", help="print the kernels' names and stop")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand: 0, 1 where a kernel cannot be compiled, 2 for a wrong argument."""
    # Imported here, so that `jaxfp8 --help` does without JAX.
    import jax

    from jaxfp8.rocm.errors import MissingToolError
    from jaxfp8.rocm.kernels import compile_kernel, kernel_specs
    from jaxfp8.rocm.plugin import start_on_cpu
    from jaxfp8.rocm.report import counts_as_json, save, table, write_atomically

    specs = kernel_specs()
    if args.kernel:
        for pattern in args.kernel:
            if not any(fnmatch.fnmatchcase(spec.name, pattern) for spec in specs):
                names = ", ".join(spec.name for spec in specs)
                print(f"jaxfp8 codegen: no kernel {pattern!r}; there are {names}", file=sys.stderr)
                return 2
        specs = tuple(
            spec for spec in specs if any(fnmatch.fnmatchcase(spec.name, p) for p in args.kernel)
        )
    if args.list:
        print("\n".join(spec.name for spec in specs))
        return 0
    start_on_cpu()
    compiled = []
    try:
        for spec in specs:
            for kernel in compile_kernel(spec):
                compiled.append(kernel)
                if args.save_dir:
                    save(kernel, args.save_dir)
        counts = [counts_as_json(kernel) for kernel in compiled]
        print(f"gfx942, compiled by XLA:ROCm of JAX {jax.__version__}; not run")
        print(table(compiled))
        if args.json:
            write_atomically(args.json, (json.dumps(counts, indent=1) + "\n").encode())
    except (MissingToolError, LookupError, OSError) as error:
        print(f"jaxfp8 codegen: {error}", file=sys.stderr)
        return 1
    return 0


def main() -> int:
    """`python -m jaxfp8.codegen_cli`: the subcommand by itself."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxfp8.codegen_cli", description=__doc__, epilog=_EPILOG
    )
    _add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
