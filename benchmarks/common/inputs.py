# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Random inputs: sequences, and the tensors of MLA attention. Never zeros."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp8

QK_HEAD_DIM, NOPE_DIM, ROPE_DIM, V_HEAD_DIM = 192, 128, 64, 128

# Past the largest of a head's values of variance 1, nearly always: static scales are made of it.
AMAX = 5.5

MIXES = ("single", "uniform", "ragged")

# Twice the largest cache of the devices this is meant for: 256 MB on an MI300X.
_PAST_THE_CACHE = 2 * 256 * 10**6
_MOST_SETS = 64


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences of new tokens and of keys.

    Attributes:
      lengths_q: new tokens of each.
      lengths_k: keys of each.
      causal: aligned bottom right.
    """

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    causal: bool

    @property
    def tokens_q(self) -> int:
        """New tokens in all."""
        return sum(self.lengths_q)

    @property
    def tokens_k(self) -> int:
        """Keys in all."""
        return sum(self.lengths_k)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        pairs = 0
        for q, k in zip(self.lengths_q, self.lengths_k, strict=True):
            if self.causal:
                # Row i sees i + 1 + k - q keys, and none where that is not positive.
                rows = min(q, k)
                pairs += rows * k - rows * (rows - 1) // 2
            else:
                pairs += q * k
        return pairs

    def flops(self, heads: int) -> int:
        """Of Q K^T and P V over the pairs."""
        return 2 * self.pairs * heads * (QK_HEAD_DIM + V_HEAD_DIM)


def batch(mix: str, tokens_q: int, tokens_k: int, causal: bool, sequences: int) -> Batch:
    """So many tokens as sequences of a mix.

    "single": one. "uniform": of one length, or the first a token longer where it does not divide.
    "ragged": what a server packs together, new tokens and contexts drawn from a log-normal
    distribution, from a few rows to a large part of the whole, and one request without context.
    """
    if mix == "single":
        return Batch((tokens_q,), (tokens_k,), causal)
    if mix == "uniform":
        return Batch(_even(tokens_q, sequences), _even(tokens_k, sequences), causal)
    rng = np.random.default_rng(0)
    lengths_q = _ragged(tokens_q, sequences, rng)
    # A causal request's keys are its context and its new tokens.
    own = lengths_q if causal and tokens_k >= tokens_q else (0,) * sequences
    context = _ragged(tokens_k - sum(own), sequences, rng, one_empty=True)
    lengths_k = tuple(a + b for a, b in zip(own, context, strict=True))
    return Batch(lengths_q, lengths_k, causal)


def _even(total: int, parts: int) -> tuple[int, ...]:
    length, longer = divmod(total, parts)
    return (length + 1,) * longer + (length,) * (parts - longer)


def _ragged(
    total: int, parts: int, rng: np.random.Generator, one_empty: bool = False
) -> tuple[int, ...]:
    weights = rng.lognormal(0.0, 1.0, parts)
    if one_empty and parts > 1:
        weights[parts // 2] = 0.0
    lengths = np.floor(weights / weights.sum() * total).astype(int)
    lengths[np.argmax(weights)] += total - lengths.sum()
    return tuple(int(x) for x in lengths)


def segment_lengths(context: int, segment: int) -> list[int]:
    """Tokens of each segment of a context."""
    full, rest = divmod(context, segment)
    return [segment] * full + ([rest] if rest else [])


def cu_seqlens(lengths: Sequence[int]) -> jax.Array:
    """int32 [B + 1]."""
    return jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32)


class Tensors(NamedTuple):
    """bfloat16 q [Tq, H, 192], k [Tk, H, 192], v [Tk, H, 128]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


def normal(seed: int, *shape: int) -> jax.Array:
    """bfloat16, of variance 1; on the device, the same for the same seed."""
    return _normal(jax.random.key(seed), shape)


def sets_past_the_cache(bytes_of_one: int) -> int:
    """How many sets of inputs keep any cache from holding the next: 1 on a CPU, whose caches are
    no part of what is compared there.
    """
    if jax.default_backend() == "cpu":
        return 1
    return min(_MOST_SETS, max(1, -(-_PAST_THE_CACHE // max(1, bytes_of_one))))


def tensor_sets(tokens_q: int, tokens_k: int, heads: int) -> list[Tensors]:
    """As many sets as keep them out of the caches."""
    shapes = (
        (tokens_q, heads, QK_HEAD_DIM),
        (tokens_k, heads, QK_HEAD_DIM),
        (tokens_k, heads, V_HEAD_DIM),
    )
    # Counted in FP8, a byte an element: that is the least that an implementation reads of a set.
    sets = sets_past_the_cache(sum(int(np.prod(shape)) for shape in shapes))
    return [
        Tensors(*(normal(3 * i + j, *shape) for j, shape in enumerate(shapes))) for i in range(sets)
    ]


def up_projected(seed: int, tokens: int, heads: int) -> tuple[jax.Array, jax.Array]:
    """K and V as an up-projection leaves them, bfloat16: [T, H, 128 + 128], K's own columns of each
    head beside V, and [T, 64], those of K that all heads share.
    """
    nope_and_v = normal(2 * seed, tokens, heads, NOPE_DIM + V_HEAD_DIM)
    return nope_and_v, normal(2 * seed + 1, tokens, ROPE_DIM)


def views(nope_and_v: Any, rope: Any) -> tuple[jaxfp8.AssembledKey, jaxfp8.HeadSlice]:
    """K and V of what `up_projected` gives, where they lie."""
    key = jaxfp8.AssembledKey(jaxfp8.HeadSlice(nope_and_v, 0, NOPE_DIM), rope)
    return key, jaxfp8.HeadSlice(nope_and_v, NOPE_DIM, V_HEAD_DIM)


def pick(sets: Sequence[Any], number: int) -> Any:
    """The set of a launch."""
    return sets[number % len(sets)]


@functools.partial(jax.jit, static_argnums=1)
def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    # Drawn in bfloat16 it would have 128 values in all, unlike above and below zero: the errors of
    # rounding these to FP8 have a mean, and in a long sum of weighted V that is most of the error.
    return jax.random.normal(key, shape, jnp.float32).astype(jnp.bfloat16)
