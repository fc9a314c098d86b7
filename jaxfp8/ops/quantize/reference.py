# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Per-head quantization in plain JAX: what every quantizing kernel must agree with, bit for bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8.formats import MIN_DESCALE, Fp8Format


def per_head_amax(x: jax.Array, num_tokens: jax.Array | int | None = None) -> jax.Array:
    """float32 [H]: largest finite |x| of each head of x [T, H, D], 0 where there is none.

    Infinities are left out because they saturate when quantized, and NaN because it stays NaN:
    neither should stretch the scale of the finite values.

    Args:
      x: [T, H, D], bfloat16 or float32.
      num_tokens: rows past it are ignored; None takes all T.
    """
    # Without the sign, the bits of floats are ordered as the floats are. On a CPU, XLA would do
    # bfloat16 arithmetic on a float32 copy of all of x.
    unsigned = jnp.uint16 if x.dtype == jnp.bfloat16 else jnp.uint32
    infinity = jax.lax.bitcast_convert_type(jnp.array(jnp.inf, x.dtype), unsigned)
    magnitude = jax.lax.bitcast_convert_type(x, unsigned) & unsigned(jnp.iinfo(unsigned).max // 2)
    counted = magnitude < infinity
    if num_tokens is not None:
        counted &= (jnp.arange(x.shape[0]) < num_tokens)[:, None, None]
    largest = jnp.max(jnp.where(counted, magnitude, unsigned(0)), axis=(0, 2), initial=0)
    return jax.lax.bitcast_convert_type(largest, x.dtype).astype(jnp.float32)


def descale_from_amax(amax: jax.Array, fmt: Fp8Format, margin: float = 1.0) -> jax.Array:
    """float32 [H]: max(amax * margin / fmt.max, MIN_DESCALE)."""
    scaled = divide(amax.astype(jnp.float32) * jnp.float32(margin), jnp.float32(fmt.max))
    return jnp.maximum(scaled, jnp.float32(MIN_DESCALE))


def quantize_per_head(x: jax.Array, descale: jax.Array, fmt: Fp8Format) -> jax.Array:
    """fp8 [T, H, D]: x / descale in float32, clipped to +-fmt.max, rounded to nearest even."""
    scaled = divide(x.astype(jnp.float32), descale[None, :, None])
    return jnp.clip(scaled, -fmt.max, fmt.max).astype(fmt.dtype)


def divide(x: jax.Array, divisor: jax.Array) -> jax.Array:
    """float32 x / divisor, correctly rounded, where XLA would do otherwise.

    Off by an ulp, values that lie on a tie of the FP8 format round to the other side than they do
    in NumPy, in a kernel, or under another jit. XLA is off in two ways:

    - It turns division by a constant or by a broadcast value into multiplication by its reciprocal.
      A divisor that depends on x is left alone.
    - On NVIDIA GPUs its float32 division itself is not correctly rounded.
    """
    return jax.lax.platform_dependent(
        x, divisor, cuda=_by_wide_reciprocal, default=_by_dependent_divisor
    )


def _by_dependent_divisor(x: jax.Array, divisor: jax.Array) -> jax.Array:
    return x / jnp.where(jnp.isnan(x), x, divisor)


def _by_wide_reciprocal(x: jax.Array, divisor: jax.Array) -> jax.Array:
    """x * (1 / divisor) in float64, rounded to float32.

    A quotient of two float32 numbers is at least 2**-49 of itself away from the middle between two
    neighbours in float32: that is n * 2**k with an odd n of 25 bits, and |x - n * 2**k * divisor|
    is an integer multiple of its last bit, and not 0. Two roundings in float64 are off by 2**-52.
    A division in float64 would not do: LLVM sees that float32 has the same result, correctly
    rounded, and takes that.
    """
    with jax.enable_x64(True):
        x, divisor = (jax.lax.convert_element_type(y, np.dtype(np.float64)) for y in (x, divisor))
        return jax.lax.convert_element_type(x * (1 / divisor), np.dtype(np.float32))
