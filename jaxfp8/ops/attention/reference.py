# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Blockwise varlen attention in plain JAX: runs wherever XLA does; kernels are compared with it.

One loop goes over the query tiles of all sequences, an inner one over the key tiles that some row
of the query tile sees; both trip counts are computed on the device from cu_seqlens, so nothing is
recompiled when only those change. K and V are read in place, token-major: the extra memory is one
score tile and the float32 accumulator of one query tile.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8.head_slice import HeadSlice, as_array
from jaxfp8.ops.attention.base import AttentionSpec, QuantizedContext, QuantizedQuery
from jaxfp8.ops.mesh_axes import varying_like
from jaxfp8.ops.quantize import reference as quantize
from jaxfp8.ops.quantize.assembled_key import AssembledKey
from jaxfp8.states import AttentionState
from jaxfp8.targets import Target

BLOCK_Q = 512
BLOCK_K = 512

P_EXPONENT = 7
"""P is stored as exp2(s - m + 7) <= 128, which both FP8 formats hold without clipping: 240, 448."""


class PackedContext(NamedTuple):
    """K [Tk, H, Dqk] and V [Tk, H, Dv], token-major."""

    k: jax.Array | HeadSlice
    v: jax.Array | HeadSlice


class XlaBackend:
    """Any head dims, any target that JAX runs on."""

    name = "xla"

    def unsupported(self, spec: AttentionSpec, target: Target) -> str | None:
        return None

    def amax(self, x: jax.Array | HeadSlice | AssembledKey, num_tokens: jax.Array) -> jax.Array:
        return quantize.per_head_amax(as_array(x), num_tokens)

    def pack_query(
        self,
        q: jax.Array | HeadSlice,
        cu_seqlens: jax.Array,
        descale: jax.Array,
        spec: AttentionSpec,
    ) -> jax.Array | HeadSlice:
        return _quantized(q, descale, spec)

    def pack_context(
        self,
        k: jax.Array | HeadSlice | AssembledKey,
        v: jax.Array | HeadSlice,
        cu_seqlens: jax.Array,
        k_descale: jax.Array,
        v_descale: jax.Array,
        spec: AttentionSpec,
    ) -> PackedContext:
        if isinstance(k, AssembledKey):
            k = k.materialize()
        return PackedContext(_quantized(k, k_descale, spec), _quantized(v, v_descale, spec))

    def attend(
        self,
        query: QuantizedQuery,
        context: QuantizedContext,
        *,
        causal: bool,
        softmax_scale: float,
    ) -> AttentionState:
        spec = context.spec
        score_factor = query.descale * context.k_descale * (softmax_scale * math.log2(math.e))
        return _attend(
            query.data,
            context.data,
            query.cu_seqlens,
            context.cu_seqlens,
            score_factor,
            context.v_descale,
            causal=causal,
            spec=spec,
        )


BACKEND = XlaBackend()


def _quantized(
    x: jax.Array | HeadSlice, descale: jax.Array, spec: AttentionSpec
) -> jax.Array | HeadSlice:
    if spec.fmt is None or x.dtype == spec.fmt.dtype:
        return x
    return quantize.quantize_per_head(as_array(x), descale, spec.fmt)


def _rows(x: jax.Array | HeadSlice, start: jax.Array, count: int) -> jax.Array:
    """float32 [H, count, D]: rows start : start + count of x [T, H, D]."""
    array, column = (x.array, x.start) if isinstance(x, HeadSlice) else (x, 0)
    # XLA would otherwise convert before it slices, and therefore convert all of K and V ahead of
    # the loop, at twice their memory. Tied to `start`, the array is not the loop's invariant.
    array, start = lax.optimization_barrier((array, start))
    tile = lax.dynamic_slice(
        array,
        (start, jnp.int32(0), jnp.int32(column)),
        (count, *x.shape[1:]),
        allow_negative_indices=False,
    )
    return tile.astype(jnp.float32).transpose(1, 0, 2)


class _Softmax(NamedTuple):
    """Running softmax of one query tile: max and sum float32 [H, BQ], acc float32 [H, BQ, Dv]."""

    max: jax.Array
    sum: jax.Array
    acc: jax.Array


