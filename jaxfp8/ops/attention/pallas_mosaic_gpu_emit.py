# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Per-thread code for the Hopper kernels: PTX instructions, register files, WGMMA.

The Hopper kernels keep scores, probabilities and accumulators in registers in the layouts of the
matrix instructions, which Pallas has no arrays for. Here a thread's registers are Python lists of
MLIR values, the code between two Pallas operations is emitted with the functions below, and the
lists travel through Pallas (loop carries, arguments of `inline_mgpu`) as *register files*: 1-D
arrays of 128 * n elements in the WG_STRIDED layout, which is n registers in each of the 128
threads of a warpgroup.

Names of instructions and operand layouts are those of NVIDIA's PTX ISA manual.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

Value = Any
"""An MLIR value (ir.Value); the MLIR bindings are not typed."""

WARPGROUP = 128


# Types, constants, integer arithmetic.


def f32_type() -> Any:
    """The MLIR type f32."""
    return ir.F32Type.get()


def i32_type() -> Any:
    """The MLIR type i32."""
    return ir.IntegerType.get_signless(32)


def i64_type() -> Any:
    """The MLIR type i64."""
    return ir.IntegerType.get_signless(64)


def f32(x: float) -> Value:
    """A float32 constant."""
    return arith.constant(f32_type(), ir.FloatAttr.get(f32_type(), float(x)))


def i32(x: int) -> Value:
    """A 32-bit constant; values from 2**31 on are taken as bit patterns."""
    return arith.constant(
        i32_type(), ir.IntegerAttr.get(i32_type(), x - 2**32 if x >= 2**31 else x)
    )


def i64(x: int) -> Value:
    """A 64-bit constant."""
    return arith.constant(i64_type(), ir.IntegerAttr.get(i64_type(), x))


def iadd(a: Value, b: Value | int) -> Value:
    """Integer sum."""
    return arith.addi(a, i32(b) if isinstance(b, int) else b)


def isub(a: Value, b: Value | int) -> Value:
    """Integer difference."""
    return arith.subi(a, i32(b) if isinstance(b, int) else b)


def imul(a: Value, b: Value | int) -> Value:
    """Integer product."""
    return arith.muli(a, i32(b) if isinstance(b, int) else b)


def less(a: Value, b: Value | int) -> Value:
    """Signed a < b as i1."""
    return arith.cmpi(arith.CmpIPredicate.slt, a, i32(b) if isinstance(b, int) else b)


def as_f32(x: Value) -> Value:
    """The bits of an i32 as f32."""
    return arith.bitcast(f32_type(), x)


def thread_in_warpgroup() -> Value:
    """0..127."""
    return arith.remui(utils.thread_idx(), i32(WARPGROUP))


def fragment_row() -> Value:
    """The first of the two rows (of 64) that this thread holds in a WGMMA accumulator.

    The second is 8 below it.
    """
    tid = thread_in_warpgroup()
    warp = arith.divui(tid, i32(32))
    lane = arith.remui(tid, i32(32))
    return iadd(imul(warp, 16), arith.divui(lane, i32(4)))


def fragment_column() -> Value:
    """The first of the two columns (of every 8) this thread holds in a WGMMA accumulator."""
    return imul(arith.remui(utils.thread_idx(), i32(4)), 2)


# Instructions.


def asm(
    types: Sequence[Any], args: Sequence[Value], text: str, constraints: str, effects: bool = False
) -> list[Value]:
    """Inline PTX with `len(types)` results."""
    if not types:
        result_type = ir.Type.parse("!llvm.void")
    elif len(types) == 1:
        result_type = types[0]
    else:
        result_type = llvm.StructType.get_literal(list(types))
    result = llvm.inline_asm(
        result_type, list(args), text, constraints, asm_dialect=0, has_side_effects=effects
    )
    if not types:
        return []
    if len(types) == 1:
        return [result]
    return [llvm.extractvalue(t, result, [i]) for i, t in enumerate(types)]


def _instruction(name: str, *args: Value, register: str = "f") -> Value:
    operands = ", ".join(f"${i + 1}" for i in range(len(args)))
    constraints = ",".join([f"={register}"] + [register] * len(args))
    return asm([args[0].type], args, f"{name} $0, {operands};", constraints)[0]


