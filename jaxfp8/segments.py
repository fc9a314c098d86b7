# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""One prefill pass: new tokens against themselves, then against a long context in segments.

    state = start_prefill(q, cu_seqlens_q)
    state = attend_new_tokens(state, new_k, new_v)
    for k, v, cu_seqlens_k in segments:
        state = attend_segment(state, k, v, cu_seqlens_k)
    state.out, state.lse

The queries are quantized once, in `start_prefill`. What has been attended to is held in float32
and rounded to bfloat16 when `out` is read, so that the number of segments costs no precision.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8 import checks, packing
from jaxfp8.formats import Fp8Format
from jaxfp8.head_slice import HeadSlice
from jaxfp8.ops.attention.base import Precision, QuantizedContext, QuantizedQuery
from jaxfp8.ops.mesh_axes import varying_like
from jaxfp8.ops.quantize.assembled_key import AssembledKey
from jaxfp8.states import AttentionState, merge_float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillState:
    """A prefill pass under way: a pytree of fixed structure, for jit and lax.scan.

    Attributes:
      q: [Tq, H, Dqk], the new tokens' queries as given.
      query: the same, packed in the pass's precision.
      acc: float32 [Tq, H, Dv], attention over all keys so far.
      lse: float32 [H, Tq], its log-sum-exp, natural log; -inf where no key has been seen.
      softmax_scale: static.
      backend: static; the name the caller gave, None where the library chooses.
    """

    q: jax.Array | HeadSlice
    query: QuantizedQuery
    acc: jax.Array
    lse: jax.Array
    softmax_scale: float = dataclasses.field(metadata={"static": True})
    backend: str | None = dataclasses.field(metadata={"static": True})

    @property
    def out(self) -> jax.Array:
        """bfloat16 [Tq, H, Dv]: attention over all keys so far; zeros where none was seen."""
        return self.acc.astype(jnp.bfloat16)

    @property
    def attention_state(self) -> AttentionState:
        """`out` and `lse`, to merge with states from elsewhere."""
        return AttentionState(self.out, self.lse)


def start_prefill(
    q: jax.Array | HeadSlice,
    cu_seqlens_q: jax.Array,
    *,
    softmax_scale: float | None = None,
    precision: Precision = "fp8",
    q_descale: jax.Array | None = None,
    v_head_dim: int = 128,
    fmt: Fp8Format | None = None,
    backend: str | None = None,
) -> PrefillState:
    """Begins a pass: packs the queries, has attended to nothing yet.

    Args:
      q: [Tq, H, Dqk], bfloat16; or FP8 in `fmt`, with `q_descale`.
      cu_seqlens_q: int32 [B + 1].
      softmax_scale: multiplies the scores; a Python number, finite and > 0. None: Dqk ** -0.5.
      precision: of the attention over context segments, "fp8" or "bf16".
      q_descale: float32 [H]; None takes a dynamic one.
      v_head_dim: Dv of the values to come.
      fmt: the FP8 format; None is the target's own.
      backend: as in `prefill_attention`.

    Raises:
      TypeError, ValueError, NotImplementedError: as `prefill_attention`.

    Example:
      >>> import jax.numpy as jnp, jaxfp8
      >>> q = jnp.ones((8, 2, 192), jnp.bfloat16)
      >>> state = jaxfp8.start_prefill(q, jnp.array([0, 3, 8], jnp.int32))
      >>> state.out.shape, state.lse.tolist()[0][:2]  # nothing seen yet
      ((8, 2, 128), [-inf, -inf])
    """
    if isinstance(v_head_dim, bool) or not isinstance(v_head_dim, int):
        raise TypeError(f"v_head_dim: expected an integer, got {type(v_head_dim).__name__}")
    if v_head_dim < 1:
        raise ValueError(f"v_head_dim: expected at least 1, got {v_head_dim}")
    query = packing.pack_query(
        q, cu_seqlens_q, q_descale, precision, fmt, backend,
        v_head_dim=v_head_dim, descale_name="q_descale",
    )  # fmt: skip
    num_tokens, num_heads, qk_head_dim = q.shape
    acc, lse = varying_like(
        (
            jnp.zeros((num_tokens, num_heads, v_head_dim), jnp.float32),
            jnp.full((num_heads, num_tokens), -jnp.inf, jnp.float32),
        ),
        q,
    )
    return PrefillState(
        q=q,
        query=query,
        acc=acc,
        lse=lse,
        softmax_scale=checks.softmax_scale(softmax_scale, qk_head_dim),
        backend=backend,
    )


