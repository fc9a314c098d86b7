# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Shapes that change with every call, made few: arrays are padded to the sizes of a set.

XLA compiles a program for every shape. The kernels take arrays that are longer than what they
hold (capacity), so a call with T tokens runs the program for the next size of the set. A tensor
that has such a size already is used as it is; any other is copied into one, on the device and on
torch's current stream.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable

import torch

from jaxfp8.scales.arguments import integer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buckets:
    """The sizes that calls are padded to.

    A size beyond the largest is rounded up to a multiple of the largest. The number of programs
    that attention can be compiled for is the product of the three, for each set of options.

    Attributes:
      query_tokens: of the new tokens, ascending.
      context_tokens: of the keys and values, ascending.
      sequences: of the sequences of a batch, ascending.

    Raises:
      TypeError: a set that is none, or has a size that is not an integer.
      ValueError: a set that is empty, does not ascend, or has a size below 1.
    """

    query_tokens: tuple[int, ...] = tuple(2**n for n in range(8, 17))
    context_tokens: tuple[int, ...] = tuple(2**n for n in range(8, 17))
    sequences: tuple[int, ...] = (1, 8, 64, 512)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str) or not isinstance(value, Iterable):
                raise TypeError(f"{field.name}: expected sizes, got {value!r}")
            sizes = tuple(integer(field.name, size) for size in value)
            object.__setattr__(self, field.name, sizes)
            if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
                raise ValueError(f"{field.name}: expected ascending sizes >= 1, got {sizes}")


_buckets: Buckets | None = Buckets()


def set_buckets(buckets: Buckets | None) -> None:
    """Chooses the sizes for all later calls; None runs every call in its own shape, which
    compiles anew for each.

    Raises:
      TypeError: neither Buckets nor None.
    """
    global _buckets
    if not (buckets is None or isinstance(buckets, Buckets)):
        raise TypeError(f"buckets: expected Buckets or None, got {type(buckets).__name__}")
    _buckets = buckets


def get_buckets() -> Buckets | None:
    """The sizes in force."""
    return _buckets


def query_capacity(tokens: int) -> int:
    """Rows of the queries that a call with so many new tokens runs with."""
    return tokens if _buckets is None else _round_up(tokens, _buckets.query_tokens)


def context_capacity(tokens: int) -> int:
    """Rows of the keys that a call with so many keys runs with."""
    return tokens if _buckets is None else _round_up(tokens, _buckets.context_tokens)


def sequence_capacity(sequences: int) -> int:
    """Sequences that a batch of so many runs with; those added are empty."""
    return sequences if _buckets is None else _round_up(sequences, _buckets.sequences)


def _round_up(size: int, sizes: tuple[int, ...]) -> int:
    if size > sizes[-1]:
        return -(-size // sizes[-1]) * sizes[-1]
    return sizes[bisect.bisect_left(sizes, size)]


def pad_rows(x: torch.Tensor, capacity: int) -> torch.Tensor:
    """x [T, ...], or a copy of it at the start of [capacity, ...]; the rest holds anything."""
    if x.shape[0] == capacity:
        return x
    padded = x.new_empty((capacity, *x.shape[1:]))
    padded[: x.shape[0]].copy_(x)
    return padded


def pad_rows_with_zeros(x: torch.Tensor, capacity: int) -> torch.Tensor:
    """As `pad_rows`, with zeros in the rest."""
    padded = pad_rows(x, capacity)
    if padded is not x:
        padded[x.shape[0] :].zero_()
    return padded


def pad_columns(x: torch.Tensor, capacity: int) -> torch.Tensor:
    """x [H, T], or a copy of it at the start of [H, capacity]; the rest holds anything."""
    if x.shape[1] == capacity:
        return x
    padded = x.new_empty((x.shape[0], capacity))
    padded[:, : x.shape[1]].copy_(x)
    return padded
