# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The attention kernel, written for AMD gfx942 and right on every GPU that Pallas Triton serves.

Each program computes one tile of query rows of one head. What makes it fast on gfx942:

- The two matrix products run on FP8 operands. The head dim is cut into powers of two, 128 + 64.
- K's rows are read in an order that leaves each score of the first product in the register in
  which the second wants its probability, so the conversion between the two layouts is free.
- The scores are computed one tile ahead, so that the matrix unit works on the next tile while the
  vector unit does the softmax of this one.
- softmax scale, descales and log2(e) are one factor, and exp2 is the bare hardware instruction.
- Tiles that every row sees need no mask and have a loop of their own. The few others are not
  worth the registers of scores computed ahead.
- exp2(s - (m - 7)) puts the probabilities in (0, 128], which FP8 holds without a clamp.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxfp8 import pallas_compat
from jaxfp8.formats import Fp8Format
from jaxfp8.ops.attention import schedule, tiling
from jaxfp8.ops.attention.heuristics import KernelConfig
from jaxfp8.ops.quantize.pallas_triton import column_chunks

# The largest probability is 2**7: under 240, the largest e4m3fnuz, and 448, the largest e4m3fn.
_P_EXPONENT = 7.0
# The running maximum before the first key. Finite, so that no -inf - -inf arises.
_NO_MAXIMUM = -1e30

# The smallest normal float32: all scores of FP8 times it are 0 as exponents.
_LEAST_SCALE = 2.0**-126

# Rows of the work table.
_TILE, _TOKEN, _COUNT, _SEQUENCE, _FIRST, _FULL, _END, _KEYS, _VISIBLE = range(9)


