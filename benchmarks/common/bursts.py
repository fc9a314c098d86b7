# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Flags of the programs that compare implementations in bursts."""

from __future__ import annotations

from collections.abc import Mapping

from absl import flags

from common import program
from common.timing import Subject, Timing, take_turns

_REPETITIONS = flags.DEFINE_integer("repetitions", 7, "bursts of each", lower_bound=1)
_LAUNCHES = flags.DEFINE_integer("launches", 3, "least launches of a burst", lower_bound=1)
_BURST_MS = flags.DEFINE_float("burst_ms", 20.0, "least length of a burst", lower_bound=0.0)
_MOST_S = flags.DEFINE_float(
    "most_s", 5.0, "longest time for one implementation of a case: a slow one is repeated less",
    lower_bound=0.0,
)  # fmt: skip
PAUSE = flags.DEFINE_float("pause", 0.05, "seconds of rest before a burst", lower_bound=0.0)
CEILING = flags.DEFINE_bool("ceiling", True, "measure the device's copy and matrix product")


def timed(subjects: Mapping[str, Subject], what: str) -> dict[str, Timing]:
    """The subjects, taking turns, as the flags say."""
    with program.progress(_REPETITIONS.value * len(subjects), what) as bar:
        return take_turns(
            subjects,
            turns=_REPETITIONS.value,
            least_launches=_LAUNCHES.value,
            least_seconds=1e-3 * _BURST_MS.value,
            most_seconds=_MOST_S.value,
            pause=PAUSE.value,
            on_burst=bar.update,
        )