def attend_new_tokens(
    state: PrefillState,
    k: jax.Array | HeadSlice | AssembledKey,
    v: jax.Array | HeadSlice,
    *,
    precision: Precision = "bf16",
    k_descale: jax.Array | None = None,
    v_descale: jax.Array | None = None,
) -> PrefillState:
    """Adds the new tokens' own keys and values, causally: token i sees the tokens 0 ... i.

    Args:
      state: the pass.
      k: [Tq, H, Dqk], bfloat16; the sequences are those of the queries.
      v: [Tq, H, Dv], bfloat16.
      precision: "bf16", or "fp8" in a pass of precision "fp8".
      k_descale: float32 [H], for "fp8"; None takes a dynamic one.
      v_descale: float32 [H], likewise.

    Raises:
      TypeError, ValueError, NotImplementedError: as `prefill_attention`.

    Example:
      Scores are all equal here, so that token i of a sequence sees a weight of i + 1:

      >>> import jax.numpy as jnp, jaxfp8
      >>> q, v = jnp.zeros((8, 2, 192), jnp.bfloat16), jnp.ones((8, 2, 128), jnp.bfloat16)
      >>> state = jaxfp8.start_prefill(q, jnp.array([0, 3, 8], jnp.int32))
      >>> state = jaxfp8.attend_new_tokens(state, q, v)
      >>> jnp.exp(state.lse[0]).round().tolist()
      [1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    """
    _check_pass(state)
    checks.matches(
        "k", checks.keys("k", k, "[Tq, H, Dqk]"), str(list(state.q.shape)), state.q.shape, "q"
    )
    if precision == state.query.spec.precision:
        query = state.query
    elif precision == "bf16":
        if checks.is_fp8(state.q):
            raise ValueError(
                "precision: expected 'fp8' in a pass whose q was given as "
                f"{np.dtype(state.q.dtype).name}, got 'bf16'"
            )
        query = packing.pack_query(
            state.q, state.query.cu_seqlens, None, "bf16", None, state.backend,
            v_head_dim=state.query.spec.v_head_dim,
        )  # fmt: skip
    elif precision == "fp8":
        raise ValueError(
            "precision: expected 'bf16' in a pass of precision 'bf16', got 'fp8'; "
            "start_prefill(precision='fp8') quantizes the queries"
        )
    else:
        raise ValueError(f"precision: expected 'fp8' or 'bf16', got {precision!r}")
    context = _pack_context(state, query, k, v, state.query.cu_seqlens, k_descale, v_descale)
    return _attend(state, query, context, causal=True)


def attend_segment(
    state: PrefillState,
    k: jax.Array | HeadSlice | AssembledKey,
    v: jax.Array | HeadSlice,
    cu_seqlens_k: jax.Array,
    *,
    k_descale: jax.Array | None = None,
    v_descale: jax.Array | None = None,
) -> PrefillState:
    """Adds a segment of the cached context, all of which every new token of its sequence sees.

    Args:
      state: the pass.
      k: [Tk, H, Dqk], bfloat16; or FP8 in the pass's format, with `k_descale`.
      v: [Tk, H, Dv], bfloat16; or FP8, with `v_descale`.
      cu_seqlens_k: int32 [B + 1], the pass's sequences within this segment; any may be empty.
      k_descale: float32 [H]; None takes a dynamic one for this segment.
      v_descale: float32 [H], likewise.

    Raises:
      TypeError, ValueError, NotImplementedError: as `prefill_attention`.

    Example:
      The first sequence has 2 keys in this segment and the second 4. Scores are all equal:

      >>> import jax.numpy as jnp, jaxfp8
      >>> q = jnp.zeros((8, 2, 192), jnp.bfloat16)
      >>> k, v = jnp.ones((6, 2, 192), jnp.bfloat16), jnp.ones((6, 2, 128), jnp.bfloat16)
      >>> state = jaxfp8.start_prefill(q, jnp.array([0, 3, 8], jnp.int32))
      >>> state = jaxfp8.attend_segment(state, k, v, jnp.array([0, 2, 6], jnp.int32))
      >>> jnp.exp(state.lse[0]).round().tolist()
      [2.0, 2.0, 2.0, 4.0, 4.0, 4.0, 4.0, 4.0]
    """
    _check_pass(state)
    context = _pack_context(state, state.query, k, v, cu_seqlens_k, k_descale, v_descale)
    return _attend(state, state.query, context, causal=False)


def _check_pass(state: PrefillState) -> None:
    if not isinstance(state, PrefillState):
        raise TypeError(
            f"state: expected a PrefillState from start_prefill, got {type(state).__name__}"
        )


def _pack_context(
    state: PrefillState,
    query: QuantizedQuery,
    k: jax.Array | HeadSlice | AssembledKey,
    v: jax.Array | HeadSlice,
    cu_seqlens_k: jax.Array,
    k_descale: jax.Array | None,
    v_descale: jax.Array | None,
) -> QuantizedContext:
    """The keys and values, checked against the pass and packed for the backend of `query`."""
    spec = query.spec
    checks.keys("k", k, "[Tk, H, Dqk]")
    checks.array("v", v, "[Tk, H, Dv]")
    heads, qk_head_dim, v_head_dim = spec.num_heads, spec.qk_head_dim, state.acc.shape[2]
    checks.matches("k", k, f"[Tk, {heads}, {qk_head_dim}]", (None, heads, qk_head_dim), "q")
    checks.matches(
        "v", v, f"[Tk, {heads}, {v_head_dim}]", (None, heads, v_head_dim), "start_prefill"
    )
    context = packing.pack_context(
        k, v, cu_seqlens_k, k_descale, v_descale, spec.precision, spec.fmt, query.backend
    )
    sequences = query.cu_seqlens.shape[0]
    checks.matches(
        "cu_seqlens_k", context.cu_seqlens, f"[{sequences}]", (sequences,), "cu_seqlens_q"
    )
    return context


def _attend(
    state: PrefillState, query: QuantizedQuery, context: QuantizedContext, *, causal: bool
) -> PrefillState:
    acc, lse = _attend_and_merge(
        state.acc, state.lse, query, context, causal=causal, softmax_scale=state.softmax_scale
    )
    return dataclasses.replace(state, acc=acc, lse=lse)


@functools.partial(jax.jit, static_argnames=("causal", "softmax_scale"))
def _attend_and_merge(
    acc: jax.Array, lse: jax.Array, query: QuantizedQuery, context: QuantizedContext,
    *, causal: bool, softmax_scale: float,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    new = packing.attend_compiled(query, context, causal=causal, softmax_scale=softmax_scale)
    return merge_float32(acc, lse, new.out, new.lse)
