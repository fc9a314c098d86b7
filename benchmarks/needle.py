# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Are needles in long contexts still found in FP8, and how does its error grow?

    python benchmarks/needle.py
    python benchmarks/needle.py --contexts=131072 --levels=attention --depths=10,50,90

Needles lie at several depths of contexts of several lengths; the last new tokens ask for them. In
BF16, in FP8 with dynamic scales and in FP8 with static ones:

- attention: keys with outlier channels, needles among them (needles/haystack.py); errors against
  float64 for the rows that ask and some others.
- layer: a whole MLA layer of Kimi-K3's dimensions, needles in its latent cache
  (needles/latents.py); errors against the layer in BF16.
- stack: no needles; errors of the hidden states behind each of 24 small MLA layers
  (needles/stack.py), against the stack in BF16.

Exit status 1 where a needle is lost or an error is past what the format explains.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from absl import flags
from common import backends, reference, ways
from common.inputs import segment_lengths
from common.program import REFCHECK, Recorder, choose, progress, run, start_device, token_counts
from common.result import Check
from common.ways import Way, chosen_backend
from needles.haystack import MOST_NEEDLES, Haystack
from needles.latents import LatentHaystack
from needles.places import places
from needles.stack import error_growth

from jaxfp8.cli import CommandError
from jaxfp8.models import KIMI_K3, KIMI_K3_MLA_LAYERS, SMALL

_LEVELS = ("attention", "layer", "stack")

_CONTEXTS = flags.DEFINE_list("contexts", ["131072", "524288", "1047552"], "tokens of context")
_DEPTHS = flags.DEFINE_list("depths", ["10", "50", "90"], "where needles lie, percent of a context")
_SELECTED = flags.DEFINE_list("levels", list(_LEVELS), f"some of {', '.join(_LEVELS)}")
_WAYS = flags.DEFINE_list("ways", list(ways.NAMES), f"some of {', '.join(ways.NAMES)}")
_SEGMENT = flags.DEFINE_integer("segment", 65536, "tokens of a segment", lower_bound=1)
_NEW_TOKENS = flags.DEFINE_integer("new_tokens", 4096, "new tokens", lower_bound=1)
_HEADS = flags.DEFINE_integer("heads", 12, "heads of `attention` and `layer`", lower_bound=1)
_BACKEND = flags.DEFINE_string("backend", None, "of this library; its own choice if not given")
_SMALL = flags.DEFINE_bool("small", False, "`layer`: the small preset, not Kimi-K3's dimensions")
_LAYERS = flags.DEFINE_integer(
    "layers", len(KIMI_K3_MLA_LAYERS), "layers of `stack`", lower_bound=1
)
_STACK_CONTEXT = flags.DEFINE_integer(
    "stack_context", 16384, "tokens of context of `stack`", lower_bound=1
)
_STACK_NEW_TOKENS = flags.DEFINE_integer(
    "stack_new_tokens", 512, "new tokens of `stack`", lower_bound=1
)


def main(recorder: Recorder) -> None:
    """Runs the levels."""
    levels = choose("levels", _SELECTED.value, _LEVELS)
    contexts = token_counts("contexts", _CONTEXTS.value)
    depths = _depths(contexts)
    selected = ways.select(_WAYS.value)
    if levels == ["stack"] and not any(way.precision == "fp8" for way in selected):
        raise CommandError("--ways: expected one in FP8, whose errors `stack` measures")
    start_device()
    if _BACKEND.value is not None:
        for precision in backends.PRECISIONS:
            backends.select([_BACKEND.value], precision, _HEADS.value, option="backend")
    runs: dict[str, Callable[[Recorder, int, list[int], list[Way]], None]] = {
        "attention": _run_attention,
        "layer": functools.partial(_run_layer, longest=contexts[-1]),
    }
    for level in levels:
        if level == "stack":
            _run_stack(recorder, selected)
            continue
        for context in contexts:
            runs[level](recorder, context, depths, selected)


def _depths(contexts: list[int]) -> list[int]:
    for text in _DEPTHS.value:
        if not text.isdecimal() or int(text) > 100:
            raise CommandError(f"--depths: {text}: expected a number from 0 to 100")
    depths = [int(text) for text in _DEPTHS.value]
    if not 1 <= len(depths) <= MOST_NEEDLES:
        raise CommandError(f"--depths: expected 1 to {MOST_NEEDLES} of them, got {len(depths)}")
    if _NEW_TOKENS.value < len(depths):
        raise CommandError(
            "--new_tokens: expected at least one for each of --depths, "
            f"got {_NEW_TOKENS.value} for {len(depths)}"
        )
    for context in contexts:
        if len(set(places(context, depths))) < len(depths):
            raise CommandError(
                f"--depths: {','.join(_DEPTHS.value)}: expected a place of its own for each in "
                f"--contexts={context}"
            )
    return depths


