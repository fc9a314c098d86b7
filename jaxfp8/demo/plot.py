# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's plot: the error of every head at every new token. Needs matplotlib."""

from __future__ import annotations

import importlib.util
import io

import numpy as np

from jaxfp8.cli import CommandError
from jaxfp8.demo.outcome import Outcome


def require_matplotlib() -> None:
    """Says what to do where matplotlib is missing, before anything has run.

    Raises:
      CommandError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError("--plot: needs matplotlib; pip install 'jaxfp8[bench]' installs it")


def error_plot(outcomes: list[Outcome]) -> bytes:
    """A PNG: for each pass, the relative error by head and new token, all on one colour scale."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.2 * len(outcomes) + 0.6), layout="constrained")
    axes = figure.subplots(len(outcomes), 1, sharex=True, squeeze=False)[:, 0]
    errors = np.concatenate([outcome.error_map.ravel() for outcome in outcomes])
    # A logarithmic scale has no room for zeros, and NaN is left white.
    errors = errors[np.isfinite(errors) & (errors > 0)]
    largest = errors.max(initial=1e-6)
    norm = LogNorm(errors.min(initial=largest / 10), largest)
    for ax, outcome in zip(axes, outcomes, strict=True):
        image = ax.imshow(
            outcome.error_map, norm=norm, aspect="auto", interpolation="nearest", cmap="viridis"
        )
        ax.set_title(f"{outcome.name}: {outcome.relative_error:.4f} over all", fontsize=10)
        ax.set_ylabel("head")
    axes[-1].set_xlabel("new token")
    figure.colorbar(image, ax=list(axes), label="relative error against float64")
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    return png.getvalue()
