# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""A gated MLA layer in float64 NumPy, from its definition: whole sequences, no cache, no segments.

Nothing of the library is used. Weights are a dict of arrays as a Hugging Face checkpoint names and
shapes them ([out, in]); the rotary embedding is a product of complex numbers.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

# Root mean square of the relative error of rounding to a format with half a unit of `half`, for
# values spread evenly in the logarithm: as in tests/tolerances.py.
_RMS_OF_HALF_UNIT = math.sqrt(0.75 / (2 * math.log(2)) / 3)
_BF16 = 2.0**-8 * _RMS_OF_HALF_UNIT
_FP8 = 2.0**-4 * _RMS_OF_HALF_UNIT

# Relative error (norm over norm) allowed for the output of a layer with random weights, where
# scores have a variance of about 1, so that a relative error of Q or K is one of the softmax
# weights and as such one of the output. bfloat16 is rounded to seven times on the way: the two
# latents (that of the cache counts twice, in K and in V), Q, K, V and the gated attention. FP8
# four times: Q, K, V and P. Independent errors add up in squares; half as much again for chance.
LAYER_ERROR = {
    "bf16": 1.5 * math.sqrt(7) * _BF16,
    "fp8": 1.5 * math.sqrt(7 * _BF16**2 + 4 * _FP8**2),
}


class Layer(NamedTuple):
    """What a layer makes of a sequence of T tokens."""

    q: np.ndarray  # [T, H, Dn + Dr]
    latents: np.ndarray  # [T, rank + Dr], what a cache would hold
    k: np.ndarray  # [T, H, Dn + Dr]
    v: np.ndarray  # [T, H, Dv]
    attention: np.ndarray  # [T, H, Dv]
    out: np.ndarray  # [T, hidden_size]


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def rotate(x: np.ndarray, theta: float | None) -> np.ndarray:
    """x [T, ..., D], token t turned as position t: neighbouring columns are complex numbers."""
    if theta is None:
        return x
    tokens, pairs = x.shape[0], x.shape[-1] // 2
    angle = np.arange(tokens)[:, None] * theta ** (-np.arange(pairs) / pairs)
    turn = np.exp(1j * angle).reshape(tokens, *[1] * (x.ndim - 2), pairs)
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


def layer(config: Any, weights: dict[str, np.ndarray], hidden: Any) -> Layer:
    """The layer on one whole sequence, causal.

    Args:
      config: dims by the names of MlaConfig.
      weights: by the names of a checkpoint, without "self_attn." and ".weight".
      hidden: [T, hidden_size].
    """
    w = {name: np.asarray(x).astype(np.float64) for name, x in weights.items()}
    hidden = np.asarray(hidden).astype(np.float64)
    tokens, rank, nope = len(hidden), config.kv_lora_rank, config.qk_nope_head_dim
    shared, heads = config.qk_rope_head_dim, w["q_b_proj"].shape[0] // config.qk_head_dim

    latent = rms_norm(hidden @ w["q_a_proj"].T, w["q_a_layernorm"], config.rms_norm_eps)
    q = (latent @ w["q_b_proj"].T).reshape(tokens, heads, nope + shared)
    q = np.concatenate([q[..., :nope], rotate(q[..., nope:], config.rope_theta)], axis=-1)

    both = hidden @ w["kv_a_proj_with_mqa"].T
    latent = rms_norm(both[:, :rank], w["kv_a_layernorm"], config.rms_norm_eps)
    rope = rotate(both[:, rank:], config.rope_theta)
    up = (latent @ w["kv_b_proj"].T).reshape(tokens, heads, nope + config.v_head_dim)
    k = np.concatenate([up[..., :nope], np.repeat(rope[:, None], heads, axis=1)], axis=-1)
    v = up[..., nope:]

    attention = np.zeros_like(v)
    for t in range(tokens):
        scores = np.einsum("hd,khd->hk", q[t], k[: t + 1]) / math.sqrt(nope + shared)
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        attention[t] = np.einsum("hk,khd->hd", p / p.sum(axis=1, keepdims=True), v[: t + 1])

    out = attention.reshape(tokens, heads * config.v_head_dim)
    if config.output_gate:
        out = out / (1 + np.exp(-(hidden @ w["g_proj"].T)))
    return Layer(q, np.concatenate([latent, rope], axis=1), k, v, attention, out @ w["o_proj"].T)
