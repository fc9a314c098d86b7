# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's results as text and as JSON."""

from __future__ import annotations

import dataclasses
import math
import platform
from typing import Any

import jax

import jaxfp8
from jaxfp8.demo import layer as mla
from jaxfp8.demo.needles import Needle
from jaxfp8.demo.outcome import Outcome, shown
from jaxfp8.demo.static_scales import MARGIN


@dataclasses.dataclass(frozen=True)
class Setting:
    """What was run.

    Attributes:
      text: name of the text.
      context: number of tokens of the context.
      segment: capacity of a segment.
      new_tokens: number of new tokens.
      calibration_tokens: number of tokens that the static scales were calibrated on.
      seed: of weights and needles.
      fmt: the FP8 format.
      needles: what was hidden.
    """

    text: str
    context: int
    segment: int
    new_tokens: int
    calibration_tokens: int
    seed: int
    fmt: jaxfp8.Fp8Format
    needles: tuple[Needle, ...]


def heading(setting: Setting) -> str:
    """What is about to run, in a few lines."""
    segments = -(-setting.context // setting.segment)
    rows = {
        "text": f"{setting.text}, a byte a token",
        "prefill": f"{setting.new_tokens:,} new tokens over {setting.context:,} cached ones, in "
        f"segments of {setting.segment:,} ({segments})",
        "layer": f"gated MLA, {mla.NUM_HEADS} heads, {mla.QK_HEAD_DIM}/{mla.V_HEAD_DIM} channels, "
        f"weights drawn with seed {setting.seed}",
        "scales": f"static ones from {setting.calibration_tokens:,} other tokens of the text, "
        f"margin {MARGIN}, {setting.fmt}",
        "device": f"{jax.devices()[0].device_kind}, JAX {jax.__version__}",
    }
    return "\n".join(f"{name:8}{value}" for name, value in rows.items())


def table(setting: Setting, outcomes: list[Outcome]) -> str:
    """The errors of all passes, and the words that they read."""
    rows = [
        ["", "error", "bound", "LSE error", "bound", "clipped", "needles", "K/V bytes", "seconds"]
    ]
    for outcome in outcomes:
        rows.append(
            [
                outcome.name,
                f"{outcome.relative_error:.4f}",
                f"{outcome.bounds.relative:.4f}",
                f"{outcome.lse_error:.2g}",
                f"{outcome.bounds.lse:.2g}",
                f"{outcome.clipped:.2%}",
                f"{outcome.num_found}/{len(outcome.needles)}",
                f"{outcome.result.segment_bytes:,}",
                f"{outcome.result.seconds:.2f}",
            ]
        )
    words = [["Needle", *(outcome.name for outcome in outcomes)]]
    for i, needle in enumerate(setting.needles):
        words.append(
            [f"{needle.depth} %  {shown(needle.word)}", *(shown(o.words[i]) for o in outcomes)]
        )
    backends = ", ".join(dict.fromkeys(outcome.result.backend for outcome in outcomes))
    legend = {
        "error": "|out - exact| / |exact|, exact being attention in float64",
        "bound": "how far rounding to the format can take the error before it",
        "LSE error": "the largest, in nats",
        "clipped": "part of the Q, K and V values beyond the range of the static scales",
        "K/V bytes": "of one segment, as the attention reads it",
        "seconds": f"of the attention, compiled before (backend {backends})",
    }
    if jax.devices()[0].platform == "cpu":
        legend["seconds"] += "; a CPU emulates FP8, which saves it no time"
    notes = "\n".join(f"{name:11}{text}" for name, text in legend.items())
    return f"{_aligned(rows)}\n\n{notes}\n\n{_aligned(words)}"


def as_json(setting: Setting, outcomes: list[Outcome]) -> dict[str, Any]:
    """All that the table says, and the error of each head."""
    return {
        "text": setting.text,
        "context": setting.context,
        "segment": setting.segment,
        "new_tokens": setting.new_tokens,
        "calibration_tokens": setting.calibration_tokens,
        "calibration_margin": MARGIN,
        "seed": setting.seed,
        "num_heads": mla.NUM_HEADS,
        "qk_head_dim": mla.QK_HEAD_DIM,
        "v_head_dim": mla.V_HEAD_DIM,
        "fp8_format": setting.fmt.name,
        "device": jax.devices()[0].device_kind,
        "versions": {
            "jaxfp8": jaxfp8.__version__,
            "jax": jax.__version__,
            "python": platform.python_version(),
        },
        "passes": [
            {
                "name": outcome.name,
                "clipped": outcome.clipped,
                "relative_error": _finite(outcome.relative_error),
                "relative_error_bound": outcome.bounds.relative,
                "lse_error": _finite(outcome.lse_error),
                "lse_error_bound": outcome.bounds.lse,
                "relative_error_by_head": [
                    _finite(error) for error in outcome.head_errors.tolist()
                ],
                "needles": [
                    {
                        "depth_percent": needle.depth,
                        "planted": shown(needle.word),
                        "read": shown(word),
                        "found": word == needle.word,
                    }
                    for needle, word in zip(outcome.needles, outcome.words, strict=True)
                ],
                "backend": outcome.result.backend,
                "segment_kv_bytes": outcome.result.segment_bytes,
                "seconds": outcome.result.seconds,
                "failures": outcome.failures,
            }
            for outcome in outcomes
        ],
    }


def _finite(x: float) -> float | None:
    """x, or None where it is NaN or infinite, which JSON does not have."""
    return x if math.isfinite(x) else None


def _aligned(rows: list[list[str]]) -> str:
    """Rows of text in columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        ).rstrip()
        for row in rows
    )
