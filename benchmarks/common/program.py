# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""What every benchmark program does alike: its flags, its output, its exit status.

    def main(recorder: Recorder) -> None: ...

    if __name__ == "__main__":
        run("attention", main)

Exit status: 0; 1 where a reference check failed, a bound was passed or nothing was measured; 2 for
a mistake in the command, which is one line on standard error. What absl refuses itself, a flag that
there is not or a number out of its range, ends with absl's message and its exit status, 1.
"""

from __future__ import annotations

import functools
import math
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
import tqdm
from absl import app, flags

import jaxfp8
from common import plots
from common.result import Check, Result
from jaxfp8.cli import REFUSED, CommandError, require_place_for
from jaxfp8.demo.plot import require_matplotlib
from jaxfp8.scales.files import write_atomically
from jaxfp8.startup import start_jax

_JSON = flags.DEFINE_string("json", None, "file that results are appended to, a JSON line each")
_PLOT = flags.DEFINE_string("plot", None, "PNG file for a plot of the results (needs matplotlib)")
REFCHECK = flags.DEFINE_bool("refcheck", True, "compare what is timed with a reference")


class Recorder:
    """Takes results: prints each, appends it to --json at once, and remembers it for the end."""

    def __init__(self, benchmark: str) -> None:
        require_place_for("--json", _JSON.value)
        require_place_for("--plot", _PLOT.value)
        if _PLOT.value:
            require_matplotlib()
        self.benchmark = benchmark
        self.results: list[Result] = []

    def add(self, **fields: Any) -> Result:
        """Records a result, given as the fields of Result that it does not know itself."""
        fields.setdefault("device", device_name())
        result = Result(
            benchmark=self.benchmark, versions=versions(), command=self._command(), **fields
        )
        self.results.append(result)
        tqdm.tqdm.write(_text(result), file=sys.stdout)
        sys.stdout.flush()
        if _JSON.value:
            with open(_JSON.value, "a") as file:
                file.write(result.to_json() + "\n")
        return result

    def add_failure(self, error: Exception, **fields: Any) -> Result:
        """Records what should have run and did not, and lets the program go on: exit status 1."""
        text = f"{type(error).__name__}: {one_line(error)}"
        return self.add(**fields, unavailable=text, bounds=(Check("failures", 1, 0),))

    def finish(self) -> int:
        """Draws --plot, says what failed, and returns the exit status."""
        if not self.results:
            print(f"{self.benchmark}: nothing was measured", file=sys.stderr)
            return REFUSED
        if _PLOT.value:
            write_atomically(_PLOT.value, plots.png(plots.figure(self.results)))
        failed = [result for result in self.results if not result.ok]
        for result in failed:
            for check in (*result.errors, *result.bounds):
                if not check.ok:
                    reason = result.unavailable or (
                        f"{check.name}: expected at most {_short(check.limit)}, "
                        f"got {_short(check.value)}"
                    )
                    print(f"{self.benchmark}: {_name(result)}: {reason}", file=sys.stderr)
        if all(result.unavailable for result in self.results):
            print(f"{self.benchmark}: nothing was measured", file=sys.stderr)
            return REFUSED
        return REFUSED if failed else 0

    def _command(self) -> str:
        return shlex.join(["python", f"benchmarks/{self.benchmark}.py", *sys.argv[1:]])


def run(benchmark: str, main: Callable[[Recorder], object]) -> None:
    """Runs a program under absl."""
    app.run(functools.partial(outcome, benchmark, main))


def outcome(benchmark: str, main: Callable[[Recorder], object], argv: Sequence[str]) -> int:
    """The exit status of a program; argv is what absl's flags leave of the command line."""
    try:
        if len(argv) > 1:
            raise CommandError(f"unexpected arguments: {' '.join(argv[1:])}")
        recorder = Recorder(benchmark)
        main(recorder)
        return recorder.finish()
    except CommandError as error:
        print(f"{benchmark}: {error}", file=sys.stderr)
        return error.status


def start_device() -> None:
    """Starts JAX beside a torch that wants memory too.

    Raises:
      CommandError: no backend can be started.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        start_jax()
    except RuntimeError as error:
        raise CommandError(str(error), REFUSED) from None


def choose(
    option: str, names: Iterable[str], known: Iterable[str], *, or_none: bool = False
) -> list[str]:
    """The names, which must be among the known ones, and at least one unless `or_none`.

    Raises:
      CommandError: one is not, or there is none.
    """
    known = list(known)
    chosen = list(dict.fromkeys(names))
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise CommandError(f"--{option}: {', '.join(unknown)}: expected {', '.join(known)}")
    if not chosen and not or_none:
        raise CommandError(f"--{option}: expected at least one of {', '.join(known)}, got none")
    return chosen


def token_counts(option: str, texts: Sequence[str]) -> list[int]:
    """Numbers of tokens, at least one of them, ascending.

    Raises:
      CommandError: one is no positive number, or there is none.
    """
    for text in texts:
        if not text.isdecimal() or int(text) < 1:
            raise CommandError(f"--{option}: {text}: expected a number of tokens")
    if not texts:
        raise CommandError(f"--{option}: expected at least one number of tokens, got none")
    return sorted({int(text) for text in texts})


def progress(total: int, what: str) -> Any:
    """A progress bar, on a terminal alone."""
    return tqdm.tqdm(total=total, desc=what, disable=None, leave=False)


def device_name() -> str:
    """What JAX calls the device it runs on."""
    return str(jax.devices()[0].device_kind)


def versions() -> dict[str, str]:
    """Of Python and the libraries in use."""
    found = {
        "python": platform.python_version(),
        "jaxfp8": jaxfp8.__version__,
        "jax": jax.__version__,
        "numpy": np.__version__,
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(torch.__version__)
    return found


def one_line(error: BaseException) -> str:
    """The first line of an error's message, for a table."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:160]


def _name(result: Result) -> str:
    return " ".join(x for x in (result.what, result.case, result.dtype, result.backend) if x)


def _text(result: Result) -> str:
    parts = [_name(result) + ":"]
    if result.unavailable:
        return f"{parts[0]} not measured: {result.unavailable}"
    if result.median_ms is not None:
        spread = ""
        if result.quartiles_ms is not None:
            spread = " [{}, {}]".format(*map(_short, result.quartiles_ms))
        parts.append(f"{_short(result.median_ms)} ms{spread}")
    if result.tflops is not None:
        parts.append(f"{_short(result.tflops)} TFLOP/s")
    if result.gb_per_s is not None:
        parts.append(f"{_short(result.gb_per_s)} GB/s")
    if result.ceiling is not None and result.fraction_of_ceiling is not None:
        parts.append(f"{100 * result.fraction_of_ceiling:.1f} % of {result.ceiling.name}")
    parts += [f"{name}={_short(value)}" for name, value in result.details.items()]
    for check in (*result.errors, *result.bounds):
        limit = "" if check.limit is None else f" (at most {_short(check.limit)})"
        parts.append(f"{check.name} {_short(check.value)}{limit}{'' if check.ok else ' FAILED'}")
    return "  ".join(parts)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return ",".join(f"{key}:{_short(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return "/".join(map(_short, value))
    return str(value)
