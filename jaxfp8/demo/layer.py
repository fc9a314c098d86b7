# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""A small gated MLA layer in the shape of Kimi-K3's, with seeded weights.

Queries, keys and values come out of low-rank latents, as in the model: 12 heads, 128 + 64 query
and key channels of which the 64 are shared by the heads and, being NoPE, not rotated, 128 value
channels, RMSNorm on the latents, and a sigmoid gate on the attention output. Hidden size and ranks
are small.

The weights are drawn, not trained, so two things are put there on purpose:

- Retrieval. The hidden state of a token holds what earlier layers of a trained model would have
  left there: the token itself, what stands before it, and what stands before the token to come.
  RETRIEVAL_HEADS heads compare the latter two, query with key, and so find where the present
  words have occurred before, and with them the token that came next (an induction head). The
  other heads have unrelated query and key weights and attend broadly.
- Outliers. A few channels of Q, K and V are several times as large as the rest, as in trained
  models, so that the FP8 scale of a head, set by its largest value, leaves the rest less room.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

NUM_HEADS = 12
RETRIEVAL_HEADS = 8
NOPE_DIM = 128
ROPE_DIM = 64
QK_HEAD_DIM = NOPE_DIM + ROPE_DIM
V_HEAD_DIM = 128

_TOKEN_DIM = 96
_CONTEXT_DIM = 208
HIDDEN = _TOKEN_DIM + 2 * _CONTEXT_DIM
_CONTEXT_RANK = 160
Q_LORA_RANK = _CONTEXT_RANK
KV_LORA_RANK = _CONTEXT_RANK + _TOKEN_DIM

_RMS_EPS = 1e-5
SOFTMAX_SCALE = QK_HEAD_DIM**-0.5

# What stands before a token: this many bytes before its word, and how far into the word it is.
_CONTEXT_BYTES = 12
_MAX_INDEX = 32
_INDEX_WEIGHT = 0.6

# Scores, in nats: of a full match in a retrieval head, and their spread in a broad one. The best
# chance match comes to some 60 % of a full one, and there are `context` of them.
_MATCH_SCORE = 30.0
_BROAD_SCORE = 2.0

_OUTLIER_CHANNELS = 4
_OUTLIER = 8.0


class Weights(NamedTuple):
    """The layer's weights, float32. Rows are mapped: y = x @ w."""

    q_down: jax.Array  # [HIDDEN, Q_LORA_RANK]
    q_up: jax.Array  # [Q_LORA_RANK, H, Dqk]
    kv_down: jax.Array  # [HIDDEN, KV_LORA_RANK]
    k_rope: jax.Array  # [HIDDEN, ROPE_DIM], shared by the heads
    k_up: jax.Array  # [KV_LORA_RANK, H, NOPE_DIM]
    v_up: jax.Array  # [KV_LORA_RANK, H, Dv]
    gate: jax.Array  # [HIDDEN, H, Dv]
    out: jax.Array  # [H, Dv, HIDDEN]


class Latents(NamedTuple):
    """What an MLA cache holds of each token, bfloat16: [T, KV_LORA_RANK] and [T, ROPE_DIM]."""

    kv: jax.Array
    k_rope: jax.Array


@dataclasses.dataclass(frozen=True)
class Layer:
    """The layer: hidden states from tokens, and the parts of its forward pass around attention.

    Attributes:
      weights: the layer's weights.
      token: float32 [256, _TOKEN_DIM], the embedding of each byte.
      before: float32 [_CONTEXT_BYTES, 256, _CONTEXT_DIM], of each byte at each distance.
      index: float32 [_MAX_INDEX, _CONTEXT_DIM], of the place in the word.
    """

    weights: Weights
    token: np.ndarray
    before: np.ndarray
    index: np.ndarray

    def hidden(self, tokens: np.ndarray) -> np.ndarray:
        """float32 [T, HIDDEN], RMS about 1: the hidden states of uint8 tokens [T]."""
        context = self._what_stands_before(tokens)
        return np.concatenate([self.token[tokens], context[:-1], context[1:]], axis=1)

    def supposing(self, hidden: np.ndarray) -> np.ndarray:
        """float32 [T, 256, HIDDEN]: the hidden state of the token after each of these, were it
        each of the 256 bytes. Only what values are made of is filled in.
        """
        states = np.zeros((len(hidden), 256, HIDDEN), np.float32)
        states[:, :, :_TOKEN_DIM] = self.token
        states[:, :, _TOKEN_DIM:-_CONTEXT_DIM] = hidden[:, None, -_CONTEXT_DIM:]
        return states

    def _what_stands_before(self, tokens: np.ndarray) -> np.ndarray:
        """float32 [T + 1, _CONTEXT_DIM]: of every token, and of the one to come after the last."""
        places = np.arange(len(tokens) + 1)
        begins = np.ones(len(places), bool)
        begins[1:] = np.isin(tokens, np.frombuffer(b" \t\r\n", np.uint8))
        start = np.maximum.accumulate(np.where(begins, places, 0))
        padded = np.concatenate([np.zeros(_CONTEXT_BYTES, np.uint8), tokens])
        features = _INDEX_WEIGHT * self.index[np.minimum(places - start, _MAX_INDEX - 1)]
        for distance in range(_CONTEXT_BYTES):
            features += self.before[distance][padded[start + _CONTEXT_BYTES - 1 - distance]]
        return features / np.float32(np.sqrt(1 + _INDEX_WEIGHT**2))


