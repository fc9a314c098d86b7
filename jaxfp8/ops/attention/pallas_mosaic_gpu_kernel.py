# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The Hopper attention kernel: a persistent Pallas Mosaic GPU kernel for FP8 and BF16.

One block an SM works through a list of tasks (pallas_mosaic_gpu_schedule.py), the longest first; a
task is one head's tile of query rows against a run of key blocks. One warpgroup only loads: it
takes the next task, puts its description into one of the BOXES in shared memory, and K and V
blocks, through TMA, into rings of `stages` slots. So it is ahead, and the others find everything at
hand when they get to a task. Each consumer warpgroup owns 64 of the tile's rows. For key block t it
issues S(t) = Q K(t)' and O += P(t-1) V(t-1) back to back (in FP8 the latter first), and runs the
softmax of S(t) while the other consumers' products execute; named barriers make the consumers take
turns at issuing. The special function unit limits the exponentials; row maxima, sums, conversion
and the accumulation of the output are done in their shadow.

P stays in registers. The accumulator of S gives a thread columns 2t, 2t+1 of every 8; as the A
operand of the second product, bfloat16 wants just those, e4m3 wants columns 4t .. 4t+3 of every 16.
So the packer stores V's keys permuted in groups of 16 for e4m3 (KEY_ORDER), and no data moves
between threads.

Key blocks are visited from the last to the first: those that need a mask (the causal diagonal, the
end of the sequence) come first, and the long loop over the others has none. Blocks may run past the
end of a sequence into the next one's keys; these are masked, and as P is then 0 and the packed V
is finite everywhere, they add nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8.ops.attention.pallas_mosaic_gpu_consumer import consumer_code

KEY_GRANULE = 32
"""Keys in a granule of packed V; sequences begin on a granule."""

KEY_ORDER = tuple(2 * t + (r & 1) + 8 * (r >> 1) for t in range(4) for r in range(4))
"""Position i of each 16 keys of e4m3 V holds key KEY_ORDER[i]."""

# Fields of a task: the first row of its tile (a multiple of 8: the copy engine's tiles), the rows
# to skip at its start and the row it ends before, where its sequence's packed keys begin, its first
# key block and their number, the sequence's keys, the keys that the tile's first row sees (may be
# negative), the sequence, and which piece of a split it is.
Q_ROW, SKIP, ROWS, KV_ROW, FIRST_BLOCK, BLOCKS, KEYS, ROW_LIMIT, SEQUENCE, PART = range(10)
TASK_FIELDS = 10
Q_ALIGNMENT = 8

# What a box holds besides: the head, and the first key whose value is NaN in some column. BLOCKS is
# -1 where there are no more tasks.
HEAD, NAN_KEY = TASK_FIELDS, TASK_FIELDS + 1
BOX_FIELDS = 16
BOXES = 3

UPDATES_OPERANDS = jax.__version_info__ >= (0, 11)
"""Before JAX 0.11 a kernel takes no Ref operand, and with it no array that it updates."""


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """Tile sizes.

    Attributes:
      block_kv: keys a block; a multiple of KEY_GRANULE.
      consumers: warpgroups of 64 query rows: 2 (up to 240 registers a thread) or 3 (160).
      stages: slots of the K and V rings.
    """

    block_kv: int
    consumers: int
    stages: int

    @property
    def block_q(self) -> int:
        """Query rows of a tile."""
        return 64 * self.consumers

    @property
    def registers(self) -> tuple[int, int]:
        """Registers a thread for consumers and for the loading warpgroup."""
        return {2: (240, 24), 3: (160, 32)}[self.consumers]


def swizzle_width(row_bytes: int) -> int:
    """The widest swizzle, in bytes, that divides a row."""
    return next(s for s in (128, 64, 32) if row_bytes % s == 0)


