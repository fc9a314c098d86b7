# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""A latent cache with needles in it, for a whole MLA layer with seeded weights.

A needle is a cached token whose latent is the nearest one to a random latent that gives one query
the score it needs, MARGIN nats above what all other tokens weigh together, in every head: with few
heads and many latent columns there is one. Nothing in the layer's weights helps.

What the layer would say had it found a needle is what it says of a context that holds the needle
alone. A needle counts as found if the output of its row is nearest to that, among those of all
needles and of a token that no query asks for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from common import inputs, reference
from common.layers import PIECE, latent_piece, one_sequence, projected, seeded_weights
from common.result import Check
from common.ways import WAYS, Way, static_scales

from jaxfp8.models import MlaConfig
from jaxfp8.models.prefill import prefill_layer
from needles.places import places

SPREAD, MARGIN = 2.0, 4.0


class LatentHaystack:
    """New tokens, and a cache with a needle at each depth.

    The cache has room for `longest` tokens of context, so that one compiled program serves every
    context up to that.
    """

    def __init__(
        self,
        config: MlaConfig,
        context: int,
        longest: int,
        new_tokens: int,
        segment: int,
        heads: int,
        depths: Sequence[int],
        backend: str | None,
    ) -> None:
        self.config, self.segment, self.backend = config, segment, backend
        self.context, self.new_tokens = context, new_tokens
        self.capacity = longest + new_tokens
        weights = seeded_weights(config, 0, heads)
        # Scores of q and k of unit variance spread by 1 nat.
        self.weights = weights._replace(q_b_proj=weights.q_b_proj * SPREAD)
        self.hidden = inputs.normal(0, new_tokens, config.hidden_size)
        self.rows = new_tokens - len(depths) + np.arange(len(depths))
        self.places = places(context, depths)
        cached = latent_piece(config, 0, 0, min(context, PIECE))
        q, k, v = projected(config, self.weights, self.hidden, cached)
        self.needles = self._needles(q)
        self.scales = static_scales(q, k, v)
        self.score_norm = reference.first_rows_norm(q, k, config.softmax_scale)
        self.candidates = self._candidates()

    def run(self, way: Way) -> np.ndarray:
        """float32 [T, hidden_size]: the layer's output."""
        pieces = [self._piece(at) for at in range(0, self.context, PIECE)]
        return self._prefill(jnp.concatenate(pieces), way)

    def found(self, out: np.ndarray) -> list[bool]:
        """Whether each needle is."""
        answers = out[self.rows]
        said = np.stack([x[self.rows] for x in self.candidates], axis=1)  # [N, C, hidden_size]
        distances = np.linalg.norm(answers[:, None] - said, axis=-1)
        return (distances.argmin(axis=1) == np.arange(len(self.rows))).tolist()

    def check(self, out: np.ndarray, bf16: np.ndarray) -> tuple[Check, ...]:
        """FP8 against BF16, over all rows and over those that ask."""
        limit = reference.out_limit("fp8", self.score_norm)
        return tuple(
            Check(name, reference.relative_error(out[rows], bf16[rows]), limit)
            for name, rows in (
                ("relative error to BF16", slice(None)),
                ("relative error to BF16 at needles", self.rows),
            )
        )

    def _piece(self, at: int) -> jax.Array:
        """bfloat16 [tokens, latent_dim]: a part of the context."""
        tokens = min(PIECE, self.context - at)
        cached = latent_piece(self.config, 0, at, tokens)
        for i, place in enumerate(self.places):
            if at <= place < at + tokens:
                cached = cached.at[place - at].set(self.needles[i])
        return cached

    def _prefill(self, context: jax.Array, way: Way) -> np.ndarray:
        """The layer's output over a context."""
        tokens = context.shape[0]
        room = jnp.zeros((self.capacity - tokens, self.config.latent_dim), jnp.bfloat16)
        batch = one_sequence(self.new_tokens, tokens, self.capacity)
        result = prefill_layer(
            self.config, self.weights, self.hidden, jnp.concatenate([context, room]), batch,
            segment=self.segment, precision=way.precision,
            scales=self.scales if way.static else None, backend=self.backend,
        )  # fmt: skip
        return np.asarray(result.out)

    def _candidates(self) -> list[np.ndarray]:
        """What the layer says of each needle alone, and last of a token that nobody asks for."""
        plain = inputs.normal(10**6, 1, self.config.latent_dim)
        return [self._prefill(x, WAYS[0]) for x in (*self.needles[:, None], plain)]

    def _needles(self, q: jax.Array) -> jax.Array:
        """bfloat16 [N, latent_dim]."""
        nope = self.config.qk_nope_head_dim
        to_k = np.asarray(self.weights.kv_b_proj[:, :nope]).astype(np.float64)  # [H, nope, rank]
        asking = np.asarray(q[self.rows]).astype(np.float64)  # [N, H, Dqk]
        # A score is this vector of a head times the latent.
        scores = self.config.softmax_scale * np.concatenate(
            [np.einsum("nhd,hdr->nhr", asking[:, :, :nope], to_k), asking[:, :, nope:]], axis=2
        )
        wanted = math.log(self.context + self.new_tokens) + SPREAD**2 / 2 + MARGIN
        shape = (len(self.rows), self.config.latent_dim)
        plain = np.asarray(inputs.normal(10**6 + 1, *shape)).astype(np.float64)
        needles = [
            latent + np.linalg.lstsq(score, wanted - score @ latent, rcond=None)[0]
            for score, latent in zip(scores, plain, strict=True)
        ]
        return jnp.asarray(np.stack(needles), jnp.bfloat16)
