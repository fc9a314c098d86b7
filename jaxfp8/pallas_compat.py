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


def fma(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
    """x * y + z of float32, rounded once in a compiled kernel; y and z are broadcast to x."""
    return _fma_p.bind(x, jnp.broadcast_to(y, x.shape), jnp.broadcast_to(z, x.shape))


def to_fp8(x: jax.Array, fmt: Fp8Format) -> jax.Array:
    """float32 to FP8, to nearest even; NaN stays NaN. |x| must not pass fmt.max.

    Pallas refuses casts to float8_e4m3fnuz; Triton itself converts, two values an instruction.
    """
    return _to_fp8_p.bind(x, fmt=fmt)


def quantize(x: jax.Array, descale: jax.Array, fmt: Fp8Format) -> jax.Array:
    """x / descale in float32, clipped to +-fmt.max, to FP8 to nearest even; NaN stays NaN.

    Args:
      x: float32.
      descale: float32 [], > 0.
      fmt: the format.
    """
    return _quantize_p.bind(x, descale, fmt=fmt)


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
_to_fp8_p = _primitive(
    "jaxfp8_to_fp8",
    lambda x, *, fmt: jax.core.ShapedArray(x.shape, fmt.dtype),
    lambda x, *, fmt: x.astype(fmt.dtype),
)


@triton_lowering.register_lowering(_exp2_p)
def _exp2_to_triton(ctx: Any, x: Any) -> Any:
    del ctx
    return math_dialect.exp2(x)


@triton_lowering.register_lowering(_to_fp8_p)
def _to_fp8_to_triton(ctx: Any, x: Any, *, fmt: Fp8Format) -> Any:
    del ctx
    element = {
        "float8_e4m3fnuz": ir.Float8E4M3FNUZType,
        "float8_e4m3fn": ir.Float8E4M3FNType,
    }[fmt.name].get()
    result = ir.RankedTensorType.get(ir.RankedTensorType(x.type).shape, element)
    return _tt.fp_to_fp(result, x, rounding=_tt.RoundingMode.RTNE)


def _quantize(x: jax.Array, descale: jax.Array, *, fmt: Fp8Format) -> jax.Array:
    # XLA turns division by a broadcast value into multiplication by its reciprocal, one ulp off,
    # unless the divisor depends on the dividend.
    scaled = x / jnp.where(jnp.isnan(x), x, descale)
    return jnp.clip(scaled, -fmt.max, fmt.max).astype(fmt.dtype)


_quantize_p = _primitive(
    "jaxfp8_quantize",
    lambda x, _, *, fmt: jax.core.ShapedArray(x.shape, fmt.dtype),
    _quantize,
)
_reciprocal_p = _primitive("jaxfp8_reciprocal", lambda x: x, lambda x: 1 / x)
_fma_p = _primitive("jaxfp8_fma", lambda x, y, z: x, lambda x, y, z: x * y + z)


@triton_lowering.register_lowering(_reciprocal_p)
def _reciprocal_to_triton(ctx: Any, x: Any) -> Any:
    """Correctly rounded; a plain division in a kernel is not, on NVIDIA."""
    del ctx
    return _tt.precise_divf(triton_lowering._full(x.type, 1.0), x)


@triton_lowering.register_lowering(_fma_p)
def _fma_to_triton(ctx: Any, x: Any, y: Any, z: Any) -> Any:
    del ctx
    return math_dialect.fma(x, y, z)


def _quantize_in_triton(x: jax.Array, descale: jax.Array, *, fmt: Fp8Format) -> jax.Array:
    """With the correctly rounded quotient in 6 instructions an element, where division takes 11.

    With r the correctly rounded reciprocal of d, x * r is less than 2 ulp off; one step
    q + r * (x - q * d) in fused arithmetic makes it less than 1 ulp off, and another the correctly
    rounded quotient (Markstein, "Computation of elementary functions on the IBM RISC System/6000
    processor", theorem on division), as long as no step overflows or underflows. Quotients past
    fmt.max are not computed, and a descale under 2**-64 is scaled up together with x.
    """
    factor = jnp.where(descale < 2.0**-64, jnp.float32(2.0**64), jnp.float32(1))
    divisor = jnp.broadcast_to(descale * factor, x.shape)
    reciprocal = _reciprocal_p.bind(divisor)  # computed once: all elements are the same
    x = x * factor
    first = quotient = x * reciprocal
    for _ in range(2):
        remainder = fma(-quotient, divisor, x)
        quotient = fma(remainder, reciprocal, quotient)
    # Not jnp.minimum: its Triton lowering turns NaN into the bound.
    magnitude = jnp.where(jnp.abs(first) > fmt.max, fmt.max, jnp.abs(quotient))
    sign = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(1 << 31)
    bits = jax.lax.bitcast_convert_type(magnitude, jnp.uint32) | sign
    return to_fp8(jax.lax.bitcast_convert_type(bits, jnp.float32), fmt)


triton_lowering.register_lowering(_quantize_p)(
    triton_lowering.lower_fun(_quantize_in_triton, multiple_results=False)
)


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
