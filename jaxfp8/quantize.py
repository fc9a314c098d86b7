# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Per-head FP8 quantization of token-major arrays, on any device.

One descale per head: value = stored * descale. The kernels quantize inside `quantize_query` and
`quantize_context` instead, straight into their own layouts, with the same bits.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8 import checks
from jaxfp8.formats import Fp8Format
from jaxfp8.head_slice import HeadSlice, as_array
from jaxfp8.inference_only import inference_only
from jaxfp8.ops.quantize import reference

_ACCEPTED = (jnp.bfloat16, np.float32)


def per_head_amax(x: jax.Array | HeadSlice) -> jax.Array:
    """Largest finite magnitude of each head.

    Args:
      x: [T, H, D], bfloat16 or float32; or a HeadSlice of such an array.

    Returns:
      float32 [H]; 0 for no tokens. NaN and infinities are left out: one saturates when quantized,
      the other stays NaN, and neither should stretch the scale of the rest.

    Raises:
      TypeError: x is not an array of those dtypes.
      ValueError: x has not three dimensions.

    Example:
      >>> import jax.numpy as jnp, jaxfp8
      >>> x = jnp.array([[[1.0, -3.0], [0.5, jnp.inf]]], jnp.bfloat16)  # a token, two heads
      >>> jaxfp8.per_head_amax(x).tolist()
      [3.0, 0.5]
    """
    checks.dtype_in("x", checks.heads("x", x, "[T, H, D]"), _ACCEPTED)
    return _per_head_amax(x)


def descale_from_amax(amax: jax.Array, fmt: Fp8Format, *, margin: float = 1.0) -> jax.Array:
    """The descale with which `amax * margin` is the largest representable value.

    Args:
      amax: float32 [H], the largest magnitude per head.
      fmt: the FP8 format.
      margin: headroom over what was seen, finite and >= 1.

    Returns:
      float32 [H]: max(amax * margin / fmt.max, 1e-12).

    Raises:
      TypeError: amax is not a float array, fmt not an Fp8Format, margin not a number.
      ValueError: amax has not one dimension; margin is not finite or below 1.

    Example:
      >>> import jax.numpy as jnp, jaxfp8
      >>> amax = jnp.array([120.0, 3.0])
      >>> jaxfp8.descale_from_amax(amax, jaxfp8.E4M3FNUZ, margin=1.25).tolist()
      [0.625, 0.015625]
    """
    checks.dtype_in("amax", checks.array("amax", amax, "[H]"), [np.float32, np.float64])
    return _descale_from_amax(
        jnp.asarray(amax, jnp.float32), fmt=checks.fp8_format(fmt), margin=checks.margin(margin)
    )


def quantize_per_head(x: jax.Array | HeadSlice, descale: jax.Array, fmt: Fp8Format) -> jax.Array:
    """Quantizes each head with its own scale.

    Args:
      x: [T, H, D], bfloat16 or float32.
      descale: float32 [H], finite and > 0.
      fmt: the FP8 format.

    Returns:
      [T, H, D] in fmt: x / descale in float32, clipped to +-fmt.max, rounded to nearest even.
      Infinities saturate, NaN stays NaN.

    Raises:
      TypeError: x, descale or fmt is of the wrong kind or dtype.
      ValueError: a shape is wrong, or a descale not finite or not > 0.

    Example:
      >>> import jax.numpy as jnp, jaxfp8
      >>> x = jnp.array([[[1.0, -3.0, 5.0]]], jnp.bfloat16)
      >>> stored = jaxfp8.quantize_per_head(x, jnp.array([0.0175]), jaxfp8.E4M3FNUZ)
      >>> stored.dtype.name, stored.astype(jnp.float32).tolist()  # 5 / 0.0175 is clipped
      ('float8_e4m3fnuz', [[[56.0, -176.0, 240.0]]])
    """
    checks.dtype_in("x", checks.heads("x", x, "[T, H, D]"), _ACCEPTED)
    descale = checks.descale("descale", descale, x.shape[1], "x")
    return _quantize_per_head(x, descale, fmt=checks.fp8_format(fmt))


def dynamic_quantize_per_head(
    x: jax.Array | HeadSlice, fmt: Fp8Format
) -> tuple[jax.Array, jax.Array]:
    """Quantizes each head with the scale its own values ask for.

    Args:
      x: [T, H, D], bfloat16 or float32.
      fmt: the FP8 format.

    Returns:
      x quantized as by `quantize_per_head`, [T, H, D] in fmt, and its descale, float32 [H],
      as by `descale_from_amax(per_head_amax(x), fmt)`.

    Raises:
      TypeError, ValueError: as `quantize_per_head`.

    Example:
      >>> import jax.numpy as jnp, jaxfp8
      >>> x = jnp.array([[[1.0, -3.0], [0.5, 0.25]]], jnp.bfloat16)
      >>> stored, descale = jaxfp8.dynamic_quantize_per_head(x, jaxfp8.E4M3FN)
      >>> stored.astype(jnp.float32).tolist()  # the largest of each head is the format's
      [[[144.0, -448.0], [448.0, 224.0]]]
      >>> value = stored.astype(jnp.float32) * descale[:, None]
      >>> float(abs(value - x.astype(jnp.float32)).max()) < 2**-4  # of the value
      True
    """
    checks.dtype_in("x", checks.heads("x", x, "[T, H, D]"), _ACCEPTED)
    return _dynamic_quantize_per_head(x, fmt=checks.fp8_format(fmt))


@jax.jit
def _per_head_amax(x: jax.Array | HeadSlice) -> jax.Array:
    return reference.per_head_amax(as_array(inference_only(x)))


@functools.partial(jax.jit, static_argnames=("fmt", "margin"))
def _descale_from_amax(amax: jax.Array | HeadSlice, *, fmt: Fp8Format, margin: float) -> jax.Array:
    return reference.descale_from_amax(inference_only(amax), fmt, margin)


@functools.partial(jax.jit, static_argnames=("fmt",))
def _quantize_per_head(
    x: jax.Array | HeadSlice, descale: jax.Array, *, fmt: Fp8Format
) -> jax.Array:
    x, descale = inference_only((x, descale))
    return reference.quantize_per_head(as_array(x), descale, fmt)


@functools.partial(jax.jit, static_argnames=("fmt",))
def _dynamic_quantize_per_head(
    x: jax.Array | HeadSlice, *, fmt: Fp8Format
) -> tuple[jax.Array, jax.Array]:
    x = as_array(inference_only(x))
    descale = reference.descale_from_amax(reference.per_head_amax(x), fmt)
    return reference.quantize_per_head(x, descale, fmt), descale
