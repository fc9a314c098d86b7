# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Who does what: the task table of the Hopper attention kernel, made on the device by one kernel.

As XLA it would be seven small kernels, a tenth of the time of a batch of short sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from jaxfp8.ops.attention import pallas_mosaic_gpu_emit as emit
from jaxfp8.ops.attention.pallas_mosaic_gpu_kernel import (
    BLOCKS,
    KEY_GRANULE,
    Q_ALIGNMENT,
    TASK_FIELDS,
)

_THREADS = emit.WARPGROUP
# Each task's work is in shared memory while they are ranked: 4 bytes, of 227 KiB.
_MAX_TASKS = 50_000


def _starts(lengths: jax.Array) -> jax.Array:
    """int32 [N + 1] of [N]: the sum of those before. A scan would be a kernel of its own."""
    index = jnp.arange(lengths.shape[0] + 1, dtype=jnp.int32)
    before = index[None, :-1] < index[:, None]
    return jnp.sum(jnp.where(before, lengths[None, :], 0), axis=1, dtype=jnp.int32)


def packed_starts(cu_seqlens: jax.Array) -> jax.Array:
    """int32 [B + 1]: where each packed sequence starts, in keys; a multiple of KEY_GRANULE."""
    granules = -(-jnp.diff(cu_seqlens) // KEY_GRANULE)
    return _starts(granules * KEY_GRANULE)


def sequence_of(starts: jax.Array, positions: jax.Array) -> jax.Array:
    """int32: the sequence b with starts[b] <= position < starts[b + 1], at most B - 1."""
    return jnp.sum(positions[:, None] >= starts[None, 1:-1], axis=1, dtype=jnp.int32)


def _number(condition: jax.Array) -> jax.Array:
    """1 or 0. A kernel's vectors lose their sign in a selection between two."""
    return condition.astype(jnp.int32)


def max_tasks(num_tokens: int, num_sequences: int, block_q: int, parts: int) -> int:
    """Room for the tasks of sequences of any lengths."""
    # The first tile of a sequence begins a few rows before it, where the copy engine can.
    rows = num_tokens + (num_sequences + 1) * (block_q - 1 + Q_ALIGNMENT - 1)
    return rows // block_q * parts


def tasks_at(
    index: jax.Array,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    num_sequences: int,
    num_tokens: int,
    *,
    block_q: int,
    block_kv: int,
    causal: bool,
    parts: int,
) -> tuple[list[jax.Array], jax.Array]:
    """The tasks of some places of the table before it is sorted, and how many there are in all.

    Every row of the queries, also those past cu_seqlens_q[-1] (as a sequence without keys), is in
    the tile of `parts` tasks, whose key blocks together are those that the tile's rows see.

    Written for arrays, and for the references and vectors of a kernel.

    Args:
      index: int32 vector.
      cu_seqlens_q: int32 [B + 1], also as a reference.
      cu_seqlens_k: int32 [B + 1], likewise.
      num_sequences: B.
      num_tokens: rows of the query array.
      block_q: rows of a tile.
      block_kv: keys of a block.
      causal: aligned bottom right.
      parts: pieces that each tile's blocks are cut into.

    Returns:
      (fields, count): a vector for each field of a task; those of a task that does not exist have
      no blocks and no rows.
    """
    tile, part = lax.div(index, jnp.int32(parts)), lax.rem(index, jnp.int32(parts))
    nothing = index * 0

    def pieces(x: Any, size: int) -> Any:
        return lax.div(x + (size - 1), jnp.int32(size))

    def look(b: Any, carry: Any) -> Any:
        first_tile, kv_row, *found = carry
        inside = jnp.minimum(b, num_sequences - 1)
        is_sequence = b < num_sequences
        start = cu_seqlens_q[b]
        end = jnp.where(is_sequence, cu_seqlens_q[inside + 1], num_tokens)
        keys = jnp.where(is_sequence, cu_seqlens_k[inside + 1] - cu_seqlens_k[inside], 0)
        skipped = lax.rem(start, jnp.int32(Q_ALIGNMENT))
        tiles = jnp.where(end > start, pieces(skipped + end - start, block_q), 0)
        next_tile = first_tile + tiles
        here = _number((tile >= first_tile) & (tile < next_tile))
        values = (start, end, keys, kv_row, first_tile, inside)
        found = [old + here * value for old, value in zip(found, values, strict=True)]
        return next_tile, kv_row + pieces(keys, KEY_GRANULE) * KEY_GRANULE, *found

    zero = jnp.int32(0)
    tiles, _, *found = lax.fori_loop(0, num_sequences + 1, look, (zero, zero, *[nothing] * 6))
    start, end, keys, kv_row, first_tile, sequence = found
    # Relative to the sequence; negative in the first tile where rows are skipped.
    first_row = (tile - first_tile) * block_q - lax.rem(start, jnp.int32(Q_ALIGNMENT))
    rows = jnp.minimum(jnp.maximum(end - start - first_row, 0), block_q)
    row_limit, visible = keys, keys
    if causal:
        row_limit = first_row + keys - (end - start) + 1
        visible = jnp.minimum(jnp.maximum(row_limit + rows - 1, 0), keys)
    blocks = _number(rows > 0) * pieces(visible, block_kv)
    each = pieces(blocks, parts)
    first_block = each * part
    fields = [
        start + first_row,
        jnp.maximum(-first_row, 0),
        rows,
        kv_row,
        first_block,
        jnp.minimum(jnp.maximum(blocks - first_block, 0), each),
        keys,
        row_limit,
        sequence,
        part,
    ]
    return fields, tiles * parts


def attention_tasks(
    cu_seqlens_q: jax.Array,
    cu_seqlens_k: jax.Array,
    num_tokens: int,
    *,
    block_q: int,
    block_kv: int,
    causal: bool,
    parts: int,
) -> jax.Array:
    """int32 [N + 1, TASK_FIELDS], see the fields in pallas_mosaic_gpu_kernel.py.

    The tasks of `tasks_at`: first those that exist, and of these those with most blocks. The last
    row has their number, then a zero, for the kernel to count turns in.

    Args:
      cu_seqlens_q: int32 [B + 1].
      cu_seqlens_k: int32 [B + 1].
      num_tokens: rows of the query array.
      block_q, block_kv, causal, parts: as `tasks_at`.

    Raises:
      NotImplementedError: there is no room for so many tasks: some six million rows.
    """
    num_sequences = cu_seqlens_q.shape[0] - 1
    size = max_tasks(num_tokens, num_sequences, block_q, parts)
    if size > _MAX_TASKS:
        raise NotImplementedError(
            f"q: {num_tokens} rows in {num_sequences} sequences are {size} tasks, and the table of "
            f"backend pallas_mosaic_gpu holds {_MAX_TASKS}; prefill in several calls"
        )
    chunks = pl.cdiv(size, _THREADS)
    vector, gmem, scalar = emit.file_layout(1), plgpu.RefType(), emit.scalar_layout()

    @plgpu.inline_mgpu(arg_types=(gmem, *[vector] * (TASK_FIELDS + 2)))
    def store(ctx: Any, tasks: Any, place: Any, exists: Any, *fields: Any) -> None:
        (place,), (exists,) = emit.unpack(place), emit.unpack(exists)
        place = emit.imul(place, TASK_FIELDS)
        address = emit.offset_address(emit.global_address(tasks), place, 4)
        present = arith.cmpi(arith.CmpIPredicate.ne, exists, emit.i32(0))
        for i, field in enumerate(fields):
            at = arith.addi(address, emit.i64(4 * i))
            emit.store_global(at, emit.unpack(field), present)

    @plgpu.inline_mgpu(arg_types=(gmem, scalar))
    def store_count(ctx: Any, last: Any, count: Any) -> None:
        thread = emit.thread_in_warpgroup()
        value = emit.scalar(count)
        first = arith.cmpi(arith.CmpIPredicate.eq, thread, emit.i32(0))
        address = emit.offset_address(emit.global_address(last), thread, 4)
        value = arith.select(first, value, emit.i32(0))
        emit.store_global(address, [value], emit.less(thread, TASK_FIELDS))

    @plgpu.inline_mgpu(return_type=emit.file_type(1, jnp.int32))
    def threads(ctx: Any) -> Any:
        return emit.pack([emit.thread_in_warpgroup()])

    @plgpu.inline_mgpu()
    def warpgroup_barrier(ctx: Any) -> None:
        utils.warpgroup_barrier()

    def kernel(cu_q_ref: Any, cu_k_ref: Any, tasks_ref: Any, work: Any) -> None:
        this_chunk = lax.axis_index("chunk")

        def indices(chunk: Any) -> jax.Array:
            return threads() + chunk * _THREADS

        def tasks_of(chunk: Any) -> tuple[list[jax.Array], jax.Array]:
            return tasks_at(
                indices(chunk), cu_q_ref, cu_k_ref, num_sequences, num_tokens,
                block_q=block_q, block_kv=block_kv, causal=causal, parts=parts,
            )  # fmt: skip

        def note_work(chunk: Any, _: Any) -> Any:
            fields, _ = tasks_of(chunk)
            work[pl.ds(chunk * _THREADS, _THREADS)] = fields[BLOCKS]
            return _

        lax.fori_loop(0, chunks, note_work, jnp.int32(0))
        fields, count = tasks_of(this_chunk)
        index = indices(this_chunk)
        warpgroup_barrier()
        place = rank(index, fields[BLOCKS], lambda i: work[i], count)
        store(tasks_ref, place, _number(index < count), *fields)

        @pl.when(this_chunk == 0)
        def _() -> None:
            store_count(tasks_ref.at[size], count)

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((size + 1, TASK_FIELDS), jnp.int32),
        grid=(chunks,),
        grid_names=("chunk",),
        num_threads=1,
        thread_name="wg",
        scratch_types=[plgpu.SMEM((chunks * _THREADS,), jnp.int32)],
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
    return run(cu_seqlens_q, cu_seqlens_k)


def rank(index: jax.Array, work: jax.Array, work_of: Callable[[Any], Any], count: Any) -> jax.Array:
    """How many of the first `count` have more work than each of `index`, or as much and come first.

    By counting, which for tables of this size takes less than a sort.
    """

    def look(other: Any, place: jax.Array) -> jax.Array:
        others = work_of(other)
        before = (others > work) | ((work == others) & (index > other))
        return place + _number(before)

    return lax.fori_loop(0, count, look, index * 0)
