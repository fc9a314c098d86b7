# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Attention states: an output with the log-sum-exp that lets it be merged with others."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class AttentionState(NamedTuple):
    """Attention of some queries over some keys.

    Attributes:
      out: bfloat16 [Tq, H, Dv], the softmax-weighted mean of V. Zero where no key was seen.
      lse: float32 [H, Tq], natural log of the sum of exp(scores). -inf where no key was seen.
    """

    out: jax.Array
    lse: jax.Array
