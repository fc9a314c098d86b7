# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The one way to time: bursts of launches that take turns.

A burst launches a subject many times without waiting and then waits for the last, so that neither
the start of a burst nor the host counts. The subjects of a comparison take turns, each turn begun
by another, so that a drift of the clock or of the power meets all alike. A subject is told the
number of the launch and takes its inputs by it: where they are small enough to stay in a cache,
there are several sets of them (inputs.py). A slow one gets fewer and shorter bursts, down to one of
one launch, so that it does not hold up the others.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Subject:
    """Something to be timed.

    Attributes:
      launch: starts the work on the i-th set of inputs and returns what `wait` waits for.
      wait: returns when that, and all launched before it, is done.
      output: what a launch returned, as a reference check wants it.
    """

    launch: Callable[[int], Any]
    wait: Callable[[Any], object] = jax.block_until_ready
    output: Callable[[Any], Any] = lambda result: result

    def run(self, number: int = 0) -> Any:
        """One launch, waited for: what `output` makes of it."""
        result = self.launch(number)
        self.wait(result)
        return self.output(result)


@dataclasses.dataclass(frozen=True)
class Timing:
    """What was measured.

    Attributes:
      seconds: of one launch; one value a turn.
      launches: in a burst.
    """

    seconds: tuple[float, ...]
    launches: int

    @functools.cached_property
    def median_ms(self) -> float:
        """Median, milliseconds."""
        return 1e3 * statistics.median(self.seconds)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a Result that say it."""
        quartiles = None
        if len(self.seconds) > 1:
            first, _, third = statistics.quantiles(self.seconds, n=4, method="inclusive")
            quartiles = (1e3 * first, 1e3 * third)
        return {
            "median_ms": self.median_ms,
            "quartiles_ms": quartiles,
            "repetitions": len(self.seconds),
        }


def burst(subject: Subject, launches: int) -> float:
    """Seconds a launch, of as many as given."""
    start = time.perf_counter()
    result = None
    for number in range(launches):
        result = subject.launch(number)
    subject.wait(result)
    return (time.perf_counter() - start) / launches


def launches_for(subject: Subject, least: int, seconds: float) -> int:
    """Launches of a burst of at least so many launches and so many seconds; warms up as well."""
    burst(subject, 2)
    return max(least, int(seconds / burst(subject, least)) + 1 if seconds else least)


def _bursts_for(
    subject: Subject, turns: int, least: int, seconds: float, most: float
) -> tuple[int, int]:
    """Bursts, and launches of each; where those asked for would take over `most` seconds, fewer."""
    one = burst(subject, 1)
    if turns * least * one <= most:
        return turns, launches_for(subject, least, seconds)
    return max(1, min(turns, int(most / one))), 1


def take_turns(
    subjects: Mapping[str, Subject],
    *,
    turns: int,
    least_launches: int = 1,
    least_seconds: float = 0.0,
    most_seconds: float = math.inf,
    pause: float = 0.0,
    on_burst: Callable[[], object] = lambda: None,
) -> dict[str, Timing]:
    """Times subjects against each other.

    Args:
      subjects: by name.
      turns: bursts of each.
      least_launches: of a burst.
      least_seconds: that a burst lasts.
      most_seconds: of a subject in all; one that would take longer has bursts of one launch, and
        fewer of them.
      pause: seconds of rest before each burst, for the chip to cool.
      on_burst: called after each burst.
    """
    plans = {
        name: _bursts_for(subject, turns, least_launches, least_seconds, most_seconds)
        for name, subject in subjects.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    names = list(subjects)
    for turn in range(turns):
        first = turn % max(1, len(names))
        for name in names[first:] + names[:first]:
            bursts, launches = plans[name]
            if turn < bursts:
                time.sleep(pause)
                seconds[name].append(burst(subjects[name], launches))
            on_burst()
    return {name: Timing(tuple(x), plans[name][1]) for name, x in seconds.items()}
