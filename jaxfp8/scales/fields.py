# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The fields that say what scales belong to: what each may hold, and its form as text.

One table serves the artifact's metadata (all strings), the shards' JSON and the dataclasses.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Mapping

from jaxfp8.formats import FORMATS
from jaxfp8.scales.errors import listed, shown

BF16_LATENT_CACHE = "bf16_latent_cache"
"""The cache mode of the contract: latents cached in bfloat16, K and V quantized after."""

_MAX_COUNT = 65536
REVISION = re.compile(r"[0-9a-fA-F]{7,64}")
_DECIMAL_INT = re.compile(r"0|[1-9][0-9]{0,9}")
_DECIMAL_FLOAT = re.compile(r"[0-9]{1,20}(\.[0-9]{0,40})?([eE][+-]?[0-9]{1,3})?")


def _not_text(value: object) -> str | None:
    # Not printable: control characters would break messages, lone surrogates cannot be written.
    if isinstance(value, str) and 0 < len(value) <= 1024 and value.isprintable():
        return None
    return "a non-empty printable string of at most 1024 characters"


def _not_revision(value: object) -> str | None:
    if isinstance(value, str) and REVISION.fullmatch(value):
        return None
    return "an immutable revision, a commit of 7 to 64 hex digits (a branch or a tag can move)"


def _not_count(value: object) -> str | None:
    if type(value) is int and 1 <= value <= _MAX_COUNT:
        return None
    return f"an integer from 1 to {_MAX_COUNT}"


def _not_fp8_dtype(value: object) -> str | None:
    if isinstance(value, str) and value in FORMATS:
        return None
    return f"one of {', '.join(FORMATS)}"


def _not_margin(value: object) -> str | None:
    is_bool = isinstance(value, bool)
    if isinstance(value, int | float) and not is_bool and 1 <= value <= sys.float_info.max:
        return None
    return "a finite number of at least 1"


def not_layer_index(value: object) -> str | None:
    """What a layer index must be, where the value is none; None where it is one."""
    if type(value) is int and 0 <= value < _MAX_COUNT:
        return None
    return f"a layer index from 0 to {_MAX_COUNT - 1}"


def _not_layers(value: object) -> str | None:
    if (
        isinstance(value, tuple)
        and value
        and not any(not_layer_index(layer) for layer in value)
        and all(a < b for a, b in itertools.pairwise(value))
    ):
        return None
    return "distinct layer indices in ascending order, at least one"


CHECKS: dict[str, Callable[[object], str | None]] = {
    "model": _not_text,
    "revision": _not_revision,
    "checkpoint_id": _not_text,
    "calibration_id": _not_text,
    "tp_size": _not_count,
    "pp_size": _not_count,
    "fp8_dtype": _not_fp8_dtype,
    "cache_mode": _not_text,
    "local_heads": _not_count,
    "qk_head_dim": _not_count,
    "v_head_dim": _not_count,
    "margin": _not_margin,
    "layers": _not_layers,
    "num_layers": _not_count,
    "calibration_shards": _not_count,
    "created_by": _not_text,
    "calibration_tp_size": _not_count,
    "calibration_pp_size": _not_count,
}
"""For each field, a function that says what it expects where a value is wrong, else None."""

_INTS = {name for name, check in CHECKS.items() if check is _not_count}


def problems_in(values: Mapping[str, object]) -> list[str]:
    """One line for each value that its field cannot hold."""
    problems = []
    for name, value in values.items():
        expected = CHECKS[name](value)
        if expected:
            problems.append(f"{name}: expected {expected}, got {shown(value)}")
    return problems


def from_text(name: str, text: str) -> object:
    """The value of a metadata string; the string itself where it is not in the one decimal form.

    A string that stays a string then fails the check of its field, with a message that shows it.
    """
    if name in _INTS and _DECIMAL_INT.fullmatch(text):
        return int(text)
    if name == "margin" and _DECIMAL_FLOAT.fullmatch(text):
        return float(text)
    if name == "layers":
        parts = text.split(",")
        if all(_DECIMAL_INT.fullmatch(part) for part in parts):
            return tuple(int(part) for part in parts)
    return text


def to_text(value: object) -> str:
    """The metadata string of a value: what from_text reads back as the same value."""
    if isinstance(value, tuple):
        return ",".join(str(layer) for layer in value)
    return value if isinstance(value, str) else repr(value)


def differences(expected: Mapping[str, object], found: Mapping[str, object]) -> list[str]:
    """One line for each field in which what was found is not what was expected.

    A field that is missing from `found` is skipped: whoever read it has said so already.
    """
    lines = []
    for name, value in expected.items():
        if name not in found or found[name] == value:
            continue
        have = found[name]
        if isinstance(value, tuple) and isinstance(have, tuple):
            if missing := [layer for layer in value if layer not in have]:
                lines.append(f"{name}: no scales for {listed(missing)}, which the deployment has")
            if extra := [layer for layer in have if layer not in value]:
                lines.append(f"{name}: scales for {listed(extra)}, which the deployment lacks")
        else:
            lines.append(f"{name}: expected {shown(value)}, got {shown(have)}")
    return lines