def seeded_layer(rng: np.random.Generator) -> Layer:
    """Draws a layer."""

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return rng.standard_normal(shape, np.float32) * np.float32(scale)

    # Latents: what stands before a token, and for keys and values the token itself.
    compress = normal(_CONTEXT_DIM, _CONTEXT_RANK, scale=_CONTEXT_DIM**-0.5)
    q_down = np.zeros((HIDDEN, Q_LORA_RANK), np.float32)
    q_down[-_CONTEXT_DIM:] = compress
    kv_down = np.zeros((HIDDEN, KV_LORA_RANK), np.float32)
    kv_down[_TOKEN_DIM:-_CONTEXT_DIM, :_CONTEXT_RANK] = compress
    kv_down[:_TOKEN_DIM, _CONTEXT_RANK:] = normal(_TOKEN_DIM, _TOKEN_DIM, scale=_TOKEN_DIM**-0.5)

    # Keys and queries: the same map of both in a retrieval head.
    k_up = np.zeros((KV_LORA_RANK, NUM_HEADS, NOPE_DIM), np.float32)
    k_up[:_CONTEXT_RANK] = normal(_CONTEXT_RANK, NUM_HEADS, NOPE_DIM, scale=_CONTEXT_RANK**-0.5)
    rope = normal(_CONTEXT_RANK, ROPE_DIM, scale=_CONTEXT_RANK**-0.5)
    k_rope = np.zeros((HIDDEN, ROPE_DIM), np.float32)
    k_rope[_TOKEN_DIM:-_CONTEXT_DIM] = compress @ rope
    q_up = normal(Q_LORA_RANK, NUM_HEADS, QK_HEAD_DIM, scale=Q_LORA_RANK**-0.5)
    q_up[:, :RETRIEVAL_HEADS, :NOPE_DIM] = k_up[:_CONTEXT_RANK, :RETRIEVAL_HEADS]
    q_up[:, :RETRIEVAL_HEADS, NOPE_DIM:] = rope[:, None]
    # Of unit-variance q and k, matched ones have a product of Dqk, others one of sqrt(Dqk).
    q_up[:, :RETRIEVAL_HEADS] *= _MATCH_SCORE / (QK_HEAD_DIM * SOFTMAX_SCALE)
    q_up[:, RETRIEVAL_HEADS:] *= _BROAD_SCORE / (QK_HEAD_DIM**0.5 * SOFTMAX_SCALE)

    # Values: mostly the token, a little of what stands before it.
    v_up = normal(KV_LORA_RANK, NUM_HEADS, V_HEAD_DIM, scale=_TOKEN_DIM**-0.5)
    v_up[:_CONTEXT_RANK] *= 0.4

    gate = normal(HIDDEN, NUM_HEADS, V_HEAD_DIM, scale=HIDDEN**-0.5)
    out = normal(NUM_HEADS, V_HEAD_DIM, HIDDEN, scale=(NUM_HEADS * V_HEAD_DIM) ** -0.5)
    # What the broad heads find is background.
    out[RETRIEVAL_HEADS:] *= 0.25

    for head in range(NUM_HEADS):
        channels = rng.permutation(NOPE_DIM)[: 2 * _OUTLIER_CHANNELS]
        large_k, large_q = channels[:_OUTLIER_CHANNELS], channels[_OUTLIER_CHANNELS:]
        k_up[:, head, large_k] *= _OUTLIER
        q_up[:, head, large_k] /= _OUTLIER / 2
        q_up[:, head, large_q] *= _OUTLIER
        k_up[:, head, large_q] /= _OUTLIER / 2
        large_v = rng.permutation(V_HEAD_DIM)[:_OUTLIER_CHANNELS]
        v_up[:, head, large_v] *= _OUTLIER
        out[head, large_v] /= _OUTLIER

    weights = (q_down, q_up, kv_down, k_rope, k_up, v_up, gate, out)
    return Layer(
        weights=Weights(*map(jnp.asarray, weights)),
        token=normal(256, _TOKEN_DIM),
        before=normal(_CONTEXT_BYTES, 256, _CONTEXT_DIM, scale=_CONTEXT_BYTES**-0.5),
        index=normal(_MAX_INDEX, _CONTEXT_DIM),
    )


@jax.jit
def queries(weights: Weights, hidden: jax.Array) -> jax.Array:
    """bfloat16 [T, H, Dqk]."""
    latent = _rms_norm(hidden @ weights.q_down)
    return jnp.einsum("tr,rhd->thd", latent, weights.q_up).astype(jnp.bfloat16)


@jax.jit
def latents(weights: Weights, hidden: jax.Array) -> Latents:
    """What goes into the cache."""
    kv = _rms_norm(hidden @ weights.kv_down)
    k_rope = hidden @ weights.k_rope
    return Latents(kv.astype(jnp.bfloat16), k_rope.astype(jnp.bfloat16))


@jax.jit
def keys_and_values(weights: Weights, cached: Latents) -> tuple[jax.Array, jax.Array]:
    """bfloat16 [T, H, Dqk] and [T, H, Dv]."""
    kv = cached.kv.astype(jnp.float32)
    k = jnp.einsum("tr,rhd->thd", kv, weights.k_up).astype(jnp.bfloat16)
    rope = jnp.broadcast_to(cached.k_rope[:, None], (*k.shape[:2], ROPE_DIM))
    v = jnp.einsum("tr,rhd->thd", kv, weights.v_up).astype(jnp.bfloat16)
    return jnp.concatenate([k, rope], axis=-1), v


@jax.jit
def gated_output(weights: Weights, hidden: jax.Array, attention: jax.Array) -> jax.Array:
    """float32 [T, HIDDEN]: the layer's output, from the attention output [T, H, Dv]."""
    gate = jax.nn.sigmoid(jnp.einsum("tc,chd->thd", hidden, weights.gate))
    return jnp.einsum("thd,hdc->tc", attention.astype(jnp.float32) * gate, weights.out)


def _rms_norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + _RMS_EPS)
