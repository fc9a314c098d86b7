# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""What a consumer warpgroup of the Hopper attention kernel does between two barriers.

Each function here is a piece of straight-line code on register files (pallas_mosaic_gpu_emit.py),
called from the kernel body (pallas_mosaic_gpu_kernel.py), whose docstring has the whole picture.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from jaxfp8.ops.attention import pallas_mosaic_gpu_emit as emit

LOG2_E = math.log2(math.e)

# Initial row maximum, in units of the scores: finite, so that a row whose keys are all masked
# gives exp2(-inf) = 0 and not NaN, and below any score of FP8 operands.
_LOWEST = -1e30

# P is stored as exp2(score - reference + 5). The reference is the row's maximum over the blocks
# before, so that the exponentials need not wait for this block's; where a score is more than 3
# above it, the block is done again with a new reference. So P is 256 at most, within e4m3's 448,
# and nothing clips. The same factors are in the sum, so the quotient does not change.
_P_SHIFT = 5.0
_HEADROOM = 3.0


_Code = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class ConsumerCode:
    """The pieces; each is documented where it is written."""

    initial_state: _Code
    row_limits: _Code
    first_scores: _Code
    mask: _Code
    raise_reference: _Code
    finish_exact: _Code
    finish_ahead: _Code
    start_scores: _Code
    start_output: _Code
    start_both: _Code
    wait_scores: _Code
    wait_products: _Code
    last_output: _Code
    epilogue: _Code
    warpgroup_barrier: _Code
    take_number: _Code
    await_turn: _Code
    give_turn: _Code


