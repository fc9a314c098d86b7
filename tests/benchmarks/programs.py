# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Running the benchmark programs in this process.

Each is a file that finds what it shares beside it, and defines flags of its own, of names that
others have too: so it is imported for the length of a test, and its flags go with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from absl import flags

FOLDER = Path(__file__).parents[2] / "benchmarks"


@dataclasses.dataclass(frozen=True)
class Run:
    """What a program did."""

    status: int
    stdout: str
    stderr: str
    lines: list[dict[str, Any]]


@contextlib.contextmanager
def imported(name: str) -> Iterator[Any]:
    """A module of the folder `benchmarks`: "attention", "common.result"."""
    modules, known = set(sys.modules), set(flags.FLAGS)
    with mock.patch.object(sys, "path", [str(FOLDER), *sys.path]):
        try:
            yield importlib.import_module(name)
        finally:
            for flag in set(flags.FLAGS) - known:
                delattr(flags.FLAGS, flag)
            for module in set(sys.modules) - modules:
                if (getattr(sys.modules[module], "__file__", None) or "").startswith(str(FOLDER)):
                    del sys.modules[module]


def run_program(module: Any, *arguments: str, json_file: Path | None = None) -> Run:
    """Runs an imported program with these arguments."""
    name = module.__name__
    if json_file is not None:
        arguments = (*arguments, f"--json={json_file}")
    argv = [f"benchmarks/{name}.py", *arguments]
    start = module.main
    if name != "report":
        outcome = importlib.import_module("common.program").outcome
        start = functools.partial(outcome, name, module.main)
    stdout, stderr = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", argv),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        status = start(flags.FLAGS(argv))
    lines = []
    if json_file is not None and json_file.exists():
        lines = [json.loads(line) for line in json_file.read_text().splitlines()]
    return Run(status, stdout.getvalue(), stderr.getvalue(), lines)


def run(name: str, *arguments: str, json_file: Path | None = None) -> Run:
    """Imports a program and runs it."""
    with imported(name) as module:
        return run_program(module, *arguments, json_file=json_file)
