# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of what a caller gives: a wrong kind is a TypeError that names the argument."""

from __future__ import annotations

import os
from typing import Any

import numpy as np


def require(name: str, value: object, kind: type | tuple[type, ...], expected: str) -> None:
    """TypeError unless value is of a kind.

    Args:
      name: the argument's name.
      value: what was given.
      kind: what isinstance takes.
      expected: the same in words, "an Identity".
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected {expected}, got {type(value).__name__}")


def require_path(name: str, value: object) -> None:
    """TypeError unless value is a path: a number would be taken for an open file."""
    require(name, value, (str, os.PathLike), "a path")


def plain(value: Any) -> Any:
    """value, a NumPy number made Python's: sizes and indices often come out of arrays."""
    return value.item() if isinstance(value, np.integer | np.floating) else value


def integer(name: str, value: object) -> int:
    """value as an int.

    Raises:
      TypeError: it is no integer, neither Python's nor NumPy's.
    """
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return int(value)
    raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")
