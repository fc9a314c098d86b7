# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Calibration of the model: prompts run through its layers while a Calibrator watches."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8 import checks
from jaxfp8.calibration import Calibrator
from jaxfp8.models import mla
from jaxfp8.models.arguments import check_config, check_hidden
from jaxfp8.models.batch import PrefillBatch, new_tokens
from jaxfp8.models.config import MlaConfig
from jaxfp8.models.weights import MlaWeights, check_weights
from jaxfp8.prefill import prefill_attention
from jaxfp8.scales.arguments import require


def calibrate_layer(
    calibrator: Calibrator,
    layer: int,
    config: MlaConfig,
    weights: MlaWeights,
    hidden: jax.Array,
    cu_seqlens: jax.Array,
) -> jax.Array:
    """The layer's output for whole prompts, in bfloat16, with Q, K and V shown to a calibrator.

    Without a cache: a prompt of the length that contexts will have sees what they will hold. Not
    under jax.jit, since a calibrator looks at values. On every tensor-parallel rank alike, each
    with its weights and its calibrator; between layers the caller adds up the ranks' outputs.

    Args:
      calibrator: of this rank; it records once it is armed.
      layer: the model's 0-based layer index.
      config: the layer's.
      weights: the layer's, of the rank's heads.
      hidden: bfloat16 [T, hidden_size], the layer's input for all tokens of the prompts.
      cu_seqlens: int32 [B + 1], offsets of the prompts; tokens past the last do not count.

    Returns:
      float32 [T, hidden_size], as `mla.gated_output`.

    Raises:
      TypeError: an argument is of the wrong kind or dtype; hidden or cu_seqlens is traced; or as
        `Calibrator.observe`.
      ValueError: shapes disagree; or as `Calibrator.observe`.
    """
    require("calibrator", calibrator, Calibrator, "a Calibrator")
    check_config(config)
    check_weights(config, weights)
    check_hidden(config, hidden)
    cu_seqlens = checks.cu_seqlens("cu_seqlens", cu_seqlens, hidden.shape[0], "hidden")
    if checks.is_traced(hidden) or checks.is_traced(cu_seqlens):
        raise TypeError(
            "hidden, cu_seqlens: expected concrete arrays, got traced ones; calibrate outside of "
            "jax.jit, where values exist"
        )
    q, k, v = _queries_keys_values(config, weights, hidden, cu_seqlens)
    calibrator.observe(layer, q, k, v, num_tokens=int(np.asarray(cu_seqlens)[-1]))
    return _attended(config, weights, hidden, q, k, v, cu_seqlens)


@functools.partial(jax.jit, static_argnames="config")
def _queries_keys_values(
    config: MlaConfig, weights: MlaWeights, hidden: jax.Array, cu_seqlens: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    prompts = PrefillBatch(cu_seqlens, jnp.zeros_like(cu_seqlens[1:]), cu_seqlens)
    position = new_tokens(prompts, hidden.shape[0], hidden.shape[0]).position
    k, v = mla.up_project(config, weights, mla.latents(config, weights, hidden, position))
    q = mla.queries(config, weights, hidden, position)
    return q, k.materialize(), v.materialize()


@functools.partial(jax.jit, static_argnames="config")
def _attended(
    config: MlaConfig, weights: MlaWeights, hidden: jax.Array,
    q: jax.Array, k: jax.Array, v: jax.Array, cu_seqlens: jax.Array,
) -> jax.Array:  # fmt: skip
    attention = prefill_attention(
        q, k, v, cu_seqlens, cu_seqlens,
        causal=True, softmax_scale=config.softmax_scale, precision="bf16",
    )  # fmt: skip
    return mla.gated_output(config, weights, hidden, attention.out)
