# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Pallas Triton kernels that quantize token-major arrays into the layout of the attention kernel.

The packed layout: rows are cut into tiles, each sequence starts on a tile boundary
(ops/attention/tiling.py), and rows that hold no token are zero. Queries and keys are head-major,
[H, tiles * block, D]. Values are transposed within their tile, [H, tiles, Dv, block], so that the
second matrix product reads along keys. One launch packs queries, one packs keys and values.

Values that are not finite never enter the packed V: where a causal mask hides such a key from some
rows of a tile, the zero probability of those rows times NaN would be NaN. The packed V holds zero
there, and a table says which rows must become NaN or infinite after all (`NonfiniteKeys`).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxfp8 import pallas_compat
from jaxfp8.formats import Fp8Format
from jaxfp8.head_slice import HeadSlice
from jaxfp8.ops.attention import tiling
from jaxfp8.ops.quantize.assembled_key import AssembledKey

NO_KEY = math.inf
"""What the table of non-finite values holds where there is none."""

_AMAX_BLOCK = 128


def column_chunks(size: int) -> list[tuple[int, int]]:
    """(start, size) of power-of-two pieces of `size` columns, the largest first: 128 + 64."""
    chunks, start = [], 0
    while start < size:
        width = 1 << (size - start).bit_length() - 1
        chunks.append((start, width))
        start += width
    return chunks


def pack_rows(
    x: jax.Array | HeadSlice,
    cu_seqlens: jax.Array,
    descale: jax.Array,
    fmt: Fp8Format | None,
    *,
    block: int,
    interpret: bool = False,
) -> jax.Array:
    """Quantizes x [T, H, D] into [H, tiles * block, D], head-major.

    Args:
      x: bfloat16, or already in `fmt`, which is copied bit for bit.
      cu_seqlens: int32 [B + 1].
      descale: float32 [H].
      fmt: the format; None copies bfloat16.
      block: rows of a tile.
      interpret: run in Pallas interpret mode.
    """
    parts = _parts(x)
    num_tokens, heads, size = x.shape
    num_tiles = tiling.max_tiles(num_tokens, cu_seqlens.shape[0] - 1, block)
    dtype = fmt.dtype if fmt else x.dtype
    if num_tiles == 0:
        return jnp.zeros((heads, 0, size), dtype)
    table = tiling.tile_table(cu_seqlens, block, num_tiles)

    def kernel(x_refs: Any, token_ref: Any, count_ref: Any, descale_ref: Any, out_ref: Any) -> None:
        head, tile = _head_and_tile(heads, num_tiles)
        rows = _Rows(token_ref[tile], count_ref[tile], block)
        _pack_rows_of_tile(x_refs, parts, head, rows, descale_ref[head], fmt, out_ref, tile * block)

    packed: jax.Array = pl.pallas_call(
        kernel,
        out_shape=pallas_compat.out_type((heads, num_tiles * block, size), dtype),
        grid=(heads, num_tiles),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="jaxfp8_pack_query",
    )(_arrays(parts), table.token, table.count, descale)
    return packed


