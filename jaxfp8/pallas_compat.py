# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""What the Pallas Triton kernels need and Pallas does not offer, and the one use of jax._src.

The arithmetic functions are JAX primitives with two lowerings: an ordinary one, which serves
interpret mode, and one for Pallas Triton, which emits the operation that the hardware has.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import math as math_dialect
from jax._src.pallas import primitives as pallas_primitives
from jax._src.pallas.triton import lowering as triton_lowering
from jax._src.state import discharge as state_discharge
from jax._src.state import primitives as state_primitives
from jax.experimental.pallas import triton as plgpu
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxfp8.formats import Fp8Format

_tt = triton_lowering.tt_dialect


def exp2(x: jax.Array) -> jax.Array:
    """2**x of float32, as the bare hardware instruction: results below 2**-126 may become 0.

    jnp.exp2 in a kernel calls a library function that also gets denormals right, which alone
    makes the attention loop bound by vector instructions.
    """
    return _exp2_p.bind(x)


def divide(x: jax.Array, y: jax.Array) -> jax.Array:
    """x / y of float32, correctly rounded. On NVIDIA, a plain division in a kernel is not."""
    x, y = jnp.broadcast_arrays(x, y)
    return _divide_p.bind(x, y)


def to_fp8(x: jax.Array, fmt: Fp8Format) -> jax.Array:
    """float32 to FP8, to nearest even; NaN stays NaN. |x| must not pass fmt.max.

    Pallas refuses casts to float8_e4m3fnuz; Triton itself converts, two values an instruction.
    """
    return _to_fp8_p.bind(x, fmt=fmt)


def load(ref: Any, *, mask: jax.Array | None = None, other: jax.Array | None = None) -> jax.Array:
    """plgpu.load of `ref.at[...]`, right for arrays of any size."""
    if not _needs_wide_offsets(ref):
        return plgpu.load(ref, mask=mask, other=other)
    array, transforms = state_primitives.get_ref_and_transforms(ref, None, "load")
    args, args_tree = jax.tree.flatten((array, transforms, mask, other))
    return _wide_load_p.bind(*args, args_tree=args_tree)


def store(ref: Any, value: jax.Array, *, mask: jax.Array | None = None) -> None:
    """plgpu.store to `ref.at[...]`, right for arrays of any size."""
    if not _needs_wide_offsets(ref):
        plgpu.store(ref, value, mask=mask)
        return
    array, transforms = state_primitives.get_ref_and_transforms(ref, None, "store")
    args, args_tree = jax.tree.flatten((array, transforms, value, mask))
    _wide_swap_p.bind(*args, args_tree=args_tree)


def _needs_wide_offsets(ref: Any) -> bool:
    """Whether Pallas would take 32-bit offsets, which Triton reads as signed, and they overflow.

    It takes 64 bits where an array is larger than 2**32 bytes, whatever the size of an element.
    """
    size = math.prod(ref.ref.shape)
    return size > 2**31 and size * ref.dtype.itemsize <= 2**32


def out_type(shape: tuple[int, ...], dtype: Any) -> Any:
    """An element of pallas_call's out_shape."""
    return jax.ShapeDtypeStruct(shape, dtype)


def _primitive(name: str, abstract_eval: Any, implementation: Any) -> Primitive:
    primitive = Primitive(name)
    primitive.def_abstract_eval(abstract_eval)
    primitive.def_impl(implementation)
    mlir.register_lowering(primitive, mlir.lower_fun(implementation, multiple_results=False))
    return primitive


_exp2_p = _primitive("jaxfp8_exp2", lambda x: x, jnp.exp2)
# XLA turns division by a broadcast value into multiplication by its reciprocal, unless the divisor
# depends on the dividend.
_divide_p = _primitive(
    "jaxfp8_divide", lambda x, _: x, lambda x, y: jax.lax.div(x, jnp.where(jnp.isnan(x), x, y))
)
_to_fp8_p = _primitive(
    "jaxfp8_to_fp8",
    lambda x, *, fmt: jax.core.ShapedArray(x.shape, fmt.dtype),
    lambda x, *, fmt: x.astype(fmt.dtype),
)


@triton_lowering.register_lowering(_exp2_p)
def _exp2_to_triton(ctx: Any, x: Any) -> Any:
    del ctx
    return math_dialect.exp2(x)


@triton_lowering.register_lowering(_divide_p)
def _divide_to_triton(ctx: Any, x: Any, y: Any) -> Any:
    del ctx
    return _tt.precise_divf(x, y)


@triton_lowering.register_lowering(_to_fp8_p)
def _to_fp8_to_triton(ctx: Any, x: Any, *, fmt: Fp8Format) -> Any:
    del ctx
    element = {
        "float8_e4m3fnuz": ir.Float8E4M3FNUZType,
        "float8_e4m3fn": ir.Float8E4M3FNType,
    }[fmt.name].get()
    result = ir.RankedTensorType.get(ir.RankedTensorType(x.type).shape, element)
    return _tt.fp_to_fp(result, x, rounding=_tt.RoundingMode.RTNE)


_wide_load_p = Primitive("jaxfp8_wide_load")
_wide_load_p.def_effectful_abstract_eval(pallas_primitives._load_abstract_eval)
state_discharge.register_discharge_rule(_wide_load_p)(pallas_primitives._load_discharge_rule)

_wide_swap_p = Primitive("jaxfp8_wide_swap")
_wide_swap_p.def_effectful_abstract_eval(pallas_primitives._swap_abstract_eval)
state_discharge.register_discharge_rule(_wide_swap_p)(pallas_primitives._swap_discharge_rule)


@triton_lowering.register_lowering(_wide_load_p)
def _wide_load_to_triton(ctx: Any, *args: Any, args_tree: Any) -> Any:
    return triton_lowering._masked_load_lowering_rule(
        _with_wide_offsets(ctx),
        *args,
        args_tree=args_tree,
        eviction_policy=None,
        cache_modifier=None,
        is_volatile=False,
    )


@triton_lowering.register_lowering(_wide_swap_p)
def _wide_swap_to_triton(ctx: Any, *args: Any, args_tree: Any) -> Any:
    return triton_lowering._masked_swap_lowering_rule(
        _with_wide_offsets(ctx), *args, args_tree=args_tree, eviction_policy=None
    )


def _with_wide_offsets(ctx: Any) -> Any:
    """The context with an array so long in its first dimension that Pallas takes 64-bit offsets."""
    block, *others = ctx.block_infos
    first, *rest = block.full_shape_dtype.shape
    longer = jax.core.ShapedArray((first * 8, *rest), block.full_shape_dtype.dtype)
    block = dataclasses.replace(block, full_shape_dtype=longer)
    return ctx.replace(block_infos=[block, *others])
