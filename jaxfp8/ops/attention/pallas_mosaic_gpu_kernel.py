# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The Hopper attention kernel: a persistent Pallas Mosaic GPU kernel for FP8 and BF16.

One block an SM works through a list of tasks (pallas_mosaic_gpu_schedule.py); a task is one head's
tile of query rows against a run of key blocks. One warpgroup only loads: K and V blocks, through
TMA, into rings of `stages` slots. Each consumer warpgroup owns 64 of the tile's rows. For key block
t it issues S(t) = Q K(t)' and O += P(t-1) V(t-1) back to back, and runs the softmax of S(t) while
the other consumers' products execute; named barriers make the consumers take turns at issuing. The
special function unit limits the exponentials; row maxima, sums, conversion and the accumulation of
the output are done in their shadow.

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
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from jaxfp8.ops.attention import pallas_mosaic_gpu_emit as emit

LOG2_E = math.log2(math.e)

KEY_GRANULE = 32
"""Keys in a granule of packed V; sequences begin on a granule."""

KEY_ORDER = tuple(2 * t + (r & 1) + 8 * (r >> 1) for t in range(4) for r in range(4))
"""Position i of each 16 keys of e4m3 V holds key KEY_ORDER[i]."""

# Initial row maximum, in units of the scores: finite, so that a row whose keys are all masked
# gives exp2(-inf) = 0 and not NaN, and below any score of FP8 operands.
_LOWEST = -1e30

# P is stored as exp2(score - reference + 5). The reference is the row's maximum over the blocks
# before, so that the exponentials need not wait for this block's; where a score is more than 3
# above it, the block is done again with a new reference. So P is 256 at most, within e4m3's 448,
# and nothing clips. The same factors are in the sum, so the quotient does not change.
_P_SHIFT = 5.0
_HEADROOM = 3.0

