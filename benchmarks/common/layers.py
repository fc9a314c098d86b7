# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""MLA layers with seeded weights, and what goes into them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from common import inputs
from jaxfp8.models import MlaConfig, MlaWeights, mla, random_weights
from jaxfp8.models.batch import PrefillBatch

# JAX counts random bits in 32 bits, and the bits of a piece are in memory at once.
PIECE = 1 << 16


@functools.partial(jax.jit, static_argnums=(0, 2))
def seeded_weights(config: MlaConfig, seed: Any, num_heads: int) -> MlaWeights:
    """`jaxfp8.models.random_weights`, compiled."""
    return random_weights(config, jax.random.key(seed), num_heads=num_heads)


def seeded_latents(config: MlaConfig, seed: int, tokens: int) -> jax.Array:
    """bfloat16 [tokens, latent_dim] of variance 1."""
    starts = range(0, tokens, PIECE)
    pieces = [latent_piece(config, seed, at, min(PIECE, tokens - at)) for at in starts]
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)


def latent_piece(config: MlaConfig, seed: int, at: int, tokens: int) -> jax.Array:
    """The tokens at, at + 1, ... of `seeded_latents`; `at` is a multiple of PIECE."""
    return inputs.normal(1000 * (seed + 1) + at // PIECE, tokens, config.latent_dim)


@functools.partial(jax.jit, static_argnums=0)
def projected(
    config: MlaConfig, weights: MlaWeights, hidden: jax.Array, cached: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Q of hidden states, K and V of cached latents, bfloat16 [T, H, D]."""
    k, v = mla.up_project(config, weights, cached)
    return mla.queries(config, weights, hidden), k.materialize(), v.materialize()


def one_sequence(new_tokens: int, context: int, capacity: int) -> PrefillBatch:
    """A batch of one sequence, whose region of the cache has `capacity` rows."""
    return PrefillBatch(
        cu_seqlens_q=inputs.cu_seqlens([new_tokens]),
        context_lens=jnp.asarray([context], jnp.int32),
        cu_seqlens_cache=inputs.cu_seqlens([capacity]),
    )
