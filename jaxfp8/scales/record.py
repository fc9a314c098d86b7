# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""What the frozen dataclasses of this package have in common where they hold arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, cast

import numpy as np


class Record:
    """A base of frozen dataclasses, which are declared with eq=False.

    Two are equal where all their fields are, arrays included; equal ones have equal hashes. A copy,
    also one in another process, is made by the constructor, so that it is checked and its arrays
    are read-only like those of the original.
    """

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return _comparable(_values(self)) == _comparable(_values(other))

    def __hash__(self) -> int:
        return hash(_comparable(_values(self)))

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        values = {
            name: dict(value) if isinstance(value, Mapping) else value
            for name, value in _values(self).items()
        }
        return functools.partial(type(self), **values), ()


def _values(record: object) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(cast(Any, record))]
    return {name: getattr(record, name) for name in names}


def _comparable(value: Any) -> Hashable:
    if isinstance(value, Mapping):
        return tuple((key, _comparable(item)) for key, item in value.items())
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes()
    return cast(Hashable, value)
