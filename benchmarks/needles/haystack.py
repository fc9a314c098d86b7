# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""A haystack of keys and values with needles in it, for attention alone.

Keys have channels of unlike size, a few of them outliers, and queries the inverse, as trained
models have: the scores spread by SPREAD nats, and FP8 has something to lose. A needle is a key like
the others with a part added that one query asks for in every head: its score exceeds by MARGIN nats
what all other keys weigh together, so that exact attention gives e^-MARGIN of its weight away. Its
value is one of a code book's; it counts as found if in every head the output of its row is nearest
to that one.

Segments are drawn anew whenever they are asked for, so that a context of any length takes the room
of one segment.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import inputs, reference
from common.result import Check
from common.ways import Way, static_scales

import jaxfp8
from needles.places import places

SPREAD, MARGIN = 1.5, 4.0

MOST_NEEDLES = 64
"""Values in the code book."""

_OUTLIERS, _OUTLIER = 4, 6.0
_SCALE = inputs.QK_HEAD_DIM**-0.5


class Haystack:
    """New tokens, and a context with a needle at each depth."""

    def __init__(
        self, context: int, new_tokens: int, segment: int, heads: int, depths: Sequence[int]
    ) -> None:
        self.context, self.new_tokens = context, new_tokens
        self.lengths = inputs.segment_lengths(context, segment)
        self.segment = segment
        self.heads = heads
        rng = np.random.default_rng(0)
        self.k_gain, self.v_gain = (
            _gains(rng, heads, size) for size in (inputs.QK_HEAD_DIM, inputs.V_HEAD_DIM)
        )
        self.q = _scaled(0, new_tokens, jnp.asarray(SPREAD / self.k_gain))
        self.new = self._keys_and_values(1, new_tokens)
        self.rows = new_tokens - len(depths) + np.arange(len(depths))
        self.places = places(context, depths)
        self.needles = self._needles()
        self.codes = rng.standard_normal((MOST_NEEDLES, heads, inputs.V_HEAD_DIM)) * self.v_gain
        self.scales = static_scales(self.q, *self.part(0))

    def part(self, number: int) -> tuple[jax.Array, jax.Array]:
        """k and v of a segment, [segment, H, D]; of the last some tokens are past the context."""
        k, v = self._keys_and_values(2 + number, self.segment)
        for i, place in enumerate(self.places):
            if place // self.segment == number:
                at = place % self.segment
                k = k.at[at].set(self.needles[i])
                v = v.at[at].set(jnp.asarray(self.codes[i], jnp.bfloat16))
        return k, v

    def run(self, way: Way, backend: str | None, on_segment: Any) -> tuple[np.ndarray, np.ndarray]:
        """out [Tq, H, Dv] and lse [H, Tq] of a pass."""
        scales = self.scales if way.static else jaxfp8.LayerScales(None, None, None)
        start = jax.jit(jaxfp8.start_prefill, static_argnames=("precision", "backend"))
        state = start(
            self.q, inputs.cu_seqlens([self.new_tokens]),
            precision=way.precision, q_descale=scales.q, backend=backend,
        )  # fmt: skip
        state = jax.jit(jaxfp8.attend_new_tokens)(state, *self.new)
        step = jax.jit(jaxfp8.attend_segment)
        for number, length in enumerate(self.lengths):
            k, v = self.part(number)
            state = step(
                state, k, v, inputs.cu_seqlens([length]), k_descale=scales.k, v_descale=scales.v
            )
            # Else the host would run ahead and hold many segments at once.
            jax.block_until_ready(state.lse)
            on_segment()
        return np.asarray(state.out), np.asarray(state.lse)

    def found(self, out: np.ndarray) -> list[bool]:
        """Whether each needle is, in every head."""
        answers = out[self.rows].astype(np.float64)  # [N, H, Dv]
        distances = np.linalg.norm(answers[:, None] - self.codes[None], axis=-1)  # [N, C, H]
        return (distances.argmin(axis=1) == np.arange(len(self.rows))[:, None]).all(axis=1).tolist()

    def check(self, out: np.ndarray, lse: np.ndarray, way: Way) -> tuple[Check, ...]:
        """Against float64, for the rows that ask for needles, some others, and some heads."""
        exact, sampled = self._exact
        return reference.compare(out, lse, exact, sampled, way.precision)

    @functools.cached_property
    def _exact(self) -> tuple[reference.Exact, reference.Sample]:
        others = np.linspace(0, self.new_tokens - 1, 8).astype(int)
        sampled = reference.Sample(
            np.unique([*self.rows, *others]), np.unique([0, self.heads // 2, self.heads - 1])
        )

        def chunks() -> Any:
            for number, length in enumerate(self.lengths):
                # float32 from the device: NumPy is slow with bfloat16.
                part = (x[:length, sampled.heads] for x in self.part(number))
                yield tuple(np.asarray(x.astype(jnp.float32)) for x in part)
            yield tuple(np.asarray(x[:, sampled.heads]) for x in self.new)

        q = np.asarray(self.q[sampled.rows][:, sampled.heads])
        visible = self.context + sampled.rows + 1
        return reference.attention_rows(q, chunks(), visible, _SCALE), sampled

    def _keys_and_values(self, seed: int, tokens: int) -> tuple[jax.Array, jax.Array]:
        return (
            _scaled(2 * seed, tokens, jnp.asarray(self.k_gain)),
            _scaled(2 * seed + 1, tokens, jnp.asarray(self.v_gain)),
        )

    def _needles(self) -> jax.Array:
        """bfloat16 [N, H, Dqk]: a key for each row that asks."""
        asking = np.asarray(self.q[self.rows]).astype(np.float64)  # [N, H, Dqk]
        wanted = math.log(self.context + self.new_tokens) + SPREAD**2 / 2 + MARGIN
        plain = np.asarray(_scaled(10**6, len(self.rows), jnp.asarray(self.k_gain)))
        plain = plain.astype(np.float64)
        # In the direction of the query, as far as keys reach in each channel.
        direction = asking * self.k_gain**2
        missing = wanted - _SCALE * (asking * plain).sum(axis=2)
        per_unit = _SCALE * (asking * direction).sum(axis=2)
        return jnp.asarray(plain + (missing / per_unit)[:, :, None] * direction, jnp.bfloat16)


def _gains(rng: np.random.Generator, heads: int, size: int) -> np.ndarray:
    """float64 [H, D]: sizes of channels, some of them outliers."""
    gains = rng.lognormal(0.0, 0.3, (heads, size))
    for head in range(heads):
        gains[head, rng.permutation(size)[:_OUTLIERS]] *= _OUTLIER
    return gains


@functools.partial(jax.jit, static_argnums=1)
def _scaled(seed: Any, tokens: int, gain: jax.Array) -> jax.Array:
    """bfloat16 [tokens, H, D] of N(0, gain^2)."""
    noise = jax.random.normal(jax.random.key(seed), (tokens, *gain.shape), jnp.float32)
    return (noise * gain).astype(jnp.bfloat16)
