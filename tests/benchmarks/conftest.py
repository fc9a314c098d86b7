# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""What makes whole programs quick enough to be run in tests: they spend their time on compiling."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from jaxfp8.head_slice import as_array
from jaxfp8.ops.attention import reference
from jaxfp8.states import AttentionState


@pytest.fixture(scope="module")
def quick_to_compile() -> Iterator[None]:
    """The XLA backend's blockwise attention, which takes seconds to compile at any size, replaced
    by four lines that compute the same. It has tests of its own; the programs' checks of what they
    run stay as they are.
    """
    disabled = jax.config.read("jax_disable_most_optimizations")
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", True)
    with mock.patch.object(reference, "_attend", _attend):
        yield
    jax.config.update("jax_disable_most_optimizations", disabled)
    jax.clear_caches()


def _attend(
    q: Any, context: Any, cu_q: Any, cu_k: Any, factor: Any, v_descale: Any, *, causal: bool,
    spec: Any,
) -> AttentionState:  # fmt: skip
    q, k, v = (as_array(x).astype(jnp.float32) for x in (q, context.k, context.v))
    rows, keys = jnp.arange(q.shape[0]), jnp.arange(k.shape[0])
    of_q, of_k = (jnp.searchsorted(c[1:], x, side="right") for c, x in ((cu_q, rows), (cu_k, keys)))
    seen = (of_q[:, None] == of_k) & (rows < cu_q[-1])[:, None] & (keys < cu_k[-1])
    if causal:  # counted from the end of the sequence
        ends_q, ends_k = (jnp.append(c[1:], 0) for c in (cu_q, cu_k))
        seen &= (keys - ends_k[of_k])[None] <= (rows - ends_q[of_q])[:, None]
    scores = jnp.einsum("qhd,khd->hqk", q, k) * factor[:, None, None] * math.log(2)
    scores = jnp.where(seen, scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=2)
    p = jnp.where(seen, jnp.exp(scores - jnp.where(lse == -jnp.inf, 0.0, lse)[:, :, None]), 0.0)
    out = jnp.einsum("hqk,khd->qhd", p, v) * v_descale[:, None]
    return AttentionState(out.astype(jnp.bfloat16), lse)