exp2 = functools.partial(_instruction, "ex2.approx.ftz.f32")
log2 = functools.partial(_instruction, "lg2.approx.f32")
reciprocal = functools.partial(_instruction, "rcp.approx.f32")
fma = functools.partial(_instruction, "fma.rn.ftz.f32")
add = functools.partial(_instruction, "add.rn.ftz.f32")
sub = functools.partial(_instruction, "sub.rn.ftz.f32")
mul = functools.partial(_instruction, "mul.rn.ftz.f32")
maximum = functools.partial(_instruction, "max.ftz.f32")
# These give NaN where an operand is NaN.
max_nan = functools.partial(_instruction, "max.NaN.f32")
min_nan = functools.partial(_instruction, "min.NaN.f32")


def tree(op: Callable[[Value, Value], Value], values: Sequence[Value]) -> Value:
    """Reduce pairwise."""
    acc = list(values)
    while len(acc) > 1:
        acc = [op(*acc[i : i + 2]) if i + 1 < len(acc) else acc[i] for i in range(0, len(acc), 2)]
    return acc[0]


def across_quad(op: Callable[[Value, Value], Value], value: Value) -> Value:
    """Reduce over the four threads that share the rows of an accumulator."""
    for distance in (1, 2):
        value = op(value, utils.shfl_bfly(value, distance))
    return value


def across_quad_pair(
    op: Callable[[Value, Value], Value], first: Value, second: Value
) -> list[Value]:
    """across_quad of two values with three shuffles, which halve what each of them carries."""
    odd = arith.trunci(ir.IntegerType.get_signless(1), arith.andi(utils.thread_idx(), i32(1)))
    mine, other = arith.select(odd, second, first), arith.select(odd, first, second)
    mine = op(mine, utils.shfl_bfly(other, 1))
    mine = op(mine, utils.shfl_bfly(mine, 2))
    other = utils.shfl_bfly(mine, 1)
    return [arith.select(odd, other, mine), arith.select(odd, mine, other)]


def quad_transpose(values: Sequence[Value]) -> list[Value]:
    """Four registers in each of four neighbouring threads, transposed.

    Register i of thread t goes to register t of thread i.
    """
    values = list(values)
    for distance in (1, 2):
        bit = arith.andi(arith.divui(utils.thread_idx(), i32(distance)), i32(1))
        upper = arith.trunci(ir.IntegerType.get_signless(1), bit)
        for i in range(4):
            j = i + distance
            if i & distance:
                continue
            # The upper thread of a pair gives its register i for the lower one's j.
            given = arith.select(upper, values[i], values[j])
            taken = utils.shfl_bfly(given, distance)
            values[i] = arith.select(upper, taken, values[i])
            values[j] = arith.select(upper, values[j], taken)
    return values


