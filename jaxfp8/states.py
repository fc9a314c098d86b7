# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Attention states: an output with the log-sum-exp that lets it be merged with others."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfp8 import checks
from jaxfp8.inference_only import inference_only


class AttentionState(NamedTuple):
    """Attention of some queries over some keys.

    Attributes:
      out: bfloat16 [Tq, H, Dv], the softmax-weighted mean of V. Zero where no key was seen.
      lse: float32 [H, Tq], natural log of the sum of exp(scores). -inf where no key was seen.
    """

    out: jax.Array
    lse: jax.Array


def merge_states(a: AttentionState, b: AttentionState) -> AttentionState:
    """Attention over two disjoint sets of keys, from the attention over each.

    With w = exp(lse - logaddexp(a.lse, b.lse)), out = w_a * a.out + w_b * b.out. A state whose
    LSE is -inf saw no key and does not count, whatever its output holds; +inf counts as -inf,
    which is what FlashAttention-style kernels write for an empty context. -inf on both sides gives
    zeros and -inf. A NaN in an LSE makes the row NaN.

    Args:
      a: out [Tq, H, Dv] bfloat16 (or float32), lse [H, Tq] float32.
      b: the same shapes and dtypes.

    Returns:
      The merged state, out in the dtype of a.out; computed in float32.

    Raises:
      TypeError: an argument is not a pair of arrays of those dtypes.
      ValueError: shapes disagree.

    Example:
      One state over keys of weight 3 with values 1, one over keys of weight 1 with values 5:

      >>> import jax.numpy as jnp, jaxfp8
      >>> def state(value, weight):
      ...     out = jnp.full((1, 2, 128), value, jnp.bfloat16)
      ...     return jaxfp8.AttentionState(out, jnp.log(jnp.full((2, 1), weight)))
      >>> merged = jaxfp8.merge_states(state(1, 3.0), state(5, 1.0))
      >>> float(merged.out[0, 0, 0]), round(float(jnp.exp(merged.lse[0, 0])), 5)
      (2.0, 4.0)
    """
    a, b = checks.states(a, b)
    return _merge_states(a, b)


@jax.jit
def _merge_states(a: AttentionState, b: AttentionState) -> AttentionState:
    a, b = inference_only((a, b))
    out, lse = merge_float32(a.out, a.lse, b.out, b.lse)
    return AttentionState(out.astype(a.out.dtype), lse)


def merge_float32(
    a_out: jax.Array, a_lse: jax.Array, b_out: jax.Array, b_lse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """merge_states on outputs of any float dtype, the merged output left in float32."""
    a_lse = jnp.where(a_lse == jnp.inf, -jnp.inf, a_lse)
    b_lse = jnp.where(b_lse == jnp.inf, -jnp.inf, b_lse)
    largest = jnp.maximum(a_lse, b_lse)
    # Both empty: subtracting -inf from itself would be NaN.
    shift = jnp.where(largest == -jnp.inf, 0.0, largest)
    a_weight, b_weight = jnp.exp(a_lse - shift), jnp.exp(b_lse - shift)
    total = a_weight + b_weight
    lse = shift + jnp.log(total)
    divisor = jnp.where(total == 0, 1.0, total)

    def weighted(out: jax.Array, lse: jax.Array, weight: jax.Array) -> jax.Array:
        counted = jnp.where(lse.T[:, :, None] == -jnp.inf, 0.0, out.astype(jnp.float32))
        return counted * (weight / divisor).T[:, :, None]

    return weighted(a_out, a_lse, a_weight) + weighted(b_out, b_lse, b_weight), lse
