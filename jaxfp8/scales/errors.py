# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The error that every refused artifact and shard ends in."""

from __future__ import annotations

import os
from collections.abc import Sequence


class ScaleArtifactError(ValueError):
    """Scales that cannot be used, with everything that is wrong with them.

    Attributes:
      source: the file or folder that was refused, or a word for what was refused in memory.
      problems: one line for each thing that is wrong.
    """

    def __init__(self, source: str | os.PathLike[str], problems: Sequence[str]) -> None:
        self.source = os.fspath(source)
        self.problems = tuple(problems)
        count = "" if len(self.problems) == 1 else f"{len(self.problems)} problems: "
        super().__init__(f"{self.source!r}: {count}{'; '.join(self.problems)}")

    def __reduce__(self) -> tuple[type[ScaleArtifactError], tuple[str, tuple[str, ...]]]:
        # The default would call the constructor with the finished message alone, so that an error
        # raised in a worker process could not travel to its parent.
        return type(self), (self.source, self.problems)


def shown(value: object) -> str:
    """repr of a value that came from a file, on one line and cut to a length fit for a message."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:96]} ..."


def listed(items: Sequence[object]) -> str:
    """The first few of many items, and how many there are."""
    head = ", ".join(str(item) for item in items[:8])
    return head if len(items) <= 8 else f"{head}, ... ({len(items)} in all)"