def consumer_code(
    *,
    fp8: bool,
    block: int,
    dv: int,
    num_heads: int,
    causal: bool,
    parts: int,
    qk_ref: plgpu.RefType,
    v_ref: plgpu.RefType,
) -> ConsumerCode:
    """The code for one kernel.

    Args:
      fp8: e4m3 operands, else bfloat16.
      block: keys a block.
      dv: head dim of V.
      num_heads: H.
      causal: whether a tile's rows see one key more each.
      parts: 1 for bfloat16 output, more for float32.
      qk_ref: how Q and K lie in shared memory.
      v_ref: how V lies there.
    """
    mma = "e4m3" if fp8 else "bf16"
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
            if fp8:
                return emit.across_quad_pair(emit.maximum, *tops)
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
        output, products, old = emit.unpack(o), emit.unpack(product), emit.unpack(last_alpha)
        groups = ns // 8
        each = -(-no // groups)
        # Emitted in the order in which the instructions should issue.
        for group in range(groups):
            p.add(emit.unpack(s), 8 * group)
            for i in range(each * group, min(no, each * (group + 1))):
                if fp8:
                    output[i] = emit.fma(output[i], old[row_half(i)], products[i])
                else:
                    output[i] = emit.mul(products[i], factors[row_half(i)])
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
        early = groups // 2
        for group in range(early):
            p.add(scores, 8 * group)
            maxima.add(scores, 16 * group, 16 * group + 16)
        maxima.add(scores, 16 * early, ns)
        tops = maxima.result()
        for group in range(early, groups):
            p.add(scores, 8 * group)
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

    @plgpu.inline_mgpu(arg_types=(qk_ref, qk_ref), return_type=s_type)
    def start_scores(ctx: Any, q_smem: Any, k_smem: Any) -> Any:
        emit.wgmma_fence()
        return emit.pack(issue_scores(q_smem, k_smem))

    @plgpu.inline_mgpu(arg_types=(v_ref, o_file, p_file), return_type=o_type)
    def start_output(ctx: Any, v_smem: Any, o: Any, p: Any) -> Any:
        """The product of a block's P and V, for bfloat16 added to the output before it."""
        output, fragments = None if fp8 else emit.unpack(o), emit.unpack(p)
        emit.wgmma_fence()
        return emit.pack(issue_output(output, fragments, v_smem))

    @plgpu.inline_mgpu(
        arg_types=(qk_ref, qk_ref, v_ref, o_file, p_file), return_type=(s_type, o_type)
    )
    def start_both(ctx: Any, q_smem: Any, k_smem: Any, v_smem: Any, o: Any, p: Any) -> Any:
        """start_output for a block, then start_scores for the next."""
        output, fragments = None if fp8 else emit.unpack(o), emit.unpack(p)
        emit.wgmma_fence()
        product = emit.pack(issue_output(output, fragments, v_smem))
        return emit.pack(issue_scores(q_smem, k_smem)), product

    @plgpu.inline_mgpu(arg_types=(s_file,), return_type=s_type)
    def wait_scores(ctx: Any, s: Any) -> Any:
        return emit.pack(emit.wgmma_wait(1, emit.unpack(s)))

    @plgpu.inline_mgpu(arg_types=(s_file, o_file, p_file), return_type=(s_type, o_type))
    def wait_products(ctx: Any, s: Any, product: Any, p: Any) -> Any:
        done = emit.wgmma_wait(0, [*emit.unpack(s), *emit.unpack(product)], keep=emit.unpack(p))
        return emit.pack(done[:ns]), emit.pack(done[ns:])

    @plgpu.inline_mgpu(
        arg_types=(v_ref, o_file, row_file, row_file, row_file, p_file),
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
        nan_key: Any,
    ) -> None:
        """Normalise and store rows skip : rows; nan_key is the least of nan_gmem."""
        output, maxima, limit = emit.unpack(o), emit.unpack(m), emit.unpack(limits)
        sums = [emit.across_quad(emit.add, x) for x in emit.unpack(l)]
        column = emit.fragment_column()
        empty = [arith.cmpf(arith.CmpFPredicate.OEQ, x, emit.f32(0.0)) for x in sums]
        inverses = [emit.mul(emit.reciprocal(x), emit.scalar(v_descale)) for x in sums]
        zero = emit.f32(0.0)
        inverses = [arith.select(x, zero, y) for x, y in zip(empty, inverses, strict=True)]
        output = [emit.mul(x, inverses[row_half(i)]) for i, x in enumerate(output)]

        def with_nan() -> list[Any]:
            """NaN in the columns that have one among the keys that the row sees."""
            nan_address = emit.offset_address(emit.global_address(nan_gmem), column, 4)
            values = []
            for group in range(dv // 8):
                address = arith.addi(nan_address, emit.i64(32 * group))
                keys = emit.load_global(address, [emit.i32_type()] * 2)
                for i in range(4 * group, 4 * group + 4):
                    sees_nan = emit.less(keys[i % 2], limit[row_half(i)])
                    values.append(arith.select(sees_nan, emit.f32(math.nan), output[i]))
            return values

        seen = [emit.less(emit.scalar(nan_key), x) for x in limit]
        output = emit.where_any(seen, output, with_nan)
        out_address, lse_address = emit.global_address(out_gmem), emit.global_address(lse_gmem)
        leader = arith.cmpi(arith.CmpIPredicate.eq, column, emit.i32(0))
        for half in range(2):
            row = emit.iadd(emit.fragment_row(), 8 * half)
            exists = arith.andi(
                emit.less(row, emit.scalar(rows)), emit.less(emit.scalar(skip), emit.iadd(row, 1))
            )
            token = emit.iadd(row, emit.scalar(first_row))
            lse = emit.fma(maxima[half], emit.scalar(scale), emit.f32(-_P_SHIFT))
            lse = emit.mul(emit.add(emit.log2(sums[half]), lse), emit.f32(1 / LOG2_E))
            emit.store_global(
                emit.offset_address(lse_address, token, 4), [lse], arith.andi(exists, leader)
            )
            token64 = arith.extui(emit.i64_type(), token)
            element = arith.muli(token64, emit.i64(num_heads * dv))
            pairs = [output[i : i + 2] for i in range(2 * half, no, 4)]  # one of each 8 columns
            if parts == 1:
                # Sixteen bytes a thread, in place of four, fill the sectors of memory.
                element = arith.addi(element, arith.extui(emit.i64_type(), emit.imul(column, 4)))
                address = emit.offset_address(out_address, element, 2)
                words = [emit.convert_bf16x2(*pair) for pair in pairs]
                for i in range(0, len(words), 4):
                    at = arith.addi(address, emit.i64(16 * i))
                    emit.store_global(at, emit.quad_transpose(words[i : i + 4]), exists)
            else:
                element = arith.addi(element, arith.extui(emit.i64_type(), column))
                address = emit.offset_address(out_address, element, 4)
                for i, pair in enumerate(pairs):
                    emit.store_global(arith.addi(address, emit.i64(32 * i)), pair, exists)

    @plgpu.inline_mgpu()
    def warpgroup_barrier(ctx: Any) -> None:
        utils.warpgroup_barrier()

    @plgpu.inline_mgpu(arg_types=(gmem_ref, gmem_ref))
    def take_number(ctx: Any, counter: Any, box: Any) -> None:
        """The next number of a counter in global memory, into a box in shared memory."""
        first = arith.cmpi(arith.CmpIPredicate.eq, emit.thread_in_warpgroup(), emit.i32(0))
        with utils.when(first):
            number = emit.atomic_add_global(emit.global_address(counter), emit.i32(1))
            memref.store(number, box, [arith.constant(ir.IndexType.get(), 0)])
        utils.warpgroup_barrier()

    # Consumers issue in turn: barrier 8 + i is consumer i's (0 to 4 are Mosaic's).

    @plgpu.inline_mgpu(arg_types=(scalar,))
    def await_turn(ctx: Any, wg: Any) -> None:
        """Wait until a consumer, this one, is given its turn."""
        emit.asm([], [emit.iadd(emit.scalar(wg), 8)], "bar.sync $0, 256;", "r", True)

    @plgpu.inline_mgpu(arg_types=(scalar,))
    def give_turn(ctx: Any, wg: Any) -> None:
        """Give a consumer its turn."""
        emit.asm([], [emit.iadd(emit.scalar(wg), 8)], "bar.arrive $0, 256;", "r", True)

    return ConsumerCode(
        initial_state=initial_state,
        row_limits=row_limits,
        first_scores=first_scores,
        mask=mask,
        raise_reference=raise_reference,
        finish_exact=finish_exact,
        finish_ahead=finish_ahead,
        start_scores=start_scores,
        start_output=start_output,
        start_both=start_both,
        wait_scores=wait_scores,
        wait_products=wait_products,
        last_output=last_output,
        epilogue=epilogue,
        warpgroup_barrier=warpgroup_barrier,
        take_number=take_number,
        await_turn=await_turn,
        give_turn=give_turn,
    )