def work_table(
    cu_seqlens_q: jax.Array,
    cu_seqlens_k: jax.Array,
    num_tokens: int,
    *,
    causal: bool,
    config: KernelConfig,
) -> jax.Array:
    """int32 [9, tiles + 1]: what each tile of query rows has to do, those with most keys first.

    The rows past the last sequence are one more sequence, which sees no key: so every row of the
    output is written. The last column is a tile without rows.

    Args:
      cu_seqlens_q: int32 [B + 1].
      cu_seqlens_k: int32 [B + 1].
      num_tokens: Tq, the rows of the output.
      causal: aligned bottom right.
      config: tile shapes.

    Returns:
      For each tile: its index in the packed queries; first row in the output; number of rows;
      sequence; the packed key tile that it starts at, the one at which masks begin, and the one at
      which it ends; number of keys of the sequence; number of keys that its first row sees,
      negative where later rows see none either.
    """
    batch = cu_seqlens_q.shape[0] - 1
    num_tiles = schedule.num_tiles_of(num_tokens, batch, config)
    rest = jnp.full(1, num_tokens, jnp.int32)
    tiles = tiling.tile_table(jnp.concatenate([cu_seqlens_q, rest]), config.block_q, num_tiles)
    real = (tiles.sequence < batch) & (tiles.count > 0)
    sequence = jnp.where(real, tiles.sequence, 0)
    keys = jnp.where(real, jnp.diff(cu_seqlens_k)[sequence], 0)
    if causal:
        queries = jnp.diff(cu_seqlens_q)[sequence]
        visible = jnp.where(real, keys - queries + tiles.row + 1, 0)
        seen_by_all = jnp.clip(visible, 0, keys)
        seen_by_any = jnp.clip(visible + tiles.count - 1, 0, keys)
    else:
        visible = seen_by_all = seen_by_any = keys
    first = tiling.first_tiles(cu_seqlens_k, config.block_k)[sequence]
    full = first + seen_by_all // config.block_k
    end = first + (seen_by_any + config.block_k - 1) // config.block_k
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    table = jnp.stack([tile, tiles.token, tiles.count, sequence, first, full, end, keys, visible])
    if causal or batch > 1:
        table = table[:, jnp.argsort(first - end)]
    return jnp.pad(table, ((0, 0), (0, 1)))


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    nonfinite: jax.Array,
    work: jax.Array,
    scales: jax.Array,
    *,
    num_tokens: int,
    causal: bool,
    fmt: Fp8Format | None,
    config: KernelConfig,
    splits: int = 1,
    dies: int = 1,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel on packed operands (ops/quantize/pallas_triton.py).

    Args:
      q: [H, q tiles * block_q, Dqk].
      k: [H, kv tiles * block_k, Dqk].
      v: [H, kv tiles, Dv, block_k].
      nonfinite: float32 [1 or 2, H, B, Dv].
      work: the work table.
      scales: float32 [2, H]: what a raw score is multiplied with to be a base-2 exponent, not
        negative, and V's descale.
      num_tokens: Tq.
      causal: whether rows see different numbers of keys.
      fmt: the FP8 format; None for bfloat16.
      config: tile shapes, warps, stages.
      splits: parts into which the keys of each tile are split.
      dies: see schedule.program_order.
      interpret: run in Pallas interpret mode.

    Returns:
      out bfloat16 [num_tokens, H, Dv] and lse float32 [H, num_tokens], all of it written. With
      splits > 1, out float32 [splits, num_tokens, H, Dv] and lse [splits, H, num_tokens], which
      `merge_splits` merges; a split without keys has zeros and -inf.
    """
    heads = q.shape[0]
    v_size = v.shape[2]
    num_tiles = work.shape[1] - 1
    unequal = causal or nonfinite.shape[2] > 1
    order = schedule.program_order(heads, splits, num_tiles, dies, longest_first=unequal)
    parts = (splits,) if splits > 1 else ()
    out_dtype = jnp.float32 if splits > 1 else jnp.bfloat16

    def kernel(
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        nonfinite_ref: Any,
        order_ref: Any,
        work_ref: Any,
        scales_ref: Any,
        out_ref: Any,
        lse_ref: Any,
    ) -> None:
        item = order_ref[pl.program_id(0)]
        pair, rank = lax.div(item, np.int32(num_tiles + 1)), lax.rem(item, np.int32(num_tiles + 1))
        head, split = lax.div(pair, np.int32(splits)), lax.rem(pair, np.int32(splits))
        todo = [work_ref[i, rank] for i in range(9)]
        m, total, acc = _attend_tiles(
            q_ref, k_ref, v_ref, head, todo, _part_of(todo, split, splits), scales_ref[0, head],
            causal=causal, fmt=fmt, config=config,
        )  # fmt: skip
        row = jnp.arange(config.block_q, dtype=jnp.int32)
        column = jnp.arange(v_size, dtype=jnp.int32)
        some = total != 0.0  # true for NaN too
        out = acc * jnp.where(some, scales_ref[1, head] / total, 0.0)[:, None]
        visible = jnp.where(some, _visible_keys(todo, row, causal), 0)
        first = [nonfinite_ref[i, head, todo[_SEQUENCE], column] for i in range(nonfinite.shape[0])]
        out = _add_nonfinite(out, first, visible)
        lse = jnp.where(some, (m + jnp.log2(total)) * math.log(2), -jnp.inf)
        token, valid = todo[_TOKEN] + row, row < todo[_COUNT]
        part = (split,) if splits > 1 else ()
        plgpu.store(
            out_ref.at[*part, token[:, None], head, column[None, :]],
            out.astype(out_dtype),
            mask=jnp.broadcast_to(valid[:, None], out.shape),
        )
        plgpu.store(lse_ref.at[*part, head, token], lse, mask=valid)

    result: tuple[jax.Array, jax.Array] = pl.pallas_call(
        kernel,
        out_shape=(
            pallas_compat.out_type((*parts, num_tokens, heads, v_size), out_dtype),
            pallas_compat.out_type((*parts, heads, num_tokens), jnp.float32),
        ),
        grid=(order.size,),
        compiler_params=plgpu.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="jaxfp8_attention",
    )(q, k, v, nonfinite, jnp.asarray(order), work, scales)
    return result


def merge_splits(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merges what `attend` returns with splits > 1, in float32.

    Args:
      out: float32 [splits, T, H, Dv].
      lse: float32 [splits, H, T].

    Returns:
      out bfloat16 [T, H, Dv], lse float32 [H, T].
    """
    largest = jnp.max(lse, axis=0)
    weights = jnp.exp(lse - jnp.where(largest == -jnp.inf, 0.0, largest))
    total = jnp.sum(weights, axis=0)
    weights = jnp.swapaxes(weights / jnp.where(total == 0.0, 1.0, total), 1, 2)[..., None]
    # Each split that has keys has the infinities of V (`_add_nonfinite`): 0 * inf must not arise.
    merged = jnp.sum(jnp.where(weights == 0.0, 0.0, weights * out), axis=0)
    return merged.astype(jnp.bfloat16), jnp.log(total) + largest