def _attend(
    q: jax.Array | HeadSlice,
    context: PackedContext,
    cu_seqlens_q: jax.Array,
    cu_seqlens_k: jax.Array,
    score_factor: jax.Array,
    v_descale: jax.Array,
    *,
    causal: bool,
    spec: AttentionSpec,
) -> AttentionState:
    (tq, num_heads, _), (tk, _, dv) = q.shape, context.v.shape
    bq, bk = min(BLOCK_Q, tq), min(BLOCK_K, tk)
    lengths_q = jnp.diff(cu_seqlens_q)
    # tile_ends[b]: number of query tiles of the sequences 0 ... b.
    tile_ends = jnp.cumsum((lengths_q + bq - 1) // bq, dtype=jnp.int32)

    def query_tile(i: jax.Array, state: AttentionState) -> AttentionState:
        b = jnp.searchsorted(tile_ends, i, side="right")
        len_q, len_k = lengths_q[b], cu_seqlens_k[b + 1] - cu_seqlens_k[b]
        tiles_before = tile_ends[b] - (len_q + bq - 1) // bq
        first = (i - tiles_before) * bq
        # A tile that would pass the end of the array is moved back; the rows that another tile
        # (of this sequence or the one before) writes are left as they are.
        start = jnp.minimum(cu_seqlens_q[b] + first, tq - bq)
        row = start - cu_seqlens_q[b] + jnp.arange(bq, dtype=jnp.int32)
        own = (row >= first) & (row < len_q)
        # visible[r]: row r sees the keys 0 ... visible - 1 of its sequence.
        visible = jnp.where(own, len_k, 0)
        if causal:
            visible = jnp.where(own, jnp.clip(row + 1 + len_k - len_q, 0, len_k), 0)
        softmax = _softmax_over_keys(
            _rows(q, start, bq) * score_factor[:, None, None],
            context,
            cu_seqlens_k[b],
            len_k,
            visible,
            bk,
            spec,
        )
        seen = softmax.sum != 0
        total = jnp.where(seen, softmax.sum, 1.0)
        out = softmax.acc / total[:, :, None] * v_descale[:, None, None]
        shift = P_EXPONENT if spec.fmt else 0
        lse = jnp.where(seen, (softmax.max - shift + jnp.log2(total)) * math.log(2), -jnp.inf)
        old_out = lax.dynamic_slice_in_dim(state.out, start, bq, axis=0)
        old_lse = lax.dynamic_slice_in_dim(state.lse, start, bq, axis=1)
        out = jnp.where(own[:, None, None], out.transpose(1, 0, 2).astype(old_out.dtype), old_out)
        lse = jnp.where(own[None], lse, old_lse)
        return AttentionState(
            lax.dynamic_update_slice_in_dim(state.out, out, start, axis=0),
            lax.dynamic_update_slice_in_dim(state.lse, lse, start, axis=1),
        )

    empty = AttentionState(
        jnp.zeros((tq, num_heads, dv), jnp.bfloat16),
        jnp.full((num_heads, tq), -jnp.inf, jnp.float32),
    )
    empty = varying_like(empty, q, context, cu_seqlens_q, cu_seqlens_k, score_factor, v_descale)
    return lax.fori_loop(jnp.int32(0), tile_ends[-1], query_tile, empty)


def _softmax_over_keys(
    q: jax.Array,
    context: PackedContext,
    key_start: jax.Array,
    len_k: jax.Array,
    visible: jax.Array,
    bk: int,
    spec: AttentionSpec,
) -> _Softmax:
    """One query tile against the keys it sees.

    Args:
      q: float32 [H, BQ, Dqk], times the score factor: scores are in units of log 2.
      context: K and V of all sequences.
      key_start: token at which this sequence's keys start.
      len_k: its number of keys.
      visible: int32 [BQ], how many of them each row sees.
      bk: keys per tile.
      spec: says whether P is rounded to FP8.
    """
    tk = context.k.shape[0]
    num_heads, bq, _ = q.shape
    num_tiles = (jnp.max(visible) + bk - 1) // bk

    def key_tile(j: jax.Array, carry: _Softmax) -> _Softmax:
        # Moved back at the end of the array like a query tile; keys of the tile before are masked.
        start = jnp.minimum(key_start + j * bk, tk - bk)
        key = start - key_start + jnp.arange(bk, dtype=jnp.int32)
        valid = (key >= j * bk) & (key < len_k)
        seen = valid[None] & (key[None] < visible[:, None])
        scores = _matmul("hqd,hkd->hqk", q, _rows(context.k, start, bk))
        scores = jnp.where(seen[None], scores, -jnp.inf)
        new_max = jnp.maximum(carry.max, jnp.max(scores, axis=-1))
        # A row that has seen no key yet has max -inf; any finite stand-in makes its terms 0.
        reference = jnp.where(new_max == -jnp.inf, 0.0, new_max)
        rescale = jnp.exp2(carry.max - reference)
        if spec.fmt is not None:
            reference = reference - P_EXPONENT
        p = jnp.exp2(scores - reference[:, :, None])
        total = carry.sum * rescale + jnp.sum(p, axis=-1)
        if spec.fmt is not None:
            p = p.astype(spec.fmt.dtype).astype(jnp.float32)
        v = jnp.where(valid[None, :, None], _rows(context.v, start, bk), 0.0)
        weighted = lax.cond(
            jnp.all(jnp.isfinite(v)), _weighted_sum, _weighted_sum_of_seen, p, v, seen
        )
        return _Softmax(new_max, total, carry.acc * rescale[:, :, None] + weighted)

    empty = _Softmax(
        jnp.full((num_heads, bq), -jnp.inf, jnp.float32),
        jnp.zeros((num_heads, bq), jnp.float32),
        jnp.zeros((num_heads, bq, context.v.shape[2]), jnp.float32),
    )
    return lax.fori_loop(
        jnp.int32(0), num_tiles, key_tile, varying_like(empty, q, context, visible, len_k)
    )


def _matmul(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    # GPUs would round float32 operands to TF32, 11 bits, by default.
    return jnp.einsum(subscripts, a, b, precision=lax.Precision.HIGHEST)


def _weighted_sum(p: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    return _matmul("hqk,hkd->hqd", p, v)


def _weighted_sum_of_seen(p: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    """P @ V where V holds NaN or infinities, which must not reach the rows that do not see them
    (0 * NaN is NaN).
    """

    def rows_that_see(what: jax.Array) -> jax.Array:
        hits = jnp.einsum("qk,hkd->hqd", seen.astype(jnp.float32), what.astype(jnp.float32))
        return hits > 0

    nan, up, down = map(rows_that_see, (jnp.isnan(v), v == jnp.inf, v == -jnp.inf))
    extreme = jnp.where(up, jnp.inf, jnp.where(down, -jnp.inf, 0.0))
    extreme = jnp.where(nan | (up & down), jnp.nan, extreme)
    return _matmul("hqk,hkd->hqd", p, jnp.where(jnp.isfinite(v), v, 0.0)) + extreme
