# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Which backends of the library take part."""

from __future__ import annotations

from collections.abc import Sequence

from common import inputs
from common.program import choose
from jaxfp8 import packing
from jaxfp8.cli import CommandError
from jaxfp8.formats import Fp8Format
from jaxfp8.ops.attention.base import AttentionSpec, Precision
from jaxfp8.ops.attention.registry import BACKENDS, get_backend, why_by_name_only
from jaxfp8.targets import detect_target

PRECISIONS: tuple[Precision, ...] = ("fp8", "bf16")


def select(
    names: Sequence[str] | None, precision: Precision, heads: int, option: str = "backends"
) -> list[str]:
    """The backends of those names, which `option` gave; where names is None those that the library
    may choose here. Of these "xla" only where it is alone: on a GPU with kernels of its own it is
    the reference they are compared with, and takes hundreds of times as long.

    Raises:
      CommandError: a name is unknown, or its backend cannot serve the request.
    """
    target = detect_target()
    if precision == "fp8" and target.fp8_format is None:
        raise CommandError(f"no FP8 format is known for {target.arch}; --precisions=bf16 runs")
    spec = AttentionSpec(
        precision, fp8_format(precision), heads, inputs.QK_HEAD_DIM, inputs.V_HEAD_DIM
    )
    reasons = {name: get_backend(name).unsupported(spec, target) for name in BACKENDS}
    if names is None:
        served = [
            name
            for name, reason in reasons.items()
            if reason is None and why_by_name_only(name, target) is None
        ]
        return [name for name in served if name != "xla"] or served
    chosen = choose(option, names, BACKENDS, or_none=True)
    for name in chosen:
        if reasons[name] is not None:
            raise CommandError(f"--{option}: {name} cannot serve {precision}: {reasons[name]}")
    return chosen


def fp8_format(precision: Precision) -> Fp8Format | None:
    """The format in which a precision computes here."""
    return packing.spec_of(precision, None, detect_target()).fmt


def dtype_name(precision: Precision) -> str:
    """As results have it."""
    fmt = fp8_format(precision)
    return "bf16" if fmt is None else fmt.name
