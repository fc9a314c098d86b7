# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The command line: `jaxfp8 COMMAND ...`, also `python -m jaxfp8`.

Exit status: 0; 1 where something was checked and refused; 2 for a mistake in the command. An error
is one line on standard error.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import jaxfp8

# Each command's module has add_parser(subparsers), which sets `func`, a function of the parsed
# arguments that returns the exit status. Only the module of the command that runs is imported.
_COMMANDS = {
    "demo": ("jaxfp8.demo", "prefill a long text in BF16 and FP8, and compare"),
    "doctor": ("jaxfp8.doctor", "versions, devices, and which backends can run here"),
    "scales": ("jaxfp8.scales_cli", "merge, show, check, compare and export scale artifacts"),
    "codegen": ("jaxfp8.codegen_cli", "compile the kernels for gfx942, without a GPU"),
}

REFUSED, USAGE = 1, 2
_PROGRAM = "jaxfp8"


class CommandError(Exception):
    """An error of the user's, shown as one line.

    Attributes:
      status: the exit status.
    """

    def __init__(self, message: str, status: int = USAGE) -> None:
        super().__init__(message)
        self.status = status


def require_place_for(option: str, file: str | None) -> None:
    """Checks that a file can be written later, so that no work is lost to a wrong path.

    Args:
      option: the option that named it.
      file: its path; None where the option was not given.

    Raises:
      CommandError: the path is a folder's, or its folder does not exist or cannot be written.
    """
    if file is None:
        return
    folder = os.path.dirname(file) or "."
    if not file or os.path.isdir(file):
        raise CommandError(f"{option} {file}: expected the path of a file, got that of a folder")
    if not os.path.isdir(folder):
        raise CommandError(f"{option} {file}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise CommandError(f"{option} {file}: the folder {folder} cannot be written")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage before it; so do its subparsers.

    Options are written out: an abbreviation would change its meaning with the next option added.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: the arguments, without the program's name; None takes the process's.

    Returns:
      The exit status.

    Raises:
      SystemExit: after --help, --version, or arguments that cannot be parsed.
    """
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:  # also while a command's modules are imported
        return _fail(f"{_PROGRAM}: interrupted", 130)


def _run(argv: list[str]) -> int:
    parser = _parser(argv)
    args = parser.parse_args(argv)
    try:
        status: int = args.func(args)
        sys.stdout.flush()
        return status
    except CommandError as error:
        return _fail(f"{parser.prog} {args.command}: {error}", error.status)
    except BrokenPipeError:
        # The reader (head, less) has gone; keep Python from complaining of it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return REFUSED
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else error
        return _fail(f"{parser.prog} {args.command}: {reason}", REFUSED)


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=_PROGRAM,
        description="FP8 varlen attention prefill in JAX Pallas.",
        epilog="`jaxfp8 COMMAND --help` says more.",
    )
    parser.add_argument("--version", action="version", version=f"jaxfp8 {jaxfp8.__version__}")
    subparsers = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True
    )
    given = next((argument for argument in argv if not argument.startswith("-")), None)
    for name, (module, summary) in _COMMANDS.items():
        if name == given:
            importlib.import_module(module).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser


def _fail(message: str, status: int) -> int:
    print(message, file=sys.stderr)
    return status
