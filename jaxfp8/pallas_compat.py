# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""What the Pallas Triton kernels need and Pallas does not offer, and the one use of jax._src.

Each function here is a JAX primitive with two lowerings: an ordinary one, which serves interpret
mode, and one for Pallas Triton, which emits the operation that the hardware has.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import math as math_dialect
from jax._src.pallas.triton import lowering as triton_lowering
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
