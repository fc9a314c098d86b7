# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Result files to a Markdown table and plots.

    python benchmarks/report.py benchmarks/results/*.jsonl
    python benchmarks/report.py results.jsonl --markdown=report.md --plots=plots

The table goes to standard output or to --markdown. --plots is a folder for PNG files (it needs
matplotlib): time_by_context, rate_to_ceiling, error_by_keys, and time for what has no other.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags
from common import plots, result
from common.result import Check, Result

from jaxfp8.cli import REFUSED, CommandError, require_place_for
from jaxfp8.demo.plot import require_matplotlib
from jaxfp8.scales.files import write_atomically

_MARKDOWN = flags.DEFINE_string("markdown", None, "file for the table")
_PLOTS = flags.DEFINE_string("plots", None, "folder for the plots, made if it is missing")

_HEADER = (
    "case", "what", "dtype", "backend", "median ms", "quartiles", "n", "rate", "of the ceiling",
    "checks", "more",
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Reads, writes, and returns the exit status."""
    try:
        if len(argv) < 2:
            raise CommandError("expected the names of result files")
        require_place_for("--markdown", _MARKDOWN.value)
        if _PLOTS.value:
            require_matplotlib()
        results = [x for name in argv[1:] for x in _read(Path(name))]
        if not results:
            raise CommandError("there is no result in these files", REFUSED)
        text = markdown(results)
        if _MARKDOWN.value:
            write_atomically(_MARKDOWN.value, text.encode())
        else:
            print(text, end="")
        if _PLOTS.value:
            _write_plots(results, Path(_PLOTS.value))
    except CommandError as error:
        print(f"report: {error}", file=sys.stderr)
        return error.status
    return 0


def _read(path: Path) -> list[Result]:
    try:
        return result.read(path)
    except OSError as error:
        raise CommandError(f"{path}: cannot be read: {error.strerror}", REFUSED) from None
    except ValueError as error:
        raise CommandError(str(error), REFUSED) from None


def _write_plots(results: Sequence[Result], folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, draw in plots.plots(results).items():
            write_atomically(folder / f"{name}.png", plots.png(plots.single(draw)))
    except OSError as error:
        raise CommandError(f"--plots {folder}: {error.strerror}", REFUSED) from None


def markdown(results: Sequence[Result]) -> str:
    """A table a program, device and set of versions, with the commands that made it."""
    groups: dict[tuple[str, str, tuple[tuple[str, str], ...]], list[Result]] = {}
    for one in results:
        versions = tuple(sorted(one.versions.items()))
        groups.setdefault((one.benchmark, one.device, versions), []).append(one)
    parts = []
    for (benchmark, device, versions), group in groups.items():
        named = ", ".join(f"{name} {version}" for name, version in versions)
        commands = "\n".join(dict.fromkeys(one.command for one in group))
        rows = [_HEADER, ("---",) * len(_HEADER), *(_row(one) for one in group)]
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        parts.append(f"## {benchmark}\n\n{device}; {named}\n\n```sh\n{commands}\n```\n\n{table}\n")
    return "\n".join(parts)


def _row(one: Result) -> tuple[str, ...]:
    quartiles = "{:.4g} to {:.4g}".format(*one.quartiles_ms) if one.quartiles_ms else ""
    ceiling = ""
    if one.ceiling is not None and one.fraction_of_ceiling is not None:
        ceiling = f"{100 * one.fraction_of_ceiling:.0f} % of {one.ceiling.name}"
    cells = (
        one.case,
        one.what,
        one.dtype,
        one.backend,
        "" if one.median_ms is None else f"{one.median_ms:.4g}",
        quartiles,
        str(one.repetitions or ""),
        _rate(one),
        ceiling,
        _checks(one),
        ", ".join(_detail(name, value) for name, value in one.details.items()),
    )
    return tuple(cell.replace("|", "\\|") for cell in cells)


def _rate(one: Result) -> str:
    if one.tflops is not None:
        return f"{one.tflops:.4g} TFLOP/s"
    return "" if one.gb_per_s is None else f"{one.gb_per_s:.4g} GB/s"


def _checks(one: Result) -> str:
    if one.unavailable:
        return f"not measured: {one.unavailable}"
    return "; ".join(map(_check, (*one.errors, *one.bounds)))


def _detail(name: str, value: Any) -> str:
    values = value if isinstance(value, list) else [value]
    texts = [f"{x:.4g}" if isinstance(x, float) else str(x) for x in values]
    return f"{name} {' '.join(texts)}"


def _check(check: Check) -> str:
    limit = "" if check.limit is None else f" (≤ {check.limit:.3g})"
    return f"{check.name} {check.value:.3g}{limit}{'' if check.ok else ' **FAILED**'}"


if __name__ == "__main__":
    app.run(main)