# Fields of a task: the first row of its tile (a multiple of 8: the copy engine's tiles), the rows
# to skip at its start and the row it ends before, where its sequence's packed keys begin, its first
# key block and their number, the sequence's keys, the keys that the tile's first row sees (may be
# negative), the sequence, and which piece of a split it is.
Q_ROW, SKIP, ROWS, KV_ROW, FIRST_BLOCK, BLOCKS, KEYS, ROW_LIMIT, SEQUENCE, PART = range(10)
TASK_FIELDS = 10
Q_ALIGNMENT = 8


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
      tasks: int32 [N + 1, TASK_FIELDS]; the last row begins with the number of tasks that exist,
        which are the first.
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
    mma = "e4m3" if fp8 else "bf16"
    block, stages, consumers = config.block_kv, config.stages, config.consumers
    granules = block // KEY_GRANULE
    granules_per_head = k.shape[1] // KEY_GRANULE

    qk_swizzle = swizzle_width(dqk * q.dtype.itemsize)
    v_swizzle = KEY_GRANULE * v.dtype.itemsize
    qk_transforms = (
        plgpu.TilingTransform((8, qk_swizzle // q.dtype.itemsize)),
        plgpu.SwizzleTransform(qk_swizzle),
    )
    v_transforms = (
        plgpu.TilingTransform((8, KEY_GRANULE)),
        plgpu.SwizzleTransform(v_swizzle),
    )
    qk_ref, v_ref_type = plgpu.RefType(qk_transforms), plgpu.RefType(v_transforms)
    gmem_ref, scalar = plgpu.RefType(), emit.scalar_layout()

    # Registers a thread: scores, output accumulator, P, row statistics.
    ns, no, np_ = block // 2, dv // 2, block // (8 if fp8 else 4)
    s_file, o_file, p_file, row_file = (emit.file_layout(n) for n in (ns, no, np_, 2))
    s_type, o_type, row_type = (emit.file_type(n) for n in (ns, no, 2))
    p_type, limit_type = emit.file_type(np_, jnp.int32), emit.file_type(2, jnp.int32)

    def row_half(index: int) -> int:
        """Which of a thread's two rows register `index` of an accumulator belongs to."""
        return (index // 2) % 2

    def issue_scores(q_smem: Any, k_smem: Any) -> list[Any]:
        s = None
        for a, b in zip(emit.operand_slices(q_smem), emit.operand_slices(k_smem), strict=True):
            s = emit.wgmma(s, a, b, block, mma)
        emit.wgmma_commit()
        assert s is not None
        return s

    def issue_output(o: list[Any] | None, p: list[Any], v_smem: Any) -> list[Any]:
        for i, b in enumerate(emit.operand_slices(v_smem)):
            o = emit.wgmma(o, p[4 * i : 4 * i + 4], b, dv, mma)
        emit.wgmma_commit()
        assert o is not None
        return o

    @plgpu.inline_mgpu(return_type=(o_type, row_type, row_type, row_type, p_type))
    def initial_state(ctx: Any) -> Any:
        """Output, row sums, reference, alpha, P."""
        zero, one, lowest = emit.f32(0.0), emit.f32(1.0), emit.f32(_LOWEST)
        return tuple(
            map(
                emit.pack,
                ([zero] * no, [zero] * 2, [lowest] * 2, [one] * 2, [emit.i32(0)] * np_),
            )
        )

    @plgpu.inline_mgpu(arg_types=(scalar, scalar), return_type=limit_type)
    def row_limits(ctx: Any, first: Any, keys: Any) -> Any:
        """The number of keys that each of the thread's two rows sees."""
        limits = []
        for half in range(2):
            limit = emit.scalar(first)
            if causal:
                limit = emit.iadd(limit, emit.iadd(emit.fragment_row(), 8 * half))
            limits.append(arith.minsi(limit, emit.scalar(keys)))
        return emit.pack(limits)

    @plgpu.inline_mgpu(arg_types=(qk_ref, qk_ref), return_type=s_type)
    def first_scores(ctx: Any, q_smem: Any, k_smem: Any) -> Any:
        emit.wgmma_fence()
        return emit.pack(emit.wgmma_wait(0, issue_scores(q_smem, k_smem)))

    @plgpu.inline_mgpu(arg_types=(s_file, row_file, scalar), return_type=s_type)
    def mask(ctx: Any, s: Any, limits: Any, first_key: Any) -> Any:
        """-inf where the key is not seen."""
        scores = emit.unpack(s)
        start = emit.iadd(emit.scalar(first_key), emit.fragment_column())
        room = [emit.isub(limit, start) for limit in emit.unpack(limits)]
        hidden = emit.f32(-math.inf)
        for i in range(ns):
            seen = emit.less(emit.i32(8 * (i // 4) + i % 2), room[row_half(i)])
            scores[i] = arith.select(seen, scores[i], hidden)
        return emit.pack(scores)

    def rescale_factor(old: Any, new: Any, c: Any) -> Any:
        """What turns sums made with one reference into sums with another.

        Exactly 1 while the reference stands: a fused form is 1 ulp off, and the error then grows
        with the number of blocks.
        """
        return emit.exp2(emit.mul(emit.sub(old, new), c))

    class RowMaxima:
        """Row maxima of a block, in eight chains: two rows, each in four parts."""

        def __init__(self) -> None:
            self.chains: list[list[Any]] = [[], []]

        def add(self, scores: list[Any], start: int, stop: int) -> None:
            for i in range(start, stop):
                chains, chain = self.chains[row_half(i)], (i // 4 * 2 + i % 2) % 4
                if chain == len(chains):
                    chains.append(scores[i])
                else:
                    chains[chain] = emit.maximum(chains[chain], scores[i])

        def result(self) -> list[Any]:
            tops = [emit.tree(emit.maximum, chains) for chains in self.chains]
            return [emit.across_quad(emit.maximum, top) for top in tops]

    class Probabilities:
        """P of a block as A operands, and the sums of its rows."""

        def __init__(self, reference: list[Any], c: Any) -> None:
            minus = emit.sub(emit.f32(0.0), c)
            self.c = c
            self.shift = [emit.fma(x, minus, emit.f32(_P_SHIFT)) for x in reference]
            self.registers: list[Any] = []
            self.sums: list[list[Any]] = [[], []]

        def add(self, scores: list[Any], start: int) -> None:
            """Eight more of a thread's scores."""
            p = []
            for i in range(start, start + 8):
                half = row_half(i)
                p.append(emit.exp2(emit.fma(scores[i], self.c, self.shift[half])))
                self.sums[half].append(p[-1])
            self.sums = [[emit.tree(emit.add, x)] for x in self.sums]
            if fp8:
                for i in (0, 2):
                    self.registers.append(emit.convert_e4m3x4(p[i], p[i + 1], p[i + 4], p[i + 5]))
            else:
                self.registers += [emit.convert_bf16x2(p[i], p[i + 1]) for i in (0, 2, 4, 6)]

        def results(self) -> list[Any]:
            return [*self.registers, *(x for (x,) in self.sums)]

    @plgpu.inline_mgpu(
        arg_types=(s_file, row_file, row_file, scalar), return_type=(row_type, row_type)
    )
    def raise_reference(ctx: Any, s: Any, reference: Any, alpha: Any, scale: Any) -> Any:
        """The reference, not below this block's maxima, and the factor that goes with it."""
        scores, old, c = emit.unpack(s), emit.unpack(reference), emit.scalar(scale)
        maxima = RowMaxima()
        maxima.add(scores, 0, ns)
        pairs = zip(old, maxima.result(), strict=True)
        new = [emit.maximum(a, b) for a, b in pairs]
        factors = [rescale_factor(a, b, c) for a, b in zip(old, new, strict=True)]
        pairs = zip(emit.unpack(alpha), factors, strict=True)
        return emit.pack(new), emit.pack([emit.mul(a, b) for a, b in pairs])

    def with_product(o: Any, factors: list[Any], product: Any) -> list[Any]:
        """The output with a block's product.

        Hopper's FP8 matrix unit adds to its accumulator with a few bits less than float32, always
        towards zero: with V of nonzero mean a sum over 65,536 keys came out 44 % short. So for FP8
        each block's product starts from zero and is added here, which costs what the rescaling of
        the output would.
        """
        pairs = enumerate(zip(emit.unpack(o), emit.unpack(product), strict=True))
        return [emit.fma(x, factors[row_half(i)], y) for i, (x, y) in pairs]

    block_types: dict[str, Any] = dict(
        arg_types=(s_file, row_file, row_file, row_file, o_file, o_file, row_file, scalar),
        return_type=(p_type, row_type, o_type, row_type, row_type, row_type),
    )

    @plgpu.inline_mgpu(**block_types)
    def finish_exact(
        ctx: Any,
        s: Any,
        reference: Any,
        alpha: Any,
        l: Any,
        o: Any,
        product: Any,
        last_alpha: Any,
        scale: Any,
    ) -> Any:
        """The softmax of a block's scores, none of them above the reference.

        Args:
          s: scores.
          reference: of each row, for this block.
          alpha: what turns sums made with the last block's reference into sums with this one's.
          l: row sums up to the last block.
          o: the output up to the block before the last.
          product: of the last block; for bfloat16 with the output before it.
          last_alpha: the last block's alpha.
          scale: what turns a score into a base-2 exponent.

        Returns:
          P; row sums; the output up to the last block (for bfloat16 in terms of this block's
          reference); this block's alpha; the next block's reference and alpha.
        """
        factors, c = emit.unpack(alpha), emit.scalar(scale)
        p = Probabilities(emit.unpack(reference), c)
        for group in range(ns // 8):
            p.add(emit.unpack(s), 8 * group)
        if fp8:
            output = with_product(o, emit.unpack(last_alpha), product)
        else:
            output = [emit.mul(x, factors[row_half(i)]) for i, x in enumerate(emit.unpack(product))]
        sums = zip(emit.unpack(l), factors, p.sums, strict=True)
        files = p.registers, [emit.fma(x, y, z) for x, y, (z,) in sums], output
        return *map(emit.pack, files), alpha, reference, emit.pack([emit.f32(1.0)] * 2)

    @plgpu.inline_mgpu(**block_types)
    def finish_ahead(
        ctx: Any,
        s: Any,
        reference: Any,
        alpha: Any,
        l: Any,
        o: Any,
        product: Any,
        last_alpha: Any,
        scale: Any,
    ) -> Any:
        """As finish_exact, with the maxima found beside the exponentials.

        Where a score turns out to be too far above its row's reference, the warp does the block
        again with a reference that is not below it.
        """
        scores, old, c = emit.unpack(s), emit.unpack(reference), emit.scalar(scale)
        old_alpha = emit.unpack(alpha)
        maxima, p = RowMaxima(), Probabilities(old, c)
        groups = ns // 8
        # Emitted in the order in which the instructions should issue.
        for group in range(groups):
            p.add(scores, 8 * group)
            if group < groups // 2:
                maxima.add(scores, 16 * group, 16 * group + 16)
        tops = maxima.result()
        output = with_product(o, emit.unpack(last_alpha), product)

        above = [emit.mul(emit.sub(a, b), c) for a, b in zip(tops, old, strict=True)]
        late = [arith.cmpf(arith.CmpFPredicate.OGT, x, emit.f32(_HEADROOM)) for x in above]

        def again() -> list[Any]:
            raised = [emit.maximum(a, b) for a, b in zip(old, tops, strict=True)]
            p = Probabilities(raised, c)
            for group in range(groups):
                p.add(scores, 8 * group)
            factors = [rescale_factor(a, b, c) for a, b in zip(old, raised, strict=True)]
            pairs = zip(old_alpha, factors, strict=True)
            return [*p.results(), *(emit.mul(a, b) for a, b in pairs), *raised]

        done = emit.where_any(late, [*p.results(), *old_alpha, *old], again)
        registers, block_sums = done[:np_], done[np_ : np_ + 2]
        used_alpha, used = done[np_ + 2 : np_ + 4], done[np_ + 4 :]
        triples = zip(emit.unpack(l), used_alpha, block_sums, strict=True)
        sums = [emit.fma(x, y, z) for x, y, z in triples]
        following = [emit.maximum(a, b) for a, b in zip(used, tops, strict=True)]
        next_alpha = [rescale_factor(a, b, c) for a, b in zip(used, following, strict=True)]
        return tuple(map(emit.pack, (registers, sums, output, used_alpha, following, next_alpha)))

    @plgpu.inline_mgpu(
        arg_types=(qk_ref, qk_ref, v_ref_type, o_file, p_file), return_type=(s_type, o_type)
    )
    def issue(ctx: Any, q_smem: Any, k_smem: Any, v_smem: Any, o: Any, p: Any) -> Any:
        """The scores of a block, and the product of P and V of the block before.

        For bfloat16 the output is added to that product.
        """
        output, fragments = None if fp8 else emit.unpack(o), emit.unpack(p)
        emit.wgmma_fence()
        scores = emit.pack(issue_scores(q_smem, k_smem))
        return scores, emit.pack(issue_output(output, fragments, v_smem))

    @plgpu.inline_mgpu(arg_types=(s_file,), return_type=s_type)
    def wait_scores(ctx: Any, s: Any) -> Any:
        return emit.pack(emit.wgmma_wait(1, emit.unpack(s)))

    @plgpu.inline_mgpu(arg_types=(s_file, o_file, p_file), return_type=(s_type, o_type))
    def wait_products(ctx: Any, s: Any, product: Any, p: Any) -> Any:
        done = emit.wgmma_wait(0, [*emit.unpack(s), *emit.unpack(product)], keep=emit.unpack(p))
        return emit.pack(done[:ns]), emit.pack(done[ns:])

    @plgpu.inline_mgpu(
        arg_types=(v_ref_type, o_file, row_file, row_file, row_file, p_file),
        return_type=(o_type, row_type),
    )
    def last_output(
        ctx: Any, v_smem: Any, o: Any, l: Any, alpha: Any, next_alpha: Any, p: Any
    ) -> Any:
        """Output and row sums with the last block's, in terms of the next reference."""
        output, sums, fragments = emit.unpack(o), emit.unpack(l), emit.unpack(p)
        factor, final = emit.unpack(alpha), emit.unpack(next_alpha)
        emit.wgmma_fence()
        product = issue_output(None if fp8 else output, fragments, v_smem)
        product = emit.wgmma_wait(0, product, keep=fragments)
        if fp8:
            product = with_product(o, factor, emit.pack(product))
        product = [emit.mul(x, final[row_half(i)]) for i, x in enumerate(product)]
        sums = [emit.mul(x, y) for x, y in zip(sums, final, strict=True)]
        return emit.pack(product), emit.pack(sums)

    @plgpu.inline_mgpu(
        arg_types=(
            gmem_ref,
            gmem_ref,
            gmem_ref,
            o_file,
            row_file,
            row_file,
            row_file,
            scalar,
            scalar,
            scalar,
            scalar,
            scalar,
        )
    )
    def epilogue(
        ctx: Any,
        out_gmem: Any,  # [Tq, Dv] of this head, strided
        lse_gmem: Any,  # [Tq]
        nan_gmem: Any,  # [Dv]
        o: Any,
        m: Any,
        l: Any,
        limits: Any,
        scale: Any,
        v_descale: Any,
        first_row: Any,
        skip: Any,
        rows: Any,
    ) -> None:
        """Normalise and store rows skip : rows."""
        output, maxima, limit = emit.unpack(o), emit.unpack(m), emit.unpack(limits)
        sums = [emit.across_quad(emit.add, x) for x in emit.unpack(l)]
        column = emit.fragment_column()
        nan_address = emit.offset_address(emit.global_address(nan_gmem), column, 4)
        nan_keys: list[Any] = []
        for group in range(dv // 8):
            address = arith.addi(nan_address, emit.i64(32 * group))
            nan_keys += emit.load_global(address, [emit.i32_type()] * 2)
        out_address, lse_address = emit.global_address(out_gmem), emit.global_address(lse_gmem)
        leader = arith.cmpi(arith.CmpIPredicate.eq, column, emit.i32(0))
        for half in range(2):
            row = emit.iadd(emit.fragment_row(), 8 * half)
            exists = arith.andi(
                emit.less(row, emit.scalar(rows)), emit.less(emit.scalar(skip), emit.iadd(row, 1))
            )
            token = emit.iadd(row, emit.scalar(first_row))
            empty = arith.cmpf(arith.CmpFPredicate.OEQ, sums[half], emit.f32(0.0))
            inverse = emit.mul(emit.reciprocal(sums[half]), emit.scalar(v_descale))
            inverse = arith.select(empty, emit.f32(0.0), inverse)
            lse = emit.fma(maxima[half], emit.scalar(scale), emit.f32(-_P_SHIFT))
            lse = emit.mul(emit.add(emit.log2(sums[half]), lse), emit.f32(1 / LOG2_E))
            emit.store_global(
                emit.offset_address(lse_address, token, 4), [lse], arith.andi(exists, leader)
            )
            token64 = arith.extui(emit.i64_type(), token)
            element = arith.addi(
                arith.muli(token64, emit.i64(num_heads * dv)),
                arith.extui(emit.i64_type(), column),
            )
            for group in range(dv // 8):
                pair = []
                for e in range(2):
                    value = emit.mul(output[4 * group + 2 * half + e], inverse)
                    sees_nan = emit.less(nan_keys[2 * group + e], limit[half])
                    pair.append(arith.select(sees_nan, emit.f32(math.nan), value))
                if parts == 1:
                    registers, size = [emit.convert_bf16x2(*pair)], 2
                else:
                    registers, size = pair, 4
                address = emit.offset_address(out_address, element, size)
                address = arith.addi(address, emit.i64(8 * group * size))
                emit.store_global(address, registers, exists)

    @plgpu.inline_mgpu()
    def warpgroup_barrier(ctx: Any) -> None:
        utils.warpgroup_barrier()

    def turn(kind: str, ahead: int) -> None:
        """Consumers issue in turn: barrier 8 + i is consumer i's (0 to 4 are Mosaic's)."""

        @plgpu.inline_mgpu()
        def barrier(ctx: Any) -> None:
            index = arith.remui(
                emit.iadd(utils.warpgroup_idx(sync=False), ahead), emit.i32(consumers)
            )
            emit.asm([], [emit.iadd(index, 8)], f"bar.{kind} $0, 256;", "r", True)

        barrier()

    def kernel(
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        nan_ref: Any,
        task_ref: Any,
        scale_ref: Any,
        out_ref: Any,
        lse_ref: Any,
        q_smem: Any,
        k_smem: Any,
        v_smem: Any,
        q_full: Any,
        k_full: Any,
        v_full: Any,
        k_empty: Any,
        v_empty: Any,
    ) -> None:
        this_block, wg = lax.axis_index("block"), lax.axis_index("wg")
        num_tasks = task_ref[max_tasks, 0]
        total = num_tasks * num_heads
        rounds = lax.div(total + num_blocks - 1, jnp.int32(num_blocks))

        def next_slot(slot: Any) -> Any:
            return jnp.where(slot == stages - 1, 0, slot + 1)

        def find(i: Any) -> tuple[Any, Any, Any]:
            """(task, head, whether it exists) of this block's i-th turn.

            Odd rounds run backwards, so that no block gets the longest task of every round.
            """
            place = jnp.where(
                lax.rem(i, jnp.int32(2)) == 0, this_block, num_blocks - 1 - this_block
            )
            index = i * num_blocks + place
            exists = index < total
            index = jnp.minimum(index, total - 1)
            if head_major:
                return lax.rem(index, num_tasks), lax.div(index, num_tasks), exists
            return (
                lax.div(index, jnp.int32(num_heads)),
                lax.rem(index, jnp.int32(num_heads)),
                exists,
            )

        @pl.when(wg < consumers)
        def _consumer() -> None:
            plgpu.set_max_registers(config.registers[0], action="increase")
            qs = q_smem.at[wg]
            for i in range(stages):
                plgpu.barrier_arrive(k_empty.at[i])
                plgpu.barrier_arrive(v_empty.at[i])

            def load_query(i: Any) -> None:
                task, head, exists = find(i)

                @pl.when(exists & (task_ref[task, BLOCKS] > 0))
                def _() -> None:
                    first = pl.multiple_of(task_ref[task, Q_ROW], Q_ALIGNMENT)
                    rows = pl.ds(first + wg * 64, 64)
                    plgpu.copy_gmem_to_smem(q_ref.at[head, rows], qs, q_full.at[wg])

            load_query(jnp.int32(0))
            pl.when(wg == consumers - 1)(lambda: turn("arrive", 1))  # consumer 0 begins

            def run_task(i: Any, last_slot: Any) -> Any:
                """Run the i-th task; returns the slot of its last block."""
                task, head, exists = find(i)
                blocks = jnp.where(exists, task_ref[task, BLOCKS], 0)
                rows = jnp.where(exists, task_ref[task, ROWS], 0) - wg * 64
                scale, v_descale = scale_ref[head, 0], scale_ref[head, 1]
                first_limit = task_ref[task, ROW_LIMIT] + (wg * 64 if causal else 0)
                keys = task_ref[task, KEYS]
                limits = row_limits(first_limit, keys)
                first_block = task_ref[task, FIRST_BLOCK]
                last_block = first_block + blocks - 1
                # Blocks that every row of this warpgroup sees whole need no mask.
                whole = lax.div(jnp.clip(first_limit, 0, keys), jnp.int32(block)) - first_block
                masked = jnp.clip(blocks - jnp.maximum(whole, 0), 1, blocks)

                def store(o: Any, m: Any, l: Any) -> None:
                    part = task_ref[task, PART]
                    out_at = out_ref.at[part] if parts > 1 else out_ref
                    lse_at = lse_ref.at[part] if parts > 1 else lse_ref

                    @pl.when(rows > 0)
                    def _() -> None:
                        epilogue(
                            out_at.at[:, head],
                            lse_at.at[head],
                            nan_ref.at[task_ref[task, SEQUENCE], head],
                            o,
                            m,
                            l,
                            limits,
                            scale,
                            v_descale,
                            task_ref[task, Q_ROW] + wg * 64,
                            task_ref[task, SKIP] - wg * 64,
                            rows,
                        )

                def await_loads(t: Any, slot: Any) -> None:
                    """Wait for what is issued after block t, while its scores are made."""
                    plgpu.barrier_wait(v_full.at[slot])

                    @pl.when(t + 1 < blocks)
                    def _() -> None:
                        plgpu.barrier_wait(k_full.at[next_slot(slot)])

                def some_keys(last_slot: Any) -> Any:
                    o, l, reference, alpha, p = initial_state()
                    plgpu.barrier_wait(q_full.at[wg])
                    slot = next_slot(last_slot)
                    plgpu.barrier_wait(k_full.at[slot])
                    s = first_scores(qs, k_smem.at[slot])
                    plgpu.barrier_arrive(k_empty.at[slot])
                    await_loads(0, slot)
                    s = mask(s, limits, last_block * block)
                    reference, alpha = raise_reference(s, reference, alpha, scale)
                    p, l, o, alpha, reference, next_alpha = finish_exact(
                        s, reference, alpha, l, o, o, alpha, scale
                    )

                    def step(t: Any, carry: Any, with_mask: bool) -> Any:
                        o, l, alpha, p, reference, next_alpha, v_slot = carry
                        k_slot = next_slot(v_slot)
                        turn("sync", 0)
                        s, product = issue(qs, k_smem.at[k_slot], v_smem.at[v_slot], o, p)
                        turn("arrive", 1)
                        await_loads(t, k_slot)
                        ahead = fp8 and not with_mask
                        if not ahead:
                            s = wait_scores(s)
                            plgpu.barrier_arrive(k_empty.at[k_slot])
                            if with_mask:
                                s = mask(s, limits, (last_block - t) * block)
                            reference, next_alpha = raise_reference(s, reference, next_alpha, scale)
                        s, product = wait_products(s, product, p)
                        if ahead:
                            plgpu.barrier_arrive(k_empty.at[k_slot])
                        plgpu.barrier_arrive(v_empty.at[v_slot])
                        finish = finish_ahead if ahead else finish_exact
                        p, l, o, alpha, reference, next_alpha = finish(
                            s, reference, next_alpha, l, o, product, alpha, scale
                        )
                        return o, l, alpha, p, reference, next_alpha, k_slot

                    carry = o, l, alpha, p, reference, next_alpha, slot
                    carry = lax.fori_loop(1, masked, functools.partial(step, with_mask=True), carry)
                    carry = lax.fori_loop(
                        masked, blocks, functools.partial(step, with_mask=False), carry
                    )
                    o, l, alpha, p, reference, next_alpha, slot = carry
                    warpgroup_barrier()  # every warp is done with Q
                    load_query(i + 1)
                    o, l = last_output(v_smem.at[slot], o, l, alpha, next_alpha, p)
                    plgpu.barrier_arrive(v_empty.at[slot])
                    store(o, reference, l)
                    return slot

                def no_keys(last_slot: Any) -> Any:
                    o, l, reference, _, _ = initial_state()
                    store(o, reference, l)
                    load_query(i + 1)
                    return last_slot

                return lax.cond(blocks > 0, some_keys, no_keys, last_slot)

            lax.fori_loop(0, rounds, run_task, jnp.int32(stages - 1))
            pl.when(wg == 0)(lambda: turn("sync", 0))  # drains the last arrive

        @pl.when(wg == consumers)
        def _producer() -> None:
            plgpu.set_max_registers(config.registers[1], action="decrease")

            def run_task(i: Any, last_slot: Any) -> Any:
                task, head, exists = find(i)
                blocks = jnp.where(exists, task_ref[task, BLOCKS], 0)
                kv_row, first_block = task_ref[task, KV_ROW], task_ref[task, FIRST_BLOCK]
                head_granule = head * granules_per_head

                def load(t: Any, last_slot: Any) -> Any:
                    slot = next_slot(last_slot)
                    row = kv_row + (first_block + blocks - 1 - t) * block
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

                return lax.fori_loop(0, blocks, load, last_slot)

            lax.fori_loop(0, rounds, run_task, jnp.int32(stages - 1))

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
            plgpu.Barrier(num_barriers=consumers),
            ring(),
            ring(),
            ring(num_arrivals=consumers),
            ring(num_arrivals=consumers),
        ],
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
    out, lse = run(q, k, v, first_nan, tasks, scales)
    return out, lse
