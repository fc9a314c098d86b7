# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The weights of an MLA layer: those of all heads, or of one tensor-parallel rank's."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8 import checks
from jaxfp8.models.arguments import check_config, check_number, check_tp_rank
from jaxfp8.models.config import MlaConfig
from jaxfp8.scales.arguments import integer, require


class MlaWeights(NamedTuple):
    """The projections of a layer, bfloat16, as a checkpoint has them: [out, in], y = x @ w.T.

    Where a dimension is made of heads it is split, [out, in] to [H, D, in]: which moves nothing in
    memory. H is the number of heads that the holder has: those of a tensor-parallel rank, or all.
    """

    q_a_proj: jax.Array  # [q_lora_rank, hidden_size]
    q_a_layernorm: jax.Array  # [q_lora_rank]
    q_b_proj: jax.Array  # [H, qk_nope_head_dim + qk_rope_head_dim, q_lora_rank]
    kv_a_proj: jax.Array  # [kv_lora_rank + qk_rope_head_dim, hidden_size]
    kv_a_layernorm: jax.Array  # [kv_lora_rank]
    kv_b_proj: jax.Array  # [H, qk_nope_head_dim + v_head_dim, kv_lora_rank]: of K, then of V
    g_proj: jax.Array | None  # [H, v_head_dim, hidden_size]; None without an output gate
    o_proj: jax.Array  # [hidden_size, H, v_head_dim]

    @property
    def num_heads(self) -> int:
        """H."""
        return self.q_b_proj.shape[0]


HEAD_AXIS = {"q_b_proj": 0, "kv_b_proj": 0, "g_proj": 0, "o_proj": 1}
"""The axis of the heads in the weights that have one; the others are the same on every rank."""


def weight_shapes(config: MlaConfig, num_heads: int) -> dict[str, tuple[int, ...]]:
    """The shape of each weight of a holder of num_heads heads, by name; no g_proj where there is
    no output gate.
    """
    shapes = {
        "q_a_proj": (config.q_lora_rank, config.hidden_size),
        "q_a_layernorm": (config.q_lora_rank,),
        "q_b_proj": (num_heads, config.qk_head_dim, config.q_lora_rank),
        "kv_a_proj": (config.latent_dim, config.hidden_size),
        "kv_a_layernorm": (config.kv_lora_rank,),
        "kv_b_proj": (num_heads, config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank),
        "o_proj": (config.hidden_size, num_heads, config.v_head_dim),
    }
    if config.output_gate:
        shapes["g_proj"] = (num_heads, config.v_head_dim, config.hidden_size)
    return shapes


def check_weights(config: MlaConfig, weights: Any) -> None:
    """An MlaWeights of some heads, each array of the shape that config and their number say."""
    require("weights", weights, MlaWeights, "an MlaWeights")
    checks.array("weights.q_b_proj", weights.q_b_proj, "[H, qk_head_dim, q_lora_rank]")
    if weights.num_heads < 1:
        raise ValueError("weights.q_b_proj: expected at least one head, got none")
    expected, other = ("an array", "None") if config.output_gate else ("None", "an array")
    if (weights.g_proj is not None) != config.output_gate:
        raise ValueError(
            f"weights.g_proj: expected {expected} with config.output_gate={config.output_gate}, "
            f"got {other}"
        )
    for name, shape in weight_shapes(config, weights.num_heads).items():
        weight = checks.array(f"weights.{name}", getattr(weights, name), str(list(shape)))
        checks.matches(f"weights.{name}", weight, str(list(shape)), shape, "config")
        checks.dtype_in(f"weights.{name}", weight, [jnp.bfloat16])


def random_weights(
    config: MlaConfig, key: jax.Array, *, num_heads: int | None = None
) -> MlaWeights:
    """Seeded weights for tests and benchmarks: hidden states of unit variance give Q, K and V of
    about unit variance.

    Args:
      config: the layer's.
      key: from jax.random.key.
      num_heads: heads to make; None makes config.num_heads.

    Raises:
      TypeError, ValueError: an argument is not what it should be.
    """
    check_config(config)
    _check_key(key)
    heads = config.num_heads if num_heads is None else check_number("num_heads", num_heads, 1)
    drawn: dict[str, jax.Array] = {}
    for i, (name, shape) in enumerate(weight_shapes(config, heads).items()):
        noise = jax.random.normal(jax.random.fold_in(key, i), shape, jnp.float32)
        if name.endswith("layernorm"):
            weight = 1 + noise / 8
        else:
            inputs = shape[1] * shape[2] if name == "o_proj" else shape[-1]
            weight = noise * inputs**-0.5
        drawn[name] = weight.astype(jnp.bfloat16)
    return MlaWeights(**drawn) if config.output_gate else MlaWeights(**drawn, g_proj=None)


def rank_weights(weights: MlaWeights, tp_rank: int, tp_size: int) -> MlaWeights:
    """The weights of one tensor-parallel rank's heads, from those of all heads.

    Raises:
      TypeError: weights is no MlaWeights, or a number no integer.
      ValueError: tp_size does not divide the heads, or there is no such rank.
    """
    require("weights", weights, MlaWeights, "an MlaWeights")
    checks.array("weights.q_b_proj", weights.q_b_proj, "[H, qk_head_dim, q_lora_rank]")
    for name, axis in HEAD_AXIS.items():
        x = getattr(weights, name)
        if x is None and name == "g_proj":
            continue
        checks.array(f"weights.{name}", x, "[hidden_size, H, D]" if axis else "[H, D, in]")
        if x.shape[axis] != weights.num_heads:
            raise ValueError(
                f"weights.{name}: expected {weights.num_heads} heads, as q_b_proj has, got "
                f"{x.shape[axis]}"
            )
    tp_size = integer("tp_size", tp_size)
    if tp_size < 1 or weights.num_heads % tp_size:
        raise ValueError(
            f"tp_size: expected a divisor of the {weights.num_heads} heads of weights, got "
            f"{tp_size}"
        )
    tp_rank = check_tp_rank(tp_rank, tp_size)
    count = weights.num_heads // tp_size
    parts = weights._asdict()
    for name, axis in HEAD_AXIS.items():
        if parts[name] is not None:
            heads = slice(tp_rank * count, (tp_rank + 1) * count)
            parts[name] = parts[name][(*[slice(None)] * axis, heads)]
    return MlaWeights(**parts)


def _check_key(key: Any) -> None:
    """One key, typed or as its bits, which jax.random takes too."""
    if isinstance(key, jax.Array | np.ndarray):
        typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        if key.ndim == 0 if typed else (key.ndim == 1 and key.dtype == np.uint32):
            return
        raise ValueError(
            f"key: expected one key from jax.random.key, got {key.dtype} {list(key.shape)}"
        )
    raise TypeError(f"key: expected a key from jax.random.key, got {type(key).__name__}")