def _part_of(
    todo: list[jax.Array], split: jax.Array, splits: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(first, full, end) of a split's share of a tile's key tiles; all may be empty."""
    first, tiles = todo[_FIRST], todo[_END] - todo[_FIRST]
    begin = first + lax.div(tiles * split, np.int32(splits))
    end = first + lax.div(tiles * (split + 1), np.int32(splits))
    return begin, jnp.clip(todo[_FULL], begin, end), end


def _attend_tiles(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    head: jax.Array,
    todo: list[jax.Array],
    part: tuple[jax.Array, jax.Array, jax.Array],
    scale: jax.Array,
    *,
    causal: bool,
    fmt: Fp8Format | None,
    config: KernelConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The running maximum less 7 [block_q], the sum [block_q], P V [block_q, Dv]."""
    block_q, block_k = config.block_q, config.block_k
    num_kv_tiles, v_size = v_ref.shape[1:3]
    chunks = column_chunks(q_ref.shape[2])

    # The bounds let the compiler prove that offsets fit 32 bits, and use buffer loads.
    head = jnp.clip(head, 0, q_ref.shape[0] - 1)
    q_row = jnp.clip(todo[_TILE], 0, q_ref.shape[1] // block_q - 1) * block_q
    row = jnp.arange(block_q, dtype=jnp.int32)
    # Tiny descales make it 0, and then a masked score -inf * 0. A NaN stays one.
    scale = jnp.where(scale < _LEAST_SCALE, _LEAST_SCALE, scale)
    q = [
        pallas_compat.load(
            q_ref.at[
                head, (q_row + row)[:, None], (start + jnp.arange(size, dtype=jnp.int32))[None, :]
            ]
        )
        for start, size in chunks
    ]

    key = jnp.arange(block_k, dtype=jnp.int32)
    if config.permute_keys:  # in each group of 16, quads 1 and 2 change places
        key = (key & ~12) | ((key & 4) << 1) | ((key & 8) >> 1)
    lane_bit = 8 if config.permute_keys else 4

    def scores(t: jax.Array) -> jax.Array:
        keys = (jnp.clip(t, 0, num_kv_tiles - 1) * block_k + key)[None, :]
        products = []
        for (start, size), part in zip(chunks, q, strict=True):
            # K is indexed [D, keys]: a transpose between load and dot would cost LDS traffic.
            columns = (start + jnp.arange(size, dtype=jnp.int32))[:, None]
            k = pallas_compat.load(k_ref.at[head, keys, columns])
            products.append(plgpu.dot(part, k))
        return functools.reduce(operator.add, products)

    def probabilities(s: jax.Array, m: jax.Array) -> jax.Array:
        return pallas_compat.exp2(pallas_compat.fma(s, scale, -m[:, None]))

    def quantized(p: jax.Array) -> jax.Array:
        p = _to_bfloat16(p) if fmt is None else pallas_compat.to_fp8(p, fmt)
        if config.permute_keys:
            p = p.reshape(block_q, block_k // 16, 2, 2, 4).transpose(0, 1, 3, 2, 4)
            p = p.reshape(block_q, block_k)
        return p

    def load_v(t: jax.Array) -> jax.Array:
        tile = jnp.clip(t, 0, num_kv_tiles - 1)
        columns = jnp.arange(v_size, dtype=jnp.int32)[None, :]
        keys = jnp.arange(block_k, dtype=jnp.int32)[:, None]
        return pallas_compat.load(v_ref.at[head, tile, columns, keys])

    def update(
        m: jax.Array, total: jax.Array, acc: jax.Array, m_new: jax.Array, p: jax.Array, v: Any
    ) -> Any:
        alpha = pallas_compat.exp2(m - m_new)
        total = total * alpha + jnp.sum(p, axis=1)
        acc = acc * alpha[:, None] + plgpu.dot(quantized(p), v)
        return m_new, total, acc

    def full_tile(t: jax.Array, carry: Any) -> Any:
        m, total, acc, s, s_max = carry
        v = load_v(t)
        m_new = jnp.maximum(m, s_max * scale - _P_EXPONENT)
        p = probabilities(s, m_new)
        if config.scores_first:
            s = scores(t + 1)
            m, total, acc = update(m, total, acc, m_new, p, v)
        else:
            m, total, acc = update(m, total, acc, m_new, p, v)
            s = scores(t + 1)
        return m, total, acc, s, jnp.max(s, axis=1)

    visible = _visible_keys(todo, row, causal)[:, None]

    def masked_tile(t: jax.Array, carry: Any) -> Any:
        m, total, acc = carry
        s = scores(t)
        v = load_v(t)
        # Of a key's bits, lanes differ in one alone. With that one on the right, the left is a
        # constant of each register, where key < bound would hold a register for each score.
        bound = visible - (t - todo[_FIRST]) * block_k
        mask = (key & ~lane_bit)[None, :] < bound - (key & lane_bit)[None, :]
        s = jnp.where(mask, s, -jnp.inf)
        m_new = jnp.maximum(m, jnp.max(s, axis=1) * scale - _P_EXPONENT)
        p = probabilities(s, m_new)
        m, total, acc = update(m, total, acc, m_new, p, v)
        return m, total, acc

    first, full, end = part
    s = scores(first)
    zeros = jnp.zeros((block_q,), jnp.float32)
    acc = jnp.zeros((block_q, v_size), jnp.float32)
    carry = (zeros + _NO_MAXIMUM, zeros, acc, s, jnp.max(s, axis=1))
    m, total, acc, *_ = lax.fori_loop(first, full, full_tile, carry)
    m, total, acc = lax.fori_loop(full, end, masked_tile, (m, total, acc))
    return m, total, acc


def _to_bfloat16(x: jax.Array) -> jax.Array:
    """Positive float32 to bfloat16, ties away from zero: an addition and a byte selection.

    gfx942 has no conversion instruction, and the compiler's own sequence takes seven.
    """
    bits = (lax.bitcast_convert_type(x, jnp.uint32) + 0x8000) >> 16
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


def _visible_keys(todo: list[jax.Array], row: jax.Array, causal: bool) -> jax.Array:
    """int32 [block_q]: row r sees the keys of its sequence below the r-th number."""
    if causal:
        return jnp.minimum(todo[_VISIBLE] + row, todo[_KEYS])
    return jnp.broadcast_to(todo[_KEYS], row.shape)


def _add_nonfinite(out: jax.Array, first: list[jax.Array], visible: jax.Array) -> jax.Array:
    """Adds what the packed V left out: NaN, or infinities, in the rows that see one."""
    seen = [keys[None, :] < visible.astype(jnp.float32)[:, None] for keys in first]
    if len(seen) == 1:
        return jnp.where(seen[0], jnp.nan, out)
    above, below = seen
    return out + jnp.where(above, jnp.inf, 0.0) + jnp.where(below, -jnp.inf, 0.0)
