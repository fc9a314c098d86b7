# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The three ways in which a prefill pass attends to its context, and what they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jaxfp8
from common import backends, inputs
from common.program import choose
from jaxfp8.cli import CommandError
from jaxfp8.ops.attention.base import AttentionSpec, Precision
from jaxfp8.ops.attention.registry import choose_backend
from jaxfp8.targets import detect_target


@dataclasses.dataclass(frozen=True)
class Way:
    """A precision, and for FP8 whether the scales are static."""

    name: str
    precision: Precision
    static: bool

    @property
    def dtype(self) -> str:
        """As results have it."""
        return backends.dtype_name(self.precision) + (" static" if self.static else "")


WAYS = (
    Way("bf16", "bf16", False),
    Way("fp8-dynamic", "fp8", False),
    Way("fp8-static", "fp8", True),
)

NAMES = tuple(way.name for way in WAYS)

# Headroom of static scales over the arrays that they come from.
_HEADROOM = 1.1


def select(names: Sequence[str]) -> list[Way]:
    """The ways of those names, in their own order; BF16, which others are compared with, always.

    Raises:
      CommandError: a name is unknown.
    """
    chosen = {WAYS[0].name, *choose("ways", names, NAMES)}
    return [way for way in WAYS if way.name in chosen]


def static_scales(q: Any, k: Any, v: Any) -> jaxfp8.LayerScales:
    """From arrays like those to come, [T, H, D] each.

    Raises:
      CommandError: no FP8 format is known for the device.
    """
    fmt = detect_target().fp8_format
    if fmt is None:
        raise CommandError(f"no FP8 format is known for {detect_target().arch}")
    return jaxfp8.LayerScales(
        *(
            jaxfp8.descale_from_amax(jaxfp8.per_head_amax(x), fmt, margin=_HEADROOM)
            for x in (q, k, v)
        )
    )


def chosen_backend(precision: Precision, name: str | None, heads: int) -> str:
    """The backend that serves MLA's head dims here, the named one or the library's choice."""
    spec = AttentionSpec(
        precision, backends.fp8_format(precision), heads, inputs.QK_HEAD_DIM, inputs.V_HEAD_DIM
    )
    return choose_backend(name, spec, detect_target()).name