def attention_kernel(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    first_nan: jax.Array,
    first_nan_of_head: jax.Array,
    tasks: jax.Array,
    scales: jax.Array,
    *,
    config: KernelConfig,
    causal: bool,
    parts: int,
    head_major: bool,
    num_blocks: int,
    num_tokens: int,
) -> tuple[jax.Array, jax.Array]:
    """Run the tasks.

    Args:
      q: [H, T, Dqk] e4m3fn or bfloat16; T a multiple of 8.
      k: [H, Tk, Dqk], the packed keys.
      v: [H * Tk / KEY_GRANULE, Dv, KEY_GRANULE], the packed values; finite everywhere.
      first_nan: int32 [B, H, Dv], the first key of each sequence whose value was NaN, or a number
        past every key.
      first_nan_of_head: int32 [B, H], the least of them in each head.
      tasks: int32 [N + 1, TASK_FIELDS]; the last row begins with the number of tasks that exist,
        which are the first, and a zero, in which the blocks count the tasks that they take.
      scales: float32 [H, 2]: what turns a score into a base-2 exponent, and V's descale.
      config: tile sizes.
      causal: whether row i of a task sees ROW_LIMIT + i keys, or ROW_LIMIT.
      parts: number of pieces the keys are split into. 1: bfloat16 output; more: one float32
        output and LSE a piece, for the caller to merge.
      head_major: whether a block's successive tasks run over tiles first, then heads.
      num_blocks: thread blocks, one for each SM.
      num_tokens: Tq, rows of the result.

    Returns:
      (out, lse): bfloat16 [Tq, H, Dv] and float32 [H, Tq], or with parts > 1 float32
      [parts, Tq, H, Dv] and [parts, H, Tq]. Rows that no task covers are not written.
    """
    num_heads, _, dqk = q.shape
    dv = v.shape[1]
    max_tasks = tasks.shape[0] - 1
    fp8 = q.dtype.itemsize == 1
    block, stages, consumers = config.block_kv, config.stages, config.consumers
    granules = block // KEY_GRANULE
    granules_per_head = k.shape[1] // KEY_GRANULE

    qk_swizzle = swizzle_width(dqk * q.dtype.itemsize)
    v_swizzle = KEY_GRANULE * v.dtype.itemsize
    # The type checker takes the methods these two inherit for abstract ones.
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    qk_transforms = (tiling((8, qk_swizzle // q.dtype.itemsize)), swizzle(qk_swizzle))
    v_transforms = (tiling((8, KEY_GRANULE)), swizzle(v_swizzle))

    code = consumer_code(
        fp8=fp8,
        block=block,
        dv=dv,
        num_heads=num_heads,
        causal=causal,
        parts=parts,
        qk_ref=plgpu.RefType(qk_transforms),
        v_ref=plgpu.RefType(v_transforms),
    )

    def kernel(
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        nan_ref: Any,
        nan_of_head_ref: Any,
        task_ref: Any,
        scale_ref: Any,
        out_ref: Any,
        lse_ref: Any,
        q_smem: Any,
        k_smem: Any,
        v_smem: Any,
        boxes: Any,
        box_scales: Any,
        q_full: Any,
        k_full: Any,
        v_full: Any,
        k_empty: Any,
        v_empty: Any,
        box_full: Any,
        box_empty: Any,
    ) -> None:
        this_block, wg = lax.axis_index("block"), lax.axis_index("wg")

        def next_slot(slot: Any) -> Any:
            return jnp.where(slot == stages - 1, 0, slot + 1)

        following = jnp.where(wg == consumers - 1, 0, wg + 1)

        def box_of(turn: Any) -> Any:
            return lax.rem(turn, jnp.int32(BOXES))

        @pl.when(wg < consumers)
        def _consumer() -> None:
            plgpu.set_max_registers(config.registers[0], action="increase")
            qs = q_smem.at[wg]
            for i in range(stages):
                plgpu.barrier_arrive(k_empty.at[i])
                plgpu.barrier_arrive(v_empty.at[i])
            for i in range(BOXES):
                plgpu.barrier_arrive(box_empty.at[i])

            def read_query(turn: Any) -> None:
                """Waits for a turn's box, and starts the load of its rows of Q."""
                box = box_of(turn)
                plgpu.barrier_wait(box_full.at[box])

                @pl.when((boxes[box, BLOCKS] > 0) & (boxes[box, ROWS] > wg * 64))
                def _() -> None:
                    first = pl.multiple_of(boxes[box, Q_ROW], Q_ALIGNMENT)
                    rows = pl.ds(first + wg * 64, 64)
                    plgpu.copy_gmem_to_smem(q_ref.at[boxes[box, HEAD], rows], qs, q_full.at[wg])

            read_query(jnp.int32(0))
            pl.when(wg == consumers - 1)(lambda: code.give_turn(following))  # the first begins

            def run_task(carry: Any) -> Any:
                """Run a turn's task.

                Args:
                  carry: the turn, the slot of the last block of the task before, and the blocks
                    of this task, -1 where there is none.
                """
                turn, last_slot, blocks = carry
                box = box_of(turn)
                rows = boxes[box, ROWS] - wg * 64
                scale = box_scales[box, 0]
                first_limit = boxes[box, ROW_LIMIT] + (wg * 64 if causal else 0)
                keys = boxes[box, KEYS]
                limits = code.row_limits(first_limit, keys)
                first_block = boxes[box, FIRST_BLOCK]
                last_block = first_block + blocks - 1
                # Blocks that every row of this warpgroup sees whole need no mask.
                whole = lax.div(jnp.clip(first_limit, 0, keys), jnp.int32(block)) - first_block
                masked = jnp.clip(blocks - jnp.maximum(whole, 0), 1, blocks)

                def store(o: Any, m: Any, l: Any) -> None:
                    part = boxes[box, PART]
                    head = boxes[box, HEAD]
                    out_at = out_ref.at[part] if parts > 1 else out_ref
                    lse_at = lse_ref.at[part] if parts > 1 else lse_ref

                    @pl.when(rows > 0)
                    def _() -> None:
                        code.epilogue(
                            out_at.at[:, head],
                            lse_at.at[head],
                            nan_ref.at[boxes[box, SEQUENCE], head],
                            o,
                            m,
                            l,
                            limits,
                            scale,
                            box_scales[box, 1],
                            boxes[box, Q_ROW] + wg * 64,
                            boxes[box, SKIP] - wg * 64,
                            rows,
                            boxes[box, NAN_KEY],
                        )

                def await_loads(t: Any, slot: Any) -> None:
                    """Wait for what is issued after block t, while its scores are made."""
                    plgpu.barrier_wait(v_full.at[slot])

                    @pl.when(t + 1 < blocks)
                    def _() -> None:
                        plgpu.barrier_wait(k_full.at[next_slot(slot)])

                def some_keys(last_slot: Any) -> Any:
                    o, l, reference, alpha, p = code.initial_state()
                    plgpu.barrier_wait(q_full.at[wg])
                    slot = next_slot(last_slot)
                    plgpu.barrier_wait(k_full.at[slot])
                    s = code.first_scores(qs, k_smem.at[slot])
                    plgpu.barrier_arrive(k_empty.at[slot])
                    if fp8:
                        await_loads(0, slot)
                    s = code.mask(s, limits, last_block * block)
                    reference, alpha = code.raise_reference(s, reference, alpha, scale)
                    p, l, o, alpha, reference, next_alpha = code.finish_exact(
                        s, reference, alpha, l, o, o, alpha, scale
                    )

                    # The products of FP8 take about as long as the softmax of the other consumer,
                    # so a warpgroup waits for both of its own and then runs its softmax in one go.
                    # Those of bfloat16 take twice as long: there the maxima are found beside the
                    # second product.

                    def fp8_step(t: Any, carry: Any, with_mask: bool) -> Any:
                        o, l, alpha, p, reference, next_alpha, v_slot = carry
                        k_slot = next_slot(v_slot)
                        code.await_turn(wg)
                        s, product = code.start_both(qs, k_smem.at[k_slot], v_smem.at[v_slot], o, p)
                        code.give_turn(following)
                        await_loads(t, k_slot)
                        s, product = code.wait_products(s, product, p)
                        plgpu.barrier_arrive(k_empty.at[k_slot])
                        plgpu.barrier_arrive(v_empty.at[v_slot])
                        finish = code.finish_exact if with_mask else code.finish_ahead
                        if with_mask:
                            s = code.mask(s, limits, (last_block - t) * block)
                            reference, next_alpha = code.raise_reference(
                                s, reference, next_alpha, scale
                            )
                        p, l, o, alpha, reference, next_alpha = finish(
                            s, reference, next_alpha, l, o, product, alpha, scale
                        )
                        return o, l, alpha, p, reference, next_alpha, k_slot

                    def bf16_step(t: Any, carry: Any, with_mask: bool) -> Any:
                        o, l, alpha, p, reference, next_alpha, v_slot = carry
                        k_slot = next_slot(v_slot)
                        plgpu.barrier_wait(k_full.at[k_slot])
                        code.await_turn(wg)
                        s = code.start_scores(qs, k_smem.at[k_slot])
                        plgpu.barrier_wait(v_full.at[v_slot])
                        product = code.start_output(v_smem.at[v_slot], o, p)
                        code.give_turn(following)
                        s = code.wait_scores(s)
                        plgpu.barrier_arrive(k_empty.at[k_slot])
                        if with_mask:
                            s = code.mask(s, limits, (last_block - t) * block)
                        reference, next_alpha = code.raise_reference(
                            s, reference, next_alpha, scale
                        )
                        s, product = code.wait_products(s, product, p)
                        plgpu.barrier_arrive(v_empty.at[v_slot])
                        p, l, o, alpha, reference, next_alpha = code.finish_exact(
                            s, reference, next_alpha, l, o, product, alpha, scale
                        )
                        return o, l, alpha, p, reference, next_alpha, k_slot

                    step = fp8_step if fp8 else bf16_step
                    carry = o, l, alpha, p, reference, next_alpha, slot
                    carry = lax.fori_loop(1, masked, functools.partial(step, with_mask=True), carry)
                    carry = lax.fori_loop(
                        masked, blocks, functools.partial(step, with_mask=False), carry
                    )
                    o, l, alpha, p, reference, next_alpha, slot = carry
                    code.warpgroup_barrier()  # every warp is done with Q
                    read_query(turn + 1)
                    if not fp8:
                        plgpu.barrier_wait(v_full.at[slot])
                    o, l = code.last_output(v_smem.at[slot], o, l, alpha, next_alpha, p)
                    plgpu.barrier_arrive(v_empty.at[slot])
                    store(o, reference, l)
                    return slot

                def only_others(last_slot: Any) -> Any:
                    """No row of the tile is this warpgroup's: let the others have their turns."""

                    def step(t: Any, last_slot: Any) -> Any:
                        slot = next_slot(last_slot)

                        @pl.when(t > 0)
                        def _() -> None:
                            code.await_turn(wg)
                            code.give_turn(following)

                        plgpu.barrier_wait(k_full.at[slot])
                        plgpu.barrier_arrive(k_empty.at[slot])
                        plgpu.barrier_wait(v_full.at[slot])
                        plgpu.barrier_arrive(v_empty.at[slot])
                        return slot

                    slot = lax.fori_loop(0, blocks, step, last_slot)
                    read_query(turn + 1)
                    return slot

                def no_keys(last_slot: Any) -> Any:
                    o, l, reference, _, _ = code.initial_state()
                    store(o, reference, l)
                    read_query(turn + 1)
                    return last_slot

                slot = lax.cond(
                    blocks > 0,
                    lambda slot: lax.cond(rows > 0, some_keys, only_others, slot),
                    no_keys,
                    last_slot,
                )
                plgpu.barrier_arrive(box_empty.at[box])
                return turn + 1, slot, boxes[box_of(turn + 1), BLOCKS]

            lax.while_loop(
                lambda carry: carry[2] >= 0,
                run_task,
                (jnp.int32(0), jnp.int32(stages - 1), boxes[0, BLOCKS]),
            )
            pl.when(wg == 0)(lambda: code.await_turn(wg))  # takes the last that was given

        @pl.when(wg == consumers)
        def _producer() -> None:
            plgpu.set_max_registers(config.registers[1], action="decrease")
            num_tasks = task_ref[max_tasks, 0]
            total = num_tasks * num_heads

            def number_of(turn: Any, box: Any) -> Any:
                """Which of all tasks of all heads is this block's in a turn."""
                if not UPDATES_OPERANDS:
                    # Odd rounds run backwards, so that no block gets the longest of every round.
                    odd = lax.rem(turn, jnp.int32(2)) == 1
                    place = jnp.where(odd, num_blocks - 1 - this_block, this_block)
                    return turn * num_blocks + place

                @pl.when(turn > 0)
                def _() -> None:
                    code.take_number(task_ref.at[max_tasks, pl.ds(1, 1)], boxes.at[box])

                return jnp.where(turn == 0, this_block, num_blocks + boxes[box, 0])

            def fill_box(turn: Any) -> tuple[Any, Any, Any]:
                """Describe a turn's task to the consumers; its blocks, row and head granule."""
                box = box_of(turn)
                plgpu.barrier_wait(box_empty.at[box])
                number = number_of(turn, box)
                exists = number < total
                number = jnp.minimum(number, total - 1)
                if head_major:
                    task, head = lax.rem(number, num_tasks), lax.div(number, num_tasks)
                else:
                    task = lax.div(number, jnp.int32(num_heads))
                    head = lax.rem(number, jnp.int32(num_heads))
                blocks = jnp.where(exists, task_ref[task, BLOCKS], -1)
                last_row = (task_ref[task, FIRST_BLOCK] + blocks - 1) * block
                if UPDATES_OPERANDS:
                    code.warpgroup_barrier()  # every warp has read the number
                for field in range(TASK_FIELDS):
                    boxes[box, field] = blocks if field == BLOCKS else task_ref[task, field]
                boxes[box, HEAD] = head
                boxes[box, NAN_KEY] = nan_of_head_ref[task_ref[task, SEQUENCE], head]
                for i in range(2):
                    box_scales[box, i] = scale_ref[head, i]
                plgpu.barrier_arrive(box_full.at[box])
                return blocks, task_ref[task, KV_ROW] + last_row, head

            def run_task(carry: Any) -> Any:
                turn, last_slot, _ = carry
                blocks, last_row, head = fill_box(turn)
                head_granule = head * granules_per_head

                def load(t: Any, last_slot: Any) -> Any:
                    slot = next_slot(last_slot)
                    row = last_row - t * block
                    plgpu.barrier_wait(k_empty.at[slot])
                    plgpu.copy_gmem_to_smem(
                        k_ref.at[head, pl.ds(row, block)], k_smem.at[slot], k_full.at[slot]
                    )
                    plgpu.barrier_wait(v_empty.at[slot])
                    granule = head_granule + lax.div(row, jnp.int32(KEY_GRANULE))
                    plgpu.copy_gmem_to_smem(
                        v_ref.at[pl.ds(granule, granules)], v_smem.at[slot], v_full.at[slot]
                    )
                    return slot

                return turn + 1, lax.fori_loop(0, blocks, load, last_slot), blocks

            lax.while_loop(
                lambda carry: carry[2] >= 0,
                run_task,
                (jnp.int32(0), jnp.int32(stages - 1), jnp.int32(0)),
            )

    leading = (parts,) if parts > 1 else ()
    out_dtype = jnp.float32 if parts > 1 else jnp.bfloat16
    ring = functools.partial(plgpu.Barrier, num_barriers=stages)
    run = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((*leading, num_tokens, num_heads, dv), out_dtype),
            jax.ShapeDtypeStruct((*leading, num_heads, num_tokens), jnp.float32),
        ],
        grid=(num_blocks,),
        grid_names=("block",),
        num_threads=consumers + 1,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((consumers, 64, dqk), q.dtype, transforms=qk_transforms),
            plgpu.SMEM((stages, block, dqk), k.dtype, transforms=qk_transforms),
            plgpu.SMEM((stages, granules, dv, KEY_GRANULE), v.dtype, transforms=v_transforms),
            plgpu.SMEM((BOXES, BOX_FIELDS), jnp.int32),
            plgpu.SMEM((BOXES, 2), jnp.float32),
            plgpu.Barrier(num_barriers=consumers),
            ring(),
            ring(),
            ring(num_arrivals=consumers),
            ring(num_arrivals=consumers),
            plgpu.Barrier(num_barriers=BOXES),
            plgpu.Barrier(num_barriers=BOXES, num_arrivals=consumers),
        ],
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
    table = jax.new_ref(tasks) if UPDATES_OPERANDS else tasks
    out, lse = run(q, k, v, first_nan, first_nan_of_head, table, scales)
    return out, lse
