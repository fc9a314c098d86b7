# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Plots of results. Needs matplotlib, which is imported when one is drawn.

Four kinds, each drawn where there is something for it: time against context length, rate against
the ceiling, error against key count, and for what is left the time of each.
"""

from __future__ import annotations

import dataclasses
import functools
import io
from collections.abc import Callable, Sequence
from typing import Any

from common.result import Result

_WIDTH = 11.0

# Inches of a bar, or of a line of a legend, in the small font that both have.
_LINE = 0.16


@dataclasses.dataclass(frozen=True)
class Plot:
    """Something to draw.

    Attributes:
      draw: a function of a matplotlib axes.
      height: inches that it needs.
    """

    draw: Callable[[Any], None]
    height: float


def figure(results: Sequence[Result]) -> Any:
    """A matplotlib figure of all the plots that the results give."""
    from matplotlib.figure import Figure

    drawn = list(plots(results).values())
    heights = [plot.height for plot in drawn] or [1.0]
    figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for ax, plot in zip(axes, drawn, strict=False):
        plot.draw(ax)
    if not drawn:
        axes[0].set_title("nothing to plot")
    return figure


def single(plot: Plot) -> Any:
    """A figure of one plot."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, plot.height), layout="constrained")
    plot.draw(figure.subplots())
    return figure


def png(figure: Any) -> bytes:
    """The figure as a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120)
    return file.getvalue()


def plots(results: Sequence[Result]) -> dict[str, Plot]:
    """What can be drawn, by name."""
    timed = [result for result in results if result.median_ms is not None]
    by_context = [result for result in timed if "context" in result.shape]
    rated = [result for result in timed if result.fraction_of_ceiling is not None]
    wrong = [result for result in results if result.errors and keys_of(result)]
    others = [r for r in timed if r not in by_context and r not in rated]
    kinds = {
        "time_by_context": (_time_by_context, by_context, len(_series(by_context))),
        "rate_to_ceiling": (_rate_to_ceiling, rated, len(rated)),
        "error_by_keys": (_error_by_keys, wrong, len(_series(wrong))),
        "time": (_time, others, len(others)),
    }
    return {
        name: Plot(functools.partial(draw, results=shown), max(4.2, 1.0 + _LINE * lines))
        for name, (draw, shown, lines) in kinds.items()
        if shown
    }


def keys_of(result: Result) -> int | None:
    """How many keys a row of it sees at most."""
    for name in ("context", "tokens_k", "keys"):
        if name in result.shape:
            return int(result.shape[name])
    return None


def label(result: Result) -> str:
    """What tells a result from others of its program and case."""
    return " ".join(x for x in (result.what, result.dtype, result.backend) if x)


def _series(results: Sequence[Result]) -> dict[str, list[Result]]:
    series: dict[str, list[Result]] = {}
    for result in results:
        series.setdefault(label(result), []).append(result)
    return series


def _tell_apart(ax: Any) -> None:
    """More colours than there are by default: two lines of one would be taken for the same."""
    import matplotlib

    ax.set_prop_cycle(color=matplotlib.colormaps["tab20"](range(20)))


def _time_by_context(ax: Any, results: Sequence[Result]) -> None:
    _tell_apart(ax)
    for name, group in _series(results).items():
        group = sorted(group, key=lambda result: result.shape["context"])
        ax.plot([r.shape["context"] for r in group], [r.median_ms for r in group], "o-", label=name)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlabel("tokens of context")
    ax.set_ylabel("median ms")
    ax.set_title("Time against context length")
    ax.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))


def _rate_to_ceiling(ax: Any, results: Sequence[Result]) -> None:
    names = [f"{r.case} {label(r)}".strip() for r in results]
    parts = [100 * (r.fraction_of_ceiling or 0.0) for r in results]
    bars = ax.barh(range(len(names)), parts)
    ax.bar_label(bars, [_rate(r) for r in results], fontsize=7, padding=2)
    ax.set_yticks(range(len(names)), names, fontsize=7)
    ax.invert_yaxis()
    ax.margins(y=0.01)
    ax.axvline(100, color="black", linewidth=0.8)
    ax.set_xlabel("% of the ceiling measured in the same run")
    ax.set_title("Rate against the ceiling")


def _rate(result: Result) -> str:
    if result.ceiling is not None and result.ceiling.name == "copy":
        return f"{result.gb_per_s:.4g} of {result.ceiling.per_second / 1e9:.4g} GB/s"
    ceiling = result.ceiling.per_second / 1e12 if result.ceiling else 0.0
    return f"{result.tflops:.4g} of {ceiling:.4g} TFLOP/s"


def _error_by_keys(ax: Any, results: Sequence[Result]) -> None:
    _tell_apart(ax)
    for name, group in _series(results).items():
        group = sorted(group, key=lambda result: keys_of(result) or 0)
        ax.plot([keys_of(r) for r in group], [r.errors[0].value for r in group], "o-", label=name)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlabel("keys")
    ax.set_ylabel(results[0].errors[0].name)
    ax.set_title("Error against key count")
    ax.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))


def _time(ax: Any, results: Sequence[Result]) -> None:
    names = [f"{r.case} {label(r)}".strip() for r in results]
    bars = ax.barh(range(len(names)), [r.median_ms for r in results])
    ax.bar_label(bars, [f"{r.median_ms:.4g} ms" for r in results], fontsize=7, padding=2)
    ax.set_yticks(range(len(names)), names, fontsize=7)
    ax.invert_yaxis()
    ax.margins(y=0.01)
    ax.set_xscale("log")
    ax.set_xlabel("median ms")
    ax.set_title("Time")
