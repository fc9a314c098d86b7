# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The prefill pass itself, through the public API, in one precision or another."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp8
from jaxfp8.demo import layer as mla
from jaxfp8.ops.attention.base import Precision


@dataclasses.dataclass(frozen=True)
class Segment:
    """Keys and values of a part of the context.

    Attributes:
      k: bfloat16 [capacity, H, Dqk].
      v: bfloat16 [capacity, H, Dv].
      num_tokens: how many of the rows are tokens; the last segment has fewer than the others.
    """

    k: jax.Array
    v: jax.Array
    num_tokens: int


@dataclasses.dataclass(frozen=True)
class Prefill:
    """What is to be attended: new tokens, and a context in segments of one capacity.

    Attributes:
      q: bfloat16 [Tq, H, Dqk], of the new tokens.
      k: bfloat16 [Tq, H, Dqk], likewise.
      v: bfloat16 [Tq, H, Dv], likewise.
      segments: the context, in order.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    segments: tuple[Segment, ...]

    @property
    def context_and_new(self) -> tuple[np.ndarray, np.ndarray]:
        """K and V of all tokens, in order, on the host."""
        k = [np.asarray(segment.k[: segment.num_tokens]) for segment in self.segments]
        v = [np.asarray(segment.v[: segment.num_tokens]) for segment in self.segments]
        return np.concatenate([*k, self.k]), np.concatenate([*v, self.v])


@dataclasses.dataclass(frozen=True)
class Pass:
    """What came out of a pass.

    Attributes:
      out: bfloat16 [Tq, H, Dv].
      lse: float32 [H, Tq].
      backend: what computed it.
      seconds: time of the attention, compilation left out.
      segment_bytes: what K and V of a segment take as the attention reads them.
    """

    out: np.ndarray
    lse: np.ndarray
    backend: str
    seconds: float
    segment_bytes: int


def make_prefill(weights: mla.Weights, hidden: np.ndarray, context: int, segment: int) -> Prefill:
    """The layer's projections: latents for the cache, and from them K and V segment by segment.

    Args:
      weights: the layer's.
      hidden: float32 [T, HIDDEN], the context and then the new tokens.
      context: number of tokens of the context.
      segment: capacity of a segment.
    """
    segments = []
    for start in range(0, context, segment):
        part = hidden[start : min(start + segment, context)]
        padded = np.zeros((segment, hidden.shape[1]), hidden.dtype)
        padded[: len(part)] = part
        k, v = mla.keys_and_values(weights, mla.latents(weights, jnp.asarray(padded)))
        segments.append(Segment(k, v, len(part)))
    new = jnp.asarray(hidden[context:])
    k, v = mla.keys_and_values(weights, mla.latents(weights, new))
    return Prefill(mla.queries(weights, new), k, v, tuple(segments))


def run_pass(
    prefill: Prefill,
    precision: Precision,
    scales: jaxfp8.LayerScales | None,
    on_segment: Callable[[], object],
) -> Pass:
    """One pass: start, attend to the new tokens, attend to each segment.

    Args:
      prefill: what to attend.
      precision: of the attention over the context, "fp8" or "bf16".
      scales: static scales for "fp8"; None takes dynamic ones.
      on_segment: called after each segment.
    """
    start = jax.jit(
        functools.partial(
            jaxfp8.start_prefill, precision=precision, softmax_scale=mla.SOFTMAX_SCALE
        )
    )
    new_tokens = jax.jit(jaxfp8.attend_new_tokens)
    attend = jax.jit(jaxfp8.attend_segment)
    cu_seqlens_q = _cu_seqlens(len(prefill.q))
    q_descale, descales = None, {}
    if scales is not None:
        q_descale, k_descale, v_descale = map(jnp.asarray, scales)
        descales = {"k_descale": k_descale, "v_descale": v_descale}

    def attend_all(
        segments: tuple[Segment, ...], on_segment: Callable[[], object]
    ) -> jaxfp8.PrefillState:
        state = start(prefill.q, cu_seqlens_q, q_descale=q_descale)
        state = new_tokens(state, prefill.k, prefill.v)
        for segment in segments:
            cu_seqlens_k = _cu_seqlens(segment.num_tokens)
            state = attend(state, segment.k, segment.v, cu_seqlens_k, **descales)
            jax.block_until_ready(state)
            on_segment()
        return state

    attend_all(prefill.segments[:1], lambda: None)  # compiles
    began = time.perf_counter()
    state = attend_all(prefill.segments, on_segment)
    seconds = time.perf_counter() - began
    return Pass(
        out=np.asarray(state.out),
        lse=np.asarray(state.lse),
        backend=state.query.backend,
        seconds=seconds,
        segment_bytes=_segment_bytes(prefill.segments[0], precision),
    )


def _cu_seqlens(num_tokens: int) -> jax.Array:
    return jnp.array([0, num_tokens], jnp.int32)


def _segment_bytes(segment: Segment, precision: Precision) -> int:
    if precision == "bf16":
        held: object = (segment.k, segment.v)
    else:
        packed = jax.eval_shape(
            jaxfp8.quantize_context, segment.k, segment.v, _cu_seqlens(segment.num_tokens)
        )
        held = (packed.data, packed.k_descale, packed.v_descale)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(held))
