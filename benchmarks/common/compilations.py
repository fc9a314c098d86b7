# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""How many programs JAX compiles."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass
class Compilations:
    """What was compiled.

    Attributes:
      programs: how many.
    """

    programs: int = 0


@contextlib.contextmanager
def counted() -> Iterator[Compilations]:
    """Counts what is compiled in its scope."""
    seen = Compilations()

    def on_event(event: str, duration_secs: float, **_: Any) -> None:
        seen.programs += event == _COMPILED

    jax.monitoring.register_event_duration_secs_listener(on_event)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(on_event)
