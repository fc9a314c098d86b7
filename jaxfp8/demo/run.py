# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The demo from its arguments to its exit status."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tqdm

import jaxfp8
from jaxfp8.cli import REFUSED, CommandError, require_place_for
from jaxfp8.demo import layer as mla
from jaxfp8.demo.exact import error_bounds, exact_attention
from jaxfp8.demo.needles import MIN_CONTEXT, MIN_NEW_TOKENS, plant
from jaxfp8.demo.outcome import Outcome, judge
from jaxfp8.demo.passes import make_prefill, run_pass
from jaxfp8.demo.plot import error_plot, require_matplotlib
from jaxfp8.demo.report import Setting, as_json, heading, table
from jaxfp8.demo.static_scales import ARTIFACT_NAME, calibrated_scales, clipped_part
from jaxfp8.demo.text import Text, read_text
from jaxfp8.ops.attention.base import Precision
from jaxfp8.scales import ScaleArtifactError
from jaxfp8.scales.files import write_atomically
from jaxfp8.startup import start_jax

# Name, precision, and whether its scales are the static ones.
_PASSES: tuple[tuple[str, Precision, bool], ...] = (
    ("BF16", "bf16", False),
    ("FP8 dynamic", "fp8", False),
    ("FP8 static", "fp8", True),
)
_CALIBRATION_TOKENS = 4096


def run(args: argparse.Namespace) -> int:
    """Runs the demo: 0, or 1 where a needle is lost or an error passes its bound.

    Raises:
      CommandError: an argument cannot be served.
      OSError: a result cannot be written.
    """
    _check(args)
    text, calibration = _text_and_calibration(args)
    rng = np.random.default_rng(args.seed)
    document = plant(text.data, args.context, args.new_tokens, rng)
    try:
        start_jax()
    except RuntimeError as error:
        raise CommandError(str(error), REFUSED) from None
    fmt = jaxfp8.detect_target().fp8_format
    if fmt is None:
        raise CommandError(
            "no FP8 format is known for this device; JAX_PLATFORMS=cpu emulates one", REFUSED
        )
    setting = Setting(
        text=text.name,
        context=args.context,
        segment=min(args.segment, args.context),
        new_tokens=args.new_tokens,
        calibration_tokens=len(calibration),
        seed=args.seed,
        fmt=fmt,
        needles=document.needles,
    )
    print(heading(setting), flush=True)
    outcomes = _outcomes(setting, document.tokens, calibration, rng, args.save_dir)
    return _report(setting, outcomes, args)


def _check(args: argparse.Namespace) -> None:
    """What can be refused before anything is read or run."""
    for option, value, least, why in (
        ("--context", args.context, MIN_CONTEXT, ", which hold the needles"),
        ("--segment", args.segment, 1, ""),
        ("--new-tokens", args.new_tokens, MIN_NEW_TOKENS, ", which hold the questions"),
        ("--seed", args.seed, 0, ""),
    ):
        if value < least:
            raise CommandError(f"{option} {value}: expected at least {least}{why}")
    require_place_for("--json", args.json)
    require_place_for("--plot", args.plot)
    if args.plot:
        require_matplotlib()


def _text_and_calibration(args: argparse.Namespace) -> tuple[Text, np.ndarray]:
    """The text, and as tokens the part of it behind the one that is prefilled."""
    used = args.context + args.new_tokens
    count = min(args.context, _CALIBRATION_TOKENS)
    text = read_text(args.text, used + count)
    if len(text.data) < used + count:
        raise CommandError(
            f"--context {args.context}: expected a text of at least {used + count:,} bytes "
            f"(context, {args.new_tokens:,} new tokens, {count:,} to calibrate on); "
            f"there are {len(text.data):,} in {text.name}"
        )
    return text, np.frombuffer(text.data[used:], np.uint8)


def _outcomes(
    setting: Setting,
    tokens: np.ndarray,
    calibration: np.ndarray,
    rng: np.random.Generator,
    save_dir: str | None,
) -> list[Outcome]:
    layer = mla.seeded_layer(rng)
    hidden = layer.hidden(tokens)
    prefill = make_prefill(layer.weights, hidden, setting.context, setting.segment)
    steps = mla.NUM_HEADS + len(_PASSES) * len(prefill.segments)
    with tqdm.tqdm(total=steps, disable=None, leave=False) as progress:
        progress.set_description("calibration")
        with _scale_folder(save_dir) as folder:
            static = calibrated_scales(
                layer.weights,
                layer.hidden(calibration),
                setting.fmt,
                f"sha256:{hashlib.sha256(calibration.tobytes()).hexdigest()}",
                folder,
            )
        progress.set_description("float64")
        values = (np.asarray(prefill.q), *prefill.context_and_new)
        exact = exact_attention(*values, mla.SOFTMAX_SCALE, progress.update)
        outcomes = []
        for name, precision, is_static in _PASSES:
            progress.set_description(name)
            outcomes.append(
                judge(
                    name,
                    run_pass(prefill, precision, static if is_static else None, progress.update),
                    clipped_part(values, static, setting.fmt) if is_static else 0.0,
                    error_bounds(exact, precision),
                    exact,
                    layer,
                    hidden[setting.context :],
                    setting.needles,
                )
            )
    return outcomes


@contextlib.contextmanager
def _scale_folder(save_dir: str | None) -> Iterator[Path]:
    """Where the calibration's files go: the user's folder, or one that does not stay."""
    try:
        if save_dir is not None:
            yield Path(save_dir)
        else:
            with tempfile.TemporaryDirectory(prefix="jaxfp8-demo-") as folder:
                yield Path(folder)
    except ScaleArtifactError as error:
        raise CommandError(str(error), REFUSED) from None


def _report(setting: Setting, outcomes: list[Outcome], args: argparse.Namespace) -> int:
    print(f"\n{table(setting, outcomes)}", flush=True)
    if args.save_dir:
        print(f"\nscales: jaxfp8 scales show {Path(args.save_dir) / ARTIFACT_NAME}")
    if args.json:
        write_atomically(
            args.json, f"{json.dumps(as_json(setting, outcomes), indent=1)}\n".encode()
        )
    if args.plot:
        write_atomically(args.plot, error_plot(outcomes))
    failures = [
        f"{outcome.name}: {failure}" for outcome in outcomes for failure in outcome.failures
    ]
    for failure in failures:
        print(f"jaxfp8 demo: {failure}", file=sys.stderr)
    return REFUSED if failures else 0