def where_any(
    flags: Sequence[Value], values: list[Value], update: Callable[[], list[Value]]
) -> list[Value]:
    """update() in the warps where one of the i1 flags is set in some thread, else `values`."""
    flag = functools.reduce(arith.ori, flags)
    text = (
        "{.reg .pred p, q; setp.ne.b32 p, $1, 0; vote.sync.any.pred q, p, -1; "
        "selp.b32 $0, 1, 0, q;}"
    )
    voted = asm([i32_type()], [arith.extui(i32_type(), flag)], text, "=r,r", True)[0]
    voted = arith.cmpi(arith.CmpIPredicate.ne, voted, i32(0))
    branch = scf.IfOp(voted, [v.type for v in values], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.yield_(update())
    with ir.InsertionPoint(branch.else_block):
        scf.yield_(values)
    return list(branch.results)


def convert_e4m3x4(a: Value, b: Value, c: Value, d: Value) -> Value:
    """Four float32 as e4m3 in one register, a in the lowest byte; saturates, NaN stays NaN."""
    text = (
        "{.reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; "
        "cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; mov.b32 $0, {lo, hi};}"
    )
    return asm([i32_type()], [a, b, c, d], text, "=r,f,f,f,f")[0]


def unpack_bf16x2(x: Value) -> list[Value]:
    """The two bfloat16 of a register as float32, the lower half first."""
    return [as_f32(arith.shli(x, i32(16))), as_f32(arith.andi(x, i32(0xFFFF0000)))]


def convert_bf16x2(a: Value, b: Value) -> Value:
    """Two float32 as bfloat16 in one register, a in the lower half."""
    return asm([i32_type()], [b, a], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f")[0]


# Memory.


def global_address(ref: Value) -> Value:
    """The address of a reference's first element as i64."""
    return llvm.ptrtoint(i64_type(), utils.memref_ptr(ref))


def offset_address(base: Value, elements: Value, element_bytes: int) -> Value:
    """base + elements * element_bytes in 64 bits; `elements` is a non-negative i32 or an i64."""
    if elements.type == i32_type():
        elements = arith.extui(i64_type(), elements)
    return arith.addi(base, arith.muli(elements, i64(element_bytes)))


def store_global(address: Value, values: Sequence[Value], predicate: Value) -> None:
    """Store 1, 2 or 4 registers of 32 bits to consecutive global addresses where predicate."""
    registers = ["f" if v.type == f32_type() else "r" for v in values]
    width = f".v{len(values)}" if len(values) > 1 else ""
    operands = ", ".join(f"${i + 2}" for i in range(len(values)))
    if len(values) > 1:
        operands = "{" + operands + "}"
    text = f"@$1 st.global{width}.b32 [$0], {operands};"
    text = f"{{.reg .pred p; setp.ne.b32 p, $1, 0; {text.replace('@$1', '@p')}}}"
    flag = arith.extui(i32_type(), predicate)
    asm([], [address, flag, *values], text, ",".join(["l", "r", *registers]), effects=True)


def load_global(address: Value, types: Sequence[Any]) -> list[Value]:
    """Load 1, 2 or 4 registers of 32 bits from consecutive global addresses."""
    n = len(types)
    registers = ["f" if t == f32_type() else "r" for t in types]
    width = f".v{n}" if n > 1 else ""
    operands = ", ".join(f"${i}" for i in range(n))
    if n > 1:
        operands = "{" + operands + "}"
    constraints = ",".join([f"={r}" for r in registers] + ["l"])
    return asm(types, [address], f"ld.global{width}.b32 {operands}, [${n}];", constraints, True)


def atomic_min_global(address: Value, value: Value) -> None:
    """min into an int32 in global memory."""
    asm([], [address, value], "red.global.min.s32 [$0], $1;", "l,r", True)


def atomic_add_global(address: Value, value: Value) -> Value:
    """Add to an int32 in global memory; what it was before."""
    text = "atom.global.add.s32 $0, [$1], $2;"
    return asm([i32_type()], [address, value], text, "=r,l,r", True)[0]


# Register files.


def file_layout(n: int) -> Any:
    """The Pallas layout of a file of n registers per thread."""
    return plgpu.Layout.WG_STRIDED((WARPGROUP * n,), vec_size=1)


def file_type(n: int, dtype: Any = jnp.float32) -> Any:
    """The return type, for `inline_mgpu`, of a file of n registers per thread."""
    return plgpu.ShapeDtypeStruct((WARPGROUP * n,), dtype, layout=file_layout(n))


def scalar_layout() -> Any:
    """The Pallas layout of a scalar argument of `inline_mgpu`."""
    return plgpu.Layout.WG_SPLAT(())


def scalar(array: Any) -> Value:
    """The value of a scalar argument of `inline_mgpu`."""
    return array.registers.item()


def unpack(array: Any) -> list[Value]:
    """A register file's registers."""
    first = ir.DenseI64ArrayAttr.get([0])
    return [
        vector.extract(r, dynamic_position=[], static_position=first) for r in array.registers.flat
    ]


def pack(values: Sequence[Value]) -> Any:
    """Registers as a register file."""
    shape = (WARPGROUP * len(values),)
    registers = np.empty((len(values),), dtype=object)
    for i, value in enumerate(values):
        registers[i] = vector.broadcast(ir.VectorType.get((1,), value.type), value)
    layout = fragmented_array.WGStridedFragLayout(shape, 1)
    return mgpu.FragmentedArray(
        _registers=registers.reshape(layout.registers_shape(shape)),
        _layout=layout,
        _is_signed=None if values[0].type == f32_type() else True,
    )


# WGMMA.


def operand_slices(ref: Value) -> list[Value]:
    """Shared-memory descriptors of the 32-byte slices along K of a K-major operand.

    `ref` is [rows / 8, K / w, 8, w], w elements being the swizzle width: what a [rows, K] array
    becomes under TilingTransform((8, w)) and SwizzleTransform(bytes of w). A leading dimension is
    more of K.
    """
    ref_type = ir.MemRefType(ref.type)
    *leading, row_tiles, k_tiles, _, width = ref_type.shape
    swizzle = width * utils.bitwidth(ref_type.element_type) // 8
    atom = 8 * swizzle
    mode = {128: 1, 64: 2, 32: 3}[swizzle]
    stride = k_tiles * atom
    # Only the lower half differs from slice to slice, so 32-bit arithmetic is enough.
    address = llvm.ptrtoint(i32_type(), utils.memref_ptr(ref))
    low = arith.ori(arith.andi(arith.shrui(address, i32(4)), i32(0x3FFF)), i32(1 << 16))
    high = i64(((stride >> 4) << 32 | mode << 62) - (2**64 if mode >= 2 else 0))
    offsets = [
        outer * row_tiles * stride + tile * atom + start
        for outer in range(math.prod(leading))
        for tile in range(k_tiles)
        for start in range(0, swizzle, 32)
    ]
    return [arith.ori(arith.extui(i64_type(), iadd(low, x >> 4)), high) for x in offsets]


def wgmma_fence() -> None:
    """Order register writes before the WGMMAs that follow."""
    asm([], [], "wgmma.fence.sync.aligned;", "", True)


def wgmma(
    acc: list[Value] | None, a: Value | list[Value], b: Value, n: int, mma: str
) -> list[Value]:
    """One asynchronous m64 x n matrix product over 32 bytes of K, float32 accumulation.

    Args:
      acc: the accumulator's n / 2 registers; None starts from zero.
      a: a descriptor, or the 4 registers of a fragment.
      b: a descriptor.
      n: columns.
      mma: "e4m3" or "bf16".
    """
    count = n // 2
    args = list(acc or [])
    constraints = ["=f"] * count + [str(i) for i in range(len(args))]
    if isinstance(a, list):
        operand = "{" + ",".join(f"${len(constraints) + i}" for i in range(4)) + "}"
        args += a
        constraints += ["r"] * 4
    else:
        operand = f"${len(constraints)}"
        args.append(a)
        constraints.append("l")
    k, transpose = {"e4m3": (32, ""), "bf16": (16, ", 0" if isinstance(a, list) else ", 0, 0")}[mma]
    result = "{" + ",".join(f"${i}" for i in range(count)) + "}"
    text = (
        f"{{ .reg .pred p; setp.ne.b32 p, {int(acc is not None)}, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{mma}.{mma} "
        f"{result}, {operand}, ${len(constraints)}, p, 1, 1{transpose}; }}\n"
    )
    constraints.append("l")
    return asm([f32_type()] * count, [*args, b], text, ",".join(constraints), True)


def wgmma_commit() -> None:
    """Close a group of WGMMAs."""
    asm([], [], "wgmma.commit_group.sync.aligned;", "", True)


def wgmma_wait(pending: int, values: list[Value], keep: Sequence[Value] = ()) -> list[Value]:
    """Wait until at most `pending` groups are in flight.

    `values` pass through the instruction, so that nothing can use them before it; `keep` are
    registers that the WGMMAs still read, which must live until then.
    """
    registers = ["f" if v.type == f32_type() else "r" for v in (*values, *keep)]
    n = len(values)
    constraints = [f"={r}" for r in registers[:n]] + [str(i) for i in range(n)] + registers[n:]
    text = f"wgmma.wait_group.sync.aligned {pending};"
    return asm([v.type for v in values], [*values, *keep], text, ",".join(constraints), True)
