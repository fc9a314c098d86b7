# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""`jaxfp8 scales`: merge, show, check, export, diff and retarget scale artifacts.

Exit status: 0 done, 1 refused or failed (one line on standard error), 2 usage (argparse).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxfp8.formats import FORMATS
from jaxfp8.scales import (
    ScaleArtifact,
    ScaleArtifactError,
    diff,
    export,
    merge_folder,
    retarget,
)
from jaxfp8.scales.fields import from_text, problems_in
from jaxfp8.scales.identity import values_of
from jaxfp8.scales.shard import ranks_in_name

_DEPLOYMENT_FIELDS = {
    "model": "name of the model",
    "revision": "commit of the checkpoint, 7 to 64 hex digits",
    "checkpoint_id": "digest of the checkpoint",
    "tp_size": "tensor-parallel ranks",
    "pp_size": "pipeline stages",
    "cache_mode": "what the K/V cache holds",
    "fp8_dtype": " or ".join(FORMATS),
    "local_heads": "attention heads of one rank",
    "qk_head_dim": "head dim of Q and K",
    "v_head_dim": "head dim of V",
    "layers": "indices of all attention layers, as in 3,7,11",
}


def add_parser(subparsers: Any) -> None:
    """Adds the `scales` command to what ArgumentParser.add_subparsers returned.

    Parsing sets `func`, which takes the parsed arguments and returns the exit status.
    """
    parser = subparsers.add_parser(
        "scales",
        help="merge, inspect, check and convert scale artifacts",
        description="Merge, inspect, check and convert scale artifacts.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> Any:
        added = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        added.set_defaults(func=_guarded(run))
        return added

    merge = command("merge", _merge, "merge the shards of all ranks into an artifact")
    merge.add_argument("folder", metavar="DIR", help="folder with one shard of each rank")
    merge.add_argument("out", metavar="OUT", help="the artifact; a file that is there is replaced")

    show = command("show", _show, "print what an artifact is for and the range of its descales")
    show.add_argument("file", metavar="FILE", help="the artifact")
    show.add_argument("--json", action="store_true", help="print JSON instead")

    check = command(
        "check", _check, "check that an artifact is sound and fits; what is not given fits"
    )
    check.add_argument("file", metavar="FILE", help="the artifact")
    for name, text in _DEPLOYMENT_FIELDS.items():
        check.add_argument(f"--{name.replace('_', '-')}", type=_field(name), help=text)

    export_parser = command(
        "export", _export, "write NAME.q_scale, NAME.k_scale, NAME.v_scale for other stacks"
    )
    export_parser.add_argument("file", metavar="FILE", help="the artifact")
    export_parser.add_argument("out", metavar="OUT", help="safetensors file to write")
    export_parser.add_argument(
        "--fp8-dtype",
        choices=tuple(FORMATS),
        help="the format in which the reader multiplies (default: the artifact's). vLLM expects "
        "float8_e4m3fn on every device",
    )
    export_parser.add_argument(
        "--per-tensor", action="store_true", help="one scale a layer, the largest of its heads"
    )
    export_parser.add_argument(
        "--name-template",
        metavar="NAME",
        help="what a layer is called, as in 'model.layers.{layer}.self_attn' (default: the runtime "
        "names of the artifact)",
    )

    diff_parser = command("diff", _diff, "print the largest change of each layer from A to B")
    diff_parser.add_argument("a", metavar="A", help="an artifact")
    diff_parser.add_argument("b", metavar="B", help="another artifact")
    diff_parser.add_argument("--json", action="store_true", help="print JSON instead")
    diff_parser.add_argument(
        "--max-ratio",
        type=_ratio,
        metavar="R",
        help="exit with 1 where a descale changed by more than this factor, up or down, or a layer "
        "is in one of them alone",
    )

    retarget_parser = command(
        "retarget", _retarget, "write the same scales for another number of ranks"
    )
    retarget_parser.add_argument("file", metavar="FILE", help="the artifact")
    retarget_parser.add_argument("out", metavar="OUT", help="the artifact to write")
    retarget_parser.add_argument(
        "--tp-size", type=_field("tp_size"), required=True, help="tensor-parallel ranks to serve on"
    )
    retarget_parser.add_argument(
        "--pp-size", type=_field("pp_size"), help="pipeline stages to serve on (default: as it was)"
    )


def _field(name: str) -> Callable[[str], object]:
    def parse(text: str) -> object:
        value = from_text(name, text)
        if isinstance(value, tuple):
            value = tuple(sorted(value))
        if problems := problems_in({name: value}):
            raise argparse.ArgumentTypeError(problems[0].removeprefix(f"{name}: "))
        return value

    return parse


def _ratio(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a factor of at least 1, got {text!r}")
    return value


def _guarded(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Turns what users can cause into one line on standard error and status 1."""

    def guarded(args: argparse.Namespace) -> int:
        try:
            status = run(args)
            sys.stdout.flush()
            return status
        except BrokenPipeError:
            # The reader has gone (`| head`). Python would complain once more at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except OSError as error:
            return _fail(f"{error.filename!r}: {error.strerror}" if error.filename else str(error))
        except ValueError as error:
            return _fail(str(error))

    return guarded


def _fail(message: str) -> int:
    print(f"jaxfp8 scales: {message}", file=sys.stderr)
    return 1


def _require_other(source: str, out: str) -> None:
    """An artifact is not to be lost because a converted one was written over it."""
    if os.path.exists(out) and os.path.exists(source) and os.path.samefile(source, out):
        raise ValueError(f"OUT: expected another file than FILE, got {out!r} for both")


def _merge(args: argparse.Namespace) -> int:
    if ranks_in_name(os.path.basename(args.out)):
        return _fail(f"OUT: expected another name than that of a shard, got {args.out!r}")
    artifact = merge_folder(args.folder)
    artifact.save(args.out)
    identity = artifact.identity
    print(
        f"{args.out}: {len(artifact.layers)} layers of {artifact.num_heads} heads, from "
        f"{identity.tp_size * identity.pp_size} shards; content_sha256 {artifact.content_sha256}"
    )
    return 0


def _show(args: argparse.Namespace) -> int:
    artifact = ScaleArtifact.read(args.file)
    facts = {
        "schema": artifact.schema,
        **values_of(artifact.identity),
        "heads": artifact.num_heads,
        "fp8_max": artifact.fmt.max,
        "num_layers": len(artifact.layers),
        "created_by": artifact.created_by,
        "content_sha256": artifact.content_sha256,
    }
    if artifact.calibration_tp_size is not None:
        facts["calibration_tp_size"] = artifact.calibration_tp_size
        facts["calibration_pp_size"] = artifact.calibration_pp_size
    low, median, high = (reduce(artifact.descale, axis=2) for reduce in (np.min, np.median, np.max))
    if args.json:
        layers = [
            {
                "layer": index,
                "runtime_name": artifact.runtime_names[row] if artifact.runtime_names else None,
                **{
                    f"{qkv}_descale": {
                        "min": float(low[row, column]),
                        "median": float(median[row, column]),
                        "max": float(high[row, column]),
                    }
                    for column, qkv in enumerate("qkv")
                },
            }
            for row, index in enumerate(artifact.layers)
        ]
        print(json.dumps({**facts, "layers": layers}, indent=1))
        return 0
    for name, value in facts.items():
        if value is not None:
            print(f"{name:20} {value}")
    print(f"\ndescales over the {artifact.num_heads} heads, min / median / max")
    rows = [
        (
            str(index),
            *(
                f"{low[row, column]:.3e} / {median[row, column]:.3e} / {high[row, column]:.3e}"
                for column in range(3)
            ),
            artifact.runtime_names[row] if artifact.runtime_names else "",
        )
        for row, index in enumerate(artifact.layers)
    ]
    _print_table(("layer", "q", "k", "v", "runtime name" if artifact.runtime_names else ""), rows)
    return 0


def _check(args: argparse.Namespace) -> int:
    expected = {
        name: value for name in _DEPLOYMENT_FIELDS if (value := getattr(args, name)) is not None
    }
    try:
        artifact = ScaleArtifact.read(args.file, expected=expected)
    except ScaleArtifactError as error:
        for problem in error.problems:
            print(problem)
        count = len(error.problems)
        return _fail(f"{args.file!r}: refused, {count} problem{'s' * (count > 1)}")
    fits = f"fits {', '.join(expected)}" if expected else "no deployment was given to compare with"
    print(f"{args.file}: sound, schema {artifact.schema}, {len(artifact.layers)} layers; {fits}")
    return 0


def _export(args: argparse.Namespace) -> int:
    _require_other(args.file, args.out)
    artifact = ScaleArtifact.read(args.file)
    convention = FORMATS[args.fp8_dtype] if args.fp8_dtype else artifact.fmt
    export(
        artifact,
        args.out,
        convention=convention,
        per_tensor=args.per_tensor,
        name_template=args.name_template,
    )
    print(f"{args.out}: {3 * len(artifact.layers)} scales, value = {convention} number * scale")
    if convention != artifact.fmt:
        print(f"calibrated for {artifact.fmt} (maximum {artifact.fmt.max:g}), converted")
    if convention.name == "float8_e4m3fnuz":
        print("vLLM expects scales for float8_e4m3fn on every device: --fp8-dtype float8_e4m3fn")
    return 0


def _diff(args: argparse.Namespace) -> int:
    result = diff(ScaleArtifact.read(args.a), ScaleArtifact.read(args.b))
    if args.json:
        document = {
            "fields": list(result.fields),
            "only_a": list(result.only_a),
            "only_b": list(result.only_b),
            "largest": result.largest,
            "layers": [vars(layer) for layer in result.layers],
        }
        print(json.dumps(document, indent=1))
    else:
        for line in result.fields:
            print(f"differs: {line}")
        for name, path, layers in (("A", args.a, result.only_a), ("B", args.b, result.only_b)):
            if layers:
                print(f"only in {name}, {path}: layers {', '.join(map(str, layers))}")
        print("B / A farthest from 1 of all heads (head)")
        rows = [
            (
                str(layer.layer),
                f"{layer.q:.4f} ({layer.q_head})",
                f"{layer.k:.4f} ({layer.k_head})",
                f"{layer.v:.4f} ({layer.v_head})",
            )
            for layer in result.layers
        ]
        _print_table(("layer", "q", "k", "v"), rows)
        print(f"largest change: {result.largest:.4f}x")
    if args.max_ratio is not None:
        if result.only_a or result.only_b:
            return _fail("the artifacts do not have the same layers")
        if result.largest > args.max_ratio:
            return _fail(f"a descale changed by {result.largest:.4f}x, more than {args.max_ratio}")
    return 0


def _retarget(args: argparse.Namespace) -> int:
    _require_other(args.file, args.out)
    artifact = retarget(ScaleArtifact.read(args.file), tp_size=args.tp_size, pp_size=args.pp_size)
    artifact.save(args.out)
    identity = artifact.identity
    print(
        f"{args.out}: tp_size {identity.tp_size}, pp_size {identity.pp_size}, "
        f"{identity.local_heads} heads a rank"
    )
    return 0


def _print_table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
