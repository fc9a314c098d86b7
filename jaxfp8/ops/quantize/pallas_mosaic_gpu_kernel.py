# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The Hopper packing kernel: quantizes and lays out rows and, beside them, values, in one pass.

A thread block does one granule (KEY_GRANULE rows) of one head. All loads are 16 bytes wide and all
stores fill 32-byte sectors; a thread transposes its piece of V in registers, so shared memory is
not used. ops/quantize/pallas_mosaic_gpu.py says what the layouts are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from jaxfp8.formats import Fp8Format
from jaxfp8.head_slice import HeadSlice
from jaxfp8.ops.attention import pallas_mosaic_gpu_emit as emit
from jaxfp8.ops.attention.pallas_mosaic_gpu_kernel import KEY_GRANULE
from jaxfp8.ops.quantize.assembled_key import AssembledKey

_BF16_MAX = float(jnp.finfo(jnp.bfloat16).max)


def can_pack(x: jax.Array | HeadSlice | AssembledKey) -> bool:
    """Whether the kernel can read x: bfloat16, its heads' rows on 16-byte boundaries."""
    if isinstance(x, AssembledKey):
        return can_pack(x.nope) and x.rope.dtype == x.dtype and x.rope.shape[1] % 16 == 0
    if x.dtype != jnp.bfloat16 or x.shape[2] % 16:
        return False
    return not isinstance(x, HeadSlice) or (x.start % 8 == 0 and x.array.shape[2] % 8 == 0)


def _source(x: jax.Array | HeadSlice) -> tuple[jax.Array, int]:
    return (x.array, x.start) if isinstance(x, HeadSlice) else (x, 0)


def _sources(x: jax.Array | HeadSlice | AssembledKey) -> tuple[list[jax.Array], int]:
    """Where the rows of x lie: one array and the first column in it; and what all heads share."""
    if isinstance(x, AssembledKey):
        array, start = _source(x.nope)
        return [array, x.rope], start
    array, start = _source(x)
    return [array], start


class _Scaler:
    """x / descale, saturated to the largest stored value; a NaN stays one."""

    def __init__(self, descale: Any, fmt: Fp8Format | None) -> None:
        self.fmt = fmt
        if fmt is None:
            self.top = emit.f32(_BF16_MAX)
        else:
            self.descale = descale
            self.inverse = arith.divf(emit.f32(1.0), descale)
            self.top = emit.mul(descale, emit.f32(fmt.max))
        self.bottom = emit.sub(emit.f32(0.0), self.top)

    def __call__(self, x: Any) -> Any:
        x = emit.max_nan(emit.min_nan(x, self.top), self.bottom)
        if self.fmt is None:
            return x
        # The correctly rounded quotient: an estimate and its remainder.
        estimate = emit.mul(x, self.inverse)
        minus = emit.sub(emit.f32(0.0), estimate)
        return emit.fma(emit.fma(minus, self.descale, x), self.inverse, estimate)


def pack_rows(
    rows: jax.Array | HeadSlice, granules: jax.Array, descale: jax.Array, fmt: Fp8Format | None
) -> jax.Array:
    """`pack_rows_and_values` of rows alone; descale is float32 [H]."""
    (packed,) = _run(rows, None, granules, descale[None], None, fmt)
    return packed