def _run_attention(
    recorder: Recorder, context: int, depths: list[int], selected: list[Way]
) -> None:
    haystack = Haystack(context, _NEW_TOKENS.value, _SEGMENT.value, _HEADS.value, depths)
    bf16 = None
    with progress(len(selected) * len(haystack.lengths), f"attention {context}") as bar:
        for way in selected:
            out, lse = haystack.run(way, _BACKEND.value, bar.update)
            bf16 = out if bf16 is None else bf16
            errors = haystack.check(out, lse, way) if REFCHECK.value else ()
            details = _details(haystack.found(out), depths)
            if way.precision == "fp8":
                to_bf16 = (x.astype("float64") for x in (out, bf16))
                details["error_to_bf16"] = reference.relative_error(*to_bf16)
            _record(recorder, "attention", way, context, errors, details)


def _run_layer(
    recorder: Recorder, context: int, depths: list[int], selected: list[Way], *, longest: int
) -> None:
    config = SMALL if _SMALL.value else KIMI_K3
    haystack = LatentHaystack(
        config, context, longest, _NEW_TOKENS.value, _SEGMENT.value, _HEADS.value, depths,
        _BACKEND.value,
    )  # fmt: skip
    bf16 = None
    with progress(len(selected), f"layer {context}") as bar:
        for way in selected:
            out = haystack.run(way)
            bf16 = out if bf16 is None else bf16
            errors: tuple[Check, ...] = ()
            if REFCHECK.value and way.precision == "fp8":
                errors = haystack.check(out, bf16)
            _record(recorder, "layer", way, context, errors, _details(haystack.found(out), depths))
            bar.update()


def _details(found: list[bool], depths: list[int]) -> dict[str, Any]:
    lost = [depth for depth, ok in zip(depths, found, strict=True) if not ok]
    return {"needles": len(found), "found": sum(found), "lost_at_percent": lost}


def _record(
    recorder: Recorder,
    level: str,
    way: Way,
    context: int,
    errors: tuple[Check, ...],
    details: dict[str, Any],
) -> None:
    recorder.add(
        what=f"needles, {level}",
        case=way.name,
        shape={
            "context": context,
            "new_tokens": _NEW_TOKENS.value,
            "heads": _HEADS.value,
            "segments": len(segment_lengths(context, _SEGMENT.value)),
        },
        dtype=way.dtype,
        backend=chosen_backend(way.precision, _BACKEND.value, _HEADS.value),
        errors=errors,
        bounds=(Check("needles lost", len(details["lost_at_percent"]), 0),),
        details=details,
    )


def _run_stack(recorder: Recorder, selected: list[Way]) -> None:
    fp8 = [way for way in selected if way.precision == "fp8"]
    with progress(len(fp8) * _LAYERS.value, "stack") as bar:
        growth = error_growth(
            SMALL, _LAYERS.value, _STACK_CONTEXT.value, _STACK_NEW_TOKENS.value, _SEGMENT.value,
            fp8, _BACKEND.value, bar.update,
        )  # fmt: skip
    for way in fp8:
        grown = growth[way.name]
        errors: tuple[Check, ...] = ()
        if REFCHECK.value:
            # The errors of the layers are independent of each other: they add up in the hidden
            # states as the outputs do, so that their part of the whole stays of this size.
            limit = reference.out_limit("fp8", grown.score_norm)
            errors = (
                Check("error of the hidden states", grown.hidden[-1], limit),
                Check("largest error of a layer", max(grown.layer), limit),
            )
        recorder.add(
            what="error growth",
            case=way.name,
            shape={
                "layers": _LAYERS.value,
                "keys": _STACK_CONTEXT.value,
                "new_tokens": _STACK_NEW_TOKENS.value,
                "heads": SMALL.num_heads,
            },
            dtype=way.dtype,
            backend=chosen_backend(way.precision, _BACKEND.value, SMALL.num_heads),
            errors=errors,
            details={"hidden_error_by_layer": grown.hidden, "layer_error_by_layer": grown.layer},
        )


if __name__ == "__main__":
    run("needle", main)
