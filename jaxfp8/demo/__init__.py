# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""`jaxfp8 demo`: a long text through one attention layer, in BF16 and in FP8, compared."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Adds the `demo` command to what ArgumentParser.add_subparsers returned."""
    parser = subparsers.add_parser(
        "demo",
        help="prefill a long text in BF16 and FP8, and compare",
        description=(
            "Prefills a long text through a small gated MLA layer, in BF16, in FP8 with dynamic "
            "scales and in FP8 with static scales calibrated on another part of the text. Compares "
            "each with attention in float64, and asks for three needles hidden in the context. "
            "Exit status 1 where a needle is lost or an error passes what rounding explains."
        ),
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="what to read, a byte a token (default: the text files of jaxfp8 itself)",
    )
    parser.add_argument(
        "--context",
        type=int,
        default=8192,
        metavar="N",
        help="cached tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--segment",
        type=int,
        default=2048,
        metavar="N",
        help="tokens of the context attended to at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--new-tokens",
        type=int,
        default=256,
        metavar="N",
        help="tokens after the context, which end with the questions (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of weights and needles (default: 0)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results here")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw the error by head and token here, as PNG"
    )
    parser.add_argument(
        "--save-dir",
        metavar="DIR",
        help="keep the calibration's shards and the scale artifact here",
    )
    parser.set_defaults(func=_run)


def _run(args: argparse.Namespace) -> int:
    # Imported here, so that `jaxfp8 demo --help` does without JAX.
    from jaxfp8.demo.run import run

    return run(args)
