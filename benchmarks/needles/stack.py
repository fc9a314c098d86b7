# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""How the error of FP8 grows through a stack of MLA layers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import inputs, reference
from common.layers import one_sequence, projected, seeded_latents, seeded_weights
from common.ways import WAYS, Way, static_scales

from jaxfp8.models import MlaConfig, mla
from jaxfp8.models.prefill import prefill_layer

# Of the scores, in nats: few of thousands of keys get most of the weight, as in trained models.
# With less, a layer would say next to nothing, and its errors would drown in the hidden states.
_SPREAD = 3.0


@dataclasses.dataclass(frozen=True)
class Growth:
    """Relative errors of a way to BF16 through a stack of layers, one a layer.

    Attributes:
      hidden: of the hidden states behind each layer, errors of the layers before included.
      layer: of each layer's output, given the hidden states of BF16.
      score_norm: the largest of the layers' norms of q * k (reference.py).
    """

    hidden: list[float]
    layer: list[float]
    score_norm: float


def error_growth(
    config: MlaConfig,
    layers: int,
    context: int,
    new_tokens: int,
    segment: int,
    ways: Sequence[Way],
    backend: str | None,
    on_layer: Any,
) -> dict[str, Growth]:
    """Errors through a stack of residual layers, hidden = hidden + layer(rms_norm(hidden)).

    Each layer has weights and a random context of its own; there is nothing else between them.
    Static scales come from each layer's own context and the queries of the BF16 stack.
    """
    growth = {way.name: Growth([], [], 0.0) for way in ways}
    start = inputs.normal(0, new_tokens, config.hidden_size).astype(jnp.float32)
    hidden = {way.name: start for way in ways}
    exact = start
    norm = 0.0
    for layer in range(layers):
        block = _Block(config, layer, context, new_tokens, segment, backend)
        scales, norm_of_layer = block.scales(exact)
        norm = max(norm, norm_of_layer)
        exact_out = block(exact, WAYS[0], None)
        for way in ways:
            given = scales if way.static else None
            out = block(exact, way, given)
            growth[way.name].layer.append(_error(out, exact_out))
            hidden[way.name] = hidden[way.name] + block(hidden[way.name], way, given)
            growth[way.name].hidden.append(_error(hidden[way.name], exact + exact_out))
            on_layer()
        exact = exact + exact_out
    return {name: dataclasses.replace(x, score_norm=norm) for name, x in growth.items()}


class _Block:
    """A layer of the stack, with its context."""

    def __init__(
        self,
        config: MlaConfig,
        number: int,
        context: int,
        new_tokens: int,
        segment: int,
        backend: str | None,
    ) -> None:
        self.config, self.segment, self.backend = config, segment, backend
        weights = seeded_weights(config, number, config.num_heads)
        # Scores of q and k of unit variance spread by 1 nat.
        self.weights = weights._replace(q_b_proj=weights.q_b_proj * _SPREAD)
        self.cached = seeded_latents(config, number, context)
        self.batch = one_sequence(new_tokens, context, context + new_tokens)
        self.room = jnp.zeros((new_tokens, config.latent_dim), jnp.bfloat16)

    def __call__(self, hidden: jax.Array, way: Way, scales: Any) -> jax.Array:
        """float32 [T, hidden_size]: the layer's output."""
        return prefill_layer(
            self.config, self.weights, _normalized(hidden, self.config.rms_norm_eps),
            jnp.concatenate([self.cached, self.room]), self.batch,
            segment=self.segment, precision=way.precision, scales=scales, backend=self.backend,
        ).out  # fmt: skip

    def scales(self, hidden: jax.Array) -> tuple[Any, float]:
        """Static scales, and the norm of q * k (reference.py)."""
        normalized = _normalized(hidden, self.config.rms_norm_eps)
        q, k, v = projected(self.config, self.weights, normalized, self.cached)
        return static_scales(q, k, v), reference.first_rows_norm(q, k, self.config.softmax_scale)


@functools.partial(jax.jit, static_argnums=1)
def _normalized(hidden: jax.Array, eps: float) -> jax.Array:
    ones = jnp.ones(hidden.shape[1], jnp.bfloat16)
    return mla.rms_norm(hidden, ones, eps).astype(jnp.bfloat16)


def _error(actual: Any, expected: Any) -> float:
    return reference.relative_error(*(np.asarray(x).astype(np.float64) for x in (actual, expected)))
