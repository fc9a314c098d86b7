# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Keys of which a part is shared by all heads, never put together in memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxfp8.head_slice import HeadSlice, as_array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AssembledKey:
    """K [T, H, Dn + Dr]: `nope` of each head, then `rope`, the same for all heads.

    MLA has such keys. Putting them together in bfloat16 writes and reads K once more; a quantizing
    kernel reads the two parts where they lie. Both have one dtype.

    Attributes:
      nope: [T, H, Dn], or a slice of a wider array: kv_nope [T, H, 256] holds it beside V.
      rope: [T, Dr].
    """

    nope: jax.Array | HeadSlice
    rope: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the assembled keys."""
        tokens, heads, size = self.nope.shape
        return (tokens, heads, size + self.rope.shape[1])

    @property
    def dtype(self) -> Any:
        """Element type."""
        return self.nope.dtype

    def materialize(self) -> jax.Array:
        """The keys as an array [T, H, Dn + Dr]."""
        nope = as_array(self.nope)
        rope = jnp.broadcast_to(self.rope[:, None, :], (*nope.shape[:2], self.rope.shape[1]))
        return jnp.concatenate([nope, rope], axis=2)