def pack_rows_and_values(
    rows: jax.Array | HeadSlice | AssembledKey,
    values: jax.Array | HeadSlice,
    granules: jax.Array,
    descales: jax.Array,
    num_sequences: int,
    fmt: Fp8Format | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Packed rows, and packed values with their first NaNs.

    Args:
      rows: [T, H, D] bfloat16; of an AssembledKey the two parts are read where they lie.
      values: [T, H, Dv] bfloat16.
      granules: int32 [G, 4]: for each granule its first row in `rows`, how many of its rows exist,
        its sequence, and the place of its first row in the sequence.
      descales: float32 [2, H], of rows and of values.
      num_sequences: B.
      fmt: None stores bfloat16.

    Returns:
      rows [H, G * KEY_GRANULE, D], zero where no row exists; values [H * G, Dv, KEY_GRANULE] and
      int32 [B, H, Dv], the place in its sequence of the first NaN of each column.
    """
    first_nan = jax.new_ref(
        jnp.full((num_sequences, *values.shape[1:]), jnp.iinfo(jnp.int32).max, jnp.int32)
    )
    packed, packed_values = _run(rows, values, granules, descales, first_nan, fmt)
    return packed, packed_values, jax.freeze(first_nan)


def _run(
    rows: jax.Array | HeadSlice | AssembledKey,
    values: jax.Array | HeadSlice | None,
    granules: jax.Array,
    descales: jax.Array,
    first_nan: Any,
    fmt: Fp8Format | None,
) -> list[jax.Array]:
    num_tokens, num_heads, dim = rows.shape
    num_granules = granules.shape[0]
    sources, row_start = _sources(rows)
    own = rows.nope.shape[2] if isinstance(rows, AssembledKey) else dim  # columns of a head's own
    dtype = jnp.bfloat16 if fmt is None else fmt.dtype
    size = dtype.itemsize if fmt is not None else 2
    keys_of = 4  # keys in a thread's piece of V
    gmem, scalar = plgpu.RefType(), emit.scalar_layout()

    def element(token: Any, width: int, head: Any, column: Any) -> Any:
        """Index in [T, H, width] in 64 bits."""
        wide = [arith.extui(emit.i64_type(), x) for x in (token, head, column)]
        row = arith.addi(arith.muli(wide[0], emit.i64(num_heads)), wide[1])
        return arith.addi(arith.muli(row, emit.i64(width)), wide[2])

    def load16(address: Any) -> list[Any]:
        """Eight bfloat16 as float32."""
        words = emit.load_global(address, [emit.i32_type()] * 4)
        return [x for word in words for x in emit.unpack_bf16x2(word)]

    def token_of(first: Any, row: Any) -> Any:
        return arith.minsi(emit.iadd(first, row), emit.i32(num_tokens - 1))

    def always() -> Any:
        return arith.cmpi(arith.CmpIPredicate.eq, emit.i32(0), emit.i32(0))

    @plgpu.inline_mgpu(arg_types=(*[gmem] * len(sources), gmem, *[scalar] * 5))
    def store_rows(ctx: Any, *arguments: Any) -> None:
        *src, dst, granule, head, first, count, descale = arguments
        chunks = dim // 16
        scale = _Scaler(emit.scalar(descale), fmt)
        head, first, count = (emit.scalar(x) for x in (head, first, count))
        dst_base = emit.global_address(dst)
        src_base, *shared_base = map(emit.global_address, src)
        units = []
        for i in range(KEY_GRANULE * chunks // emit.WARPGROUP):
            unit = emit.iadd(emit.thread_in_warpgroup(), i * emit.WARPGROUP)
            row, chunk = arith.divui(unit, emit.i32(chunks)), arith.remui(unit, emit.i32(chunks))
            token, column = token_of(first, row), emit.imul(chunk, 16)
            width = sources[0].shape[2]
            index = element(token, width, head, emit.iadd(column, row_start))
            address = emit.offset_address(src_base, index, 2)
            for base, shared in zip(shared_base, sources[1:], strict=True):
                inside = arith.maxsi(emit.isub(column, own), emit.i32(0))
                row64 = arith.muli(arith.extui(emit.i64_type(), token), emit.i64(shared.shape[1]))
                index = arith.addi(row64, arith.extui(emit.i64_type(), inside))
                elsewhere = emit.offset_address(base, index, 2)
                address = arith.select(emit.less(column, own), address, elsewhere)
            x = load16(address) + load16(arith.addi(address, emit.i64(16)))
            units.append((row, chunk, x))
        for row, chunk, x in units:
            exists = emit.less(row, count)
            x = [arith.select(exists, scale(v), emit.f32(0.0)) for v in x]
            place = emit.iadd(emit.imul(emit.scalar(granule), KEY_GRANULE), row)
            packed_rows = emit.imul(head, num_granules * KEY_GRANULE)
            row64 = arith.extui(emit.i64_type(), emit.iadd(packed_rows, place))
            index = arith.addi(
                arith.muli(row64, emit.i64(dim)),
                arith.extui(emit.i64_type(), emit.imul(chunk, 16)),
            )
            address = emit.offset_address(dst_base, index, size)
            if fmt is None:
                words = [emit.convert_bf16x2(*x[j : j + 2]) for j in range(0, 16, 2)]
            else:
                words = [emit.convert_e4m3x4(*x[j : j + 4]) for j in range(0, 16, 4)]
            for j in range(0, len(words), 4):
                at = arith.addi(address, emit.i64(4 * j))
                emit.store_global(at, words[j : j + 4], always())

    def values_code(dv: int, width: int, value_start: int) -> Any:
        @plgpu.inline_mgpu(
            arg_types=(gmem, gmem, gmem, scalar, scalar, scalar, scalar, scalar, scalar)
        )
        def store_values(
            ctx: Any,
            src: Any,
            dst: Any,
            first_nan: Any,  # [Dv] of this sequence and head
            granule: Any,
            head: Any,
            first: Any,
            count: Any,
            place: Any,
            descale: Any,
        ) -> None:
            scale = _Scaler(emit.scalar(descale), fmt)
            granule, head, first, count, place = (
                emit.scalar(x) for x in (granule, head, first, count, place)
            )
            src_base, dst_base = emit.global_address(src), emit.global_address(dst)
            thread = emit.thread_in_warpgroup()
            piece = arith.remui(thread, emit.i32(8))
            octet = arith.divui(thread, emit.i32(8))
            if fmt is None:
                keys = [emit.iadd(emit.imul(piece, 4), i) for i in range(keys_of)]
            else:  # KEY_ORDER: positions 4t .. 4t+3 of 16 hold keys 2t, 2t+1, 2t+8, 2t+9
                half = emit.imul(arith.divui(piece, emit.i32(4)), 16)
                base = emit.iadd(half, emit.imul(arith.remui(piece, emit.i32(4)), 2))
                keys = [emit.iadd(base, i) for i in (0, 1, 8, 9)]
            for first_octet in range(0, dv // 8, 16):
                column = emit.imul(emit.iadd(octet, first_octet), 8)
                loaded = []
                for key in keys:
                    index = element(
                        token_of(first, key), width, head, emit.iadd(column, value_start)
                    )
                    loaded.append(load16(emit.offset_address(src_base, index, 2)))
                x = [
                    [arith.select(emit.less(key, count), scale(v), emit.f32(0.0)) for v in vs]
                    for key, vs in zip(keys, loaded, strict=True)
                ]
                nan = [[arith.cmpf(arith.CmpFPredicate.UNO, v, v) for v in vs] for vs in x]
                report_nan(first_nan, column, place, keys, nan)
                zero = emit.f32(0.0)
                x = [
                    [arith.select(n, zero, v) for n, v in zip(ns, vs, strict=True)]
                    for ns, vs in zip(nan, x, strict=True)
                ]
                block = emit.iadd(emit.imul(head, num_granules), granule)
                row = arith.addi(
                    arith.muli(arith.extui(emit.i64_type(), block), emit.i64(dv)),
                    arith.extui(emit.i64_type(), column),
                )
                address = emit.offset_address(dst_base, row, KEY_GRANULE * size)
                address = emit.offset_address(address, piece, keys_of * size)
                for d in range(8):
                    four = [x[i][d] for i in range(keys_of)]
                    if fmt is None:
                        words = [emit.convert_bf16x2(*four[:2]), emit.convert_bf16x2(*four[2:])]
                    else:
                        words = [emit.convert_e4m3x4(*four)]
                    at = arith.addi(address, emit.i64(d * KEY_GRANULE * size))
                    emit.store_global(at, words, always())

        def report_nan(
            first_nan: Any, column: Any, place: Any, keys: list[Any], nan: list[list[Any]]
        ) -> None:
            found = nan[0][0]
            for flag in [flag for flags in nan for flag in flags][1:]:
                found = arith.ori(found, flag)
            with utils.when(found):
                base = emit.offset_address(emit.global_address(first_nan), column, 4)
                for key, flags in zip(keys, nan, strict=True):
                    for d, flag in enumerate(flags):
                        with utils.when(flag):
                            emit.atomic_min_global(
                                arith.addi(base, emit.i64(4 * d)), emit.iadd(place, key)
                            )

        return store_values

    def find(index: Any) -> tuple[Any, Any]:
        """Neighbouring blocks take the heads of the same rows, which lie together in memory."""
        return lax.div(index, jnp.int32(num_heads)), lax.rem(index, jnp.int32(num_heads))

    packed_rows = jax.ShapeDtypeStruct((num_heads, num_granules * KEY_GRANULE, dim), dtype)
    options: dict[str, Any] = dict(
        grid=(num_granules * num_heads,),
        grid_names=("block",),
        num_threads=1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
    if values is None:

        def rows_kernel(*refs: Any) -> None:
            *src, table, descale, dst = refs
            granule, head = find(lax.axis_index("block"))
            store_rows(
                *src, dst, granule, head, table[granule, 0], table[granule, 1], descale[0, head]
            )

        run = plgpu.kernel(rows_kernel, out_type=[packed_rows], **options)
        return list(run(*sources, granules, descales))

    value_source, value_start = _source(values)
    dv = values.shape[2]
    store_values = values_code(dv, value_source.shape[2], value_start)

    def kernel(*refs: Any) -> None:
        *src, value_src, table, descale, first_nan, dst, value_dst = refs
        granule, head = find(lax.axis_index("block"))
        first, count, sequence, place = (table[granule, i] for i in range(4))
        store_rows(*src, dst, granule, head, first, count, descale[0, head])
        store_values(
            value_src,
            value_dst,
            first_nan.at[sequence, head],
            granule,
            head,
            first,
            count,
            place,
            descale[1, head],
        )

    packed_values = jax.ShapeDtypeStruct((num_heads * num_granules, dv, KEY_GRANULE), dtype)
    run = plgpu.kernel(kernel, out_type=[packed_rows, packed_values], **options)
    return list(run(*sources, value_source, granules, descales, first_nan))
