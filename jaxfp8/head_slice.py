# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""A slice of every head of a wider array, read in place."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadSlice:
    """The columns `start : start + size` of each head of `array`, read in place.

    A serving stack often holds V as a slice of a wider array (kv_nope [T, H, 256] holds K's 128
    columns, then V's). Slicing before a kernel call would copy; a HeadSlice lets the quantizing
    kernel read the wider array where it lies.

    Attributes:
      array: [T, H, D], D >= start + size.
      start: first column.
      size: number of columns, the head dim that the call sees.

    Example:
      >>> import jax.numpy as jnp, jaxfp8
      >>> kv_nope = jnp.ones((16, 2, 256), jnp.bfloat16)
      >>> jaxfp8.HeadSlice(kv_nope, start=128, size=128).shape
      (16, 2, 128)
    """

    array: jax.Array
    start: int = dataclasses.field(metadata={"static": True})
    size: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.array.shape[:2], self.size)

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def materialize(self) -> jax.Array:
        """The slice as an array [T, H, size]. Inside jit, XLA fuses it into its consumer."""
        return self.array[:, :, self.start : self.start + self.size]


class Materializable(Protocol):
    """A view of arrays that can be made an array: HeadSlice, AssembledKey."""

    def materialize(self) -> jax.Array:
        """The array."""
        ...


def as_array(x: jax.Array | Materializable) -> jax.Array:
    """x itself, or the array it stands for."""
    return x if isinstance(x, (jax.Array, np.ndarray)) else x.materialize()