def pack_keys_and_values(
    k: jax.Array | HeadSlice | AssembledKey,
    v: jax.Array | HeadSlice,
    cu_seqlens: jax.Array,
    k_descale: jax.Array,
    v_descale: jax.Array,
    fmt: Fp8Format | None,
    *,
    block: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantizes K [T, H, Dqk] and V [T, H, Dv] in one launch.

    Args:
      k: bfloat16, or already in `fmt`, which is copied bit for bit; an AssembledKey is put together
        on the way.
      v: likewise.
      cu_seqlens: int32 [B + 1].
      k_descale: float32 [H].
      v_descale: float32 [H].
      fmt: the format; None copies bfloat16.
      block: keys of a tile.
      interpret: run in Pallas interpret mode.

    Returns:
      K [H, tiles * block, Dqk]; V [H, tiles, Dv, block] with zeros for what is not finite; and the
      table of non-finite values of V, float32 [1, H, B, Dv] for an FP8 format (where infinities
      saturate): the first key of the sequence whose value is NaN, or NO_KEY. For bfloat16
      [2, H, B, Dv]: the first that is NaN or +inf, and the first that is NaN or -inf. It is
      float32, exact up to 2**24 keys, because Pallas lowers no atomic minimum of integer arrays.
    """
    k_parts, ((v_array, v_start, _),) = _parts(k), _parts(v)
    num_tokens, heads, k_size = k.shape
    v_size = v.shape[2]
    batch = cu_seqlens.shape[0] - 1
    num_tiles = tiling.max_tiles(num_tokens, batch, block)
    k_dtype, v_dtype = (fmt.dtype, fmt.dtype) if fmt else (k.dtype, v.dtype)
    nonfinite = jnp.full((1 if fmt else 2, heads, batch, v_size), NO_KEY, jnp.float32)
    if num_tiles == 0:
        return (
            jnp.zeros((heads, 0, k_size), k_dtype),
            jnp.zeros((heads, 0, v_size, block), v_dtype),
            nonfinite,
        )
    table = tiling.tile_table(cu_seqlens, block, num_tiles)

    def kernel(
        k_refs: Any,
        v_ref: Any,
        sequence_ref: Any,
        row_ref: Any,
        token_ref: Any,
        count_ref: Any,
        k_descale_ref: Any,
        v_descale_ref: Any,
        no_key_ref: Any,
        k_out_ref: Any,
        v_out_ref: Any,
        nonfinite_ref: Any,
    ) -> None:
        del no_key_ref  # the same memory as nonfinite_ref
        head, tile = _head_and_tile(heads, num_tiles)
        rows = _Rows(token_ref[tile], count_ref[tile], block)
        _pack_rows_of_tile(
            k_refs, k_parts, head, rows, k_descale_ref[head], fmt, k_out_ref, tile * block
        )
        lane = jnp.arange(block, dtype=jnp.int32)
        sequence, row = sequence_ref[tile], row_ref[tile]
        for column, width in column_chunks(v_size):
            columns = column + jnp.arange(width, dtype=jnp.int32)
            values = rows.load(v_ref, head, v_start + columns)
            hidden = functools.reduce(operator.or_, _nonfinite(values, fmt))
            values = _quantize(_zero_where(hidden, values), v_descale_ref[head], fmt)
            pallas_compat.store(v_out_ref.at[head, tile, columns[:, None], lane[None, :]], values.T)

            @pl.when(jnp.max(hidden.astype(jnp.int32)) > 0)
            def _(columns: jax.Array = columns) -> None:
                # Read again: the masks of a whole tile would take most scalar registers until here.
                # (XLA:ROCm of JAX 0.10.2 keeps them all the same, and has enough.)
                values = rows.load(v_ref, head, v_start + columns)
                key = (row + lane).astype(jnp.float32)[:, None]
                for i, mask in enumerate(_nonfinite(values, fmt)):
                    first = jnp.min(jnp.where(mask, key, NO_KEY), axis=0)
                    plgpu.atomic_min(nonfinite_ref, (i, head, sequence, columns), first)

    packed: tuple[jax.Array, jax.Array, jax.Array] = pl.pallas_call(
        kernel,
        out_shape=(
            pallas_compat.out_type((heads, num_tiles * block, k_size), k_dtype),
            pallas_compat.out_type((heads, num_tiles, v_size, block), v_dtype),
            pallas_compat.out_type(nonfinite.shape, nonfinite.dtype),
        ),
        grid=(heads, num_tiles),
        input_output_aliases={len(k_parts) + 7: 2},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="jaxfp8_pack_context",
    )(
        _arrays(k_parts), v_array, table.sequence, table.row, table.token, table.count,
        k_descale, v_descale, nonfinite,
    )  # fmt: skip
    return packed


def amax(
    x: jax.Array | HeadSlice | AssembledKey, num_tokens: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """float32 [H]: largest finite |x| of each head over the first `num_tokens` rows, else 0.

    One pass over the data writes the maximum of each block of rows; the few that result are
    reduced by XLA.

    Args:
      x: bfloat16 [T, H, D].
      num_tokens: int32 []; rows past it are not read.
      interpret: run in Pallas interpret mode.
    """
    parts = _parts(x)
    capacity, heads, _ = x.shape
    if capacity == 0:
        return jnp.zeros(heads, jnp.float32)
    blocks = pl.cdiv(capacity, _AMAX_BLOCK)

    def kernel(x_refs: Any, num_tokens_ref: Any, out_ref: Any) -> None:
        head, tile = _head_and_tile(heads, blocks)
        token = tile * _AMAX_BLOCK
        rows = _Rows(token, num_tokens_ref[0] - token, _AMAX_BLOCK)
        # Magnitudes of bfloat16 are in the order of their bits, and integers of 16 bits go two an
        # instruction. The addition makes infinities and NaN, 0x7F80 and above, negative.
        shift = np.int16(0x80)
        maxima = [
            jnp.max((jax.lax.bitcast_convert_type(values, jnp.int16) & 0x7FFF) + shift)
            for _, values in _load_parts(x_refs, parts, head, rows)
        ]
        largest = jnp.maximum(functools.reduce(jnp.maximum, maxima), shift)
        bits = (largest - shift).astype(jnp.int32) << 16
        out_ref[head, tile] = jax.lax.bitcast_convert_type(bits, jnp.float32)

    partial: jax.Array = pl.pallas_call(
        kernel,
        out_shape=pallas_compat.out_type((heads, blocks), jnp.float32),
        grid=(heads, blocks),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="jaxfp8_amax",
    )(_arrays(parts), jnp.minimum(num_tokens, capacity).reshape(1))
    return jnp.max(partial, axis=1)


class _Part(NamedTuple):
    """Columns `start : start + size` of an array [T, H, D], or [T, D] that all heads share."""

    array: jax.Array
    start: int
    size: int


def _parts(x: jax.Array | HeadSlice | AssembledKey) -> list[_Part]:
    if isinstance(x, AssembledKey):
        return [*_parts(x.nope), _Part(x.rope, 0, x.rope.shape[1])]
    if isinstance(x, HeadSlice):
        return [_Part(x.array, x.start, x.size)]
    return [_Part(x, 0, x.shape[2])]


def _arrays(parts: list[_Part]) -> tuple[jax.Array, ...]:
    return tuple(part.array for part in parts)


def _head_and_tile(heads: int, tiles: int) -> tuple[jax.Array, jax.Array]:
    """What this program of a grid (heads, tiles) works on.

    The bounds change nothing. They let the compiler prove that offsets into arrays under 2 GB fit
    32 bits, and use buffer loads and stores.
    """
    return jnp.minimum(pl.program_id(0), heads - 1), jnp.minimum(pl.program_id(1), tiles - 1)


class _Rows:
    """Rows `token : token + block` of token-major arrays, of which the first `count` exist."""

    def __init__(self, token: jax.Array, count: jax.Array, block: int):
        row = jnp.arange(block, dtype=jnp.int32)
        self.token = token + row
        self.mask = (row < count)[:, None]

    def load(self, ref: Any, head: jax.Array, columns: jax.Array) -> jax.Array:
        """[block, columns] of one head of ref, [T, H, D] or [T, D]; zeros in rows not there."""
        shape = (self.token.shape[0], columns.shape[0])
        # Bounds as in _head_and_tile; rows that are not there are masked.
        token = jnp.clip(self.token, 0, ref.shape[0] - 1)[:, None]
        heads = (head,) if ref.ndim == 3 else ()
        return pallas_compat.load(
            ref.at[(token, *heads, columns[None, :])],
            mask=jnp.broadcast_to(self.mask, shape),
            other=jnp.zeros(shape, ref.dtype),
        )


def _load_parts(
    refs: Sequence[Any], parts: Sequence[_Part], head: jax.Array, rows: _Rows
) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Columns of the whole and values [block, columns], a power of two of them at a time."""
    before = 0
    for ref, part in zip(refs, parts, strict=True):
        for column, width in column_chunks(part.size):
            columns = column + jnp.arange(width, dtype=jnp.int32)
            yield before + columns, rows.load(ref, head, part.start + columns)
        before += part.size


def _pack_rows_of_tile(
    refs: Sequence[Any],
    parts: Sequence[_Part],
    head: jax.Array,
    rows: _Rows,
    descale: jax.Array,
    fmt: Fp8Format | None,
    out_ref: Any,
    out_row: jax.Array,
) -> None:
    lane = out_row + jnp.arange(rows.token.shape[0], dtype=jnp.int32)
    for columns, values in _load_parts(refs, parts, head, rows):
        pallas_compat.store(
            out_ref.at[head, lane[:, None], columns[None, :]], _quantize(values, descale, fmt)
        )


def _quantize(x: jax.Array, descale: jax.Array, fmt: Fp8Format | None) -> jax.Array:
    if fmt is None or x.dtype == fmt.dtype:
        return x
    return pallas_compat.quantize(x.astype(jnp.float32), descale, fmt)


def _nonfinite(x: jax.Array, fmt: Fp8Format | None) -> list[jax.Array]:
    """What the packed x must not hold: a mask for each row of the table of non-finite values."""
    if fmt is not None and x.dtype == fmt.dtype:
        bits = jax.lax.bitcast_convert_type(x, jnp.uint8)
        return [bits == 0x80 if fmt.name == "float8_e4m3fnuz" else (bits & 0x7F) == 0x7F]
    wide = x.astype(jnp.float32)
    nan = wide != wide
    return [nan] if fmt is not None else [nan | (wide == jnp.inf), nan | (wide == -jnp.inf)]


def _zero_where(mask: jax.Array, x: jax.Array) -> jax.Array:
    """x with +0 where the mask is set. By its bits: Pallas lowers no selection of FP8."""
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return jax.lax.bitcast_convert_type(jnp.where(mask, 0, bits), x.dtype)
