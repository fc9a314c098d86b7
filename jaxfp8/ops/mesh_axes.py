# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Constants that may be carried through a loop under `jax.shard_map`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def varying_like(tree: Any, *others: Any) -> Any:
    """`tree`, unchanged, typed as varying over the mesh axes that `others` vary over.

    shard_map types arrays by the mesh axes they vary over, and a loop's carry must go out as it
    came in: a constant that the loop body adds sharded data to would not. Each array of `others`
    that is not empty takes part through its first element.
    """
    never = jnp.zeros((), bool)
    for x in jax.tree.leaves(others):
        if x.size:
            first = jnp.isnan(x[(0,) * x.ndim].astype(jnp.float32))
            never = never | (first & ~first)
    return jax.tree.map(lambda x: jnp.where(never, jnp.ones((), x.dtype), x), tree)
