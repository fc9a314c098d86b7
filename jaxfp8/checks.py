# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments, made before anything is compiled.

Every message has the form "NAME: expected WHAT, got WHAT". Wrong kinds and dtypes are TypeError,
wrong shapes and values ValueError. Values are checked where they are there to be read: a traced
array is checked for shape and dtype alone, and `sound_cu_seqlens` makes its values harmless.
Reading the value of an array that lies on a GPU waits for it; a loop that must not wait runs
under jax.jit, where nothing is read.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8.formats import FORMATS, Fp8Format
from jaxfp8.head_slice import HeadSlice
from jaxfp8.ops.quantize.assembled_key import AssembledKey

if TYPE_CHECKING:
    from jaxfp8.states import AttentionState

# Beyond this, float32 scores of ordinary inputs are infinite.
_MAX_SOFTMAX_SCALE = 1e30

S = TypeVar("S", bound="AttentionState")


def is_traced(x: Any) -> bool:
    """Whether x has no value yet, being inside a jax transformation."""
    return isinstance(x, jax.core.Tracer)


def array(name: str, x: Any, shape: str) -> Any:
    """x, if it is an array (or a HeadSlice) with as many dimensions as `shape` names."""
    dimensions = shape.count(",") + 1
    kinds = (jax.Array, np.ndarray, HeadSlice) if dimensions == 3 else (jax.Array, np.ndarray)
    if not isinstance(x, kinds):
        raise TypeError(
            f"{name}: expected a JAX or NumPy array of shape {shape}, got {type(x).__name__}"
        )
    if isinstance(x, HeadSlice):
        array(f"{name}.array", x.array, shape)
        if not all(isinstance(n, int | np.integer) for n in (x.start, x.size)):
            raise TypeError(
                f"{name}: expected integers for the start and size of a slice, got {x.start!r} and "
                f"{x.size!r}"
            )
        if not (x.start >= 0 and x.size >= 1 and x.start + x.size <= x.array.shape[2]):
            raise ValueError(
                f"{name}: expected a slice within the {x.array.shape[2]} columns of its array, got "
                f"start {x.start} and size {x.size}"
            )
        return x
    if len(x.shape) != dimensions:
        raise ValueError(f"{name}: expected shape {shape}, got {list(x.shape)}")
    return x


def keys(name: str, x: Any, shape: str) -> Any:
    """As `heads`, and x may also be an AssembledKey whose parts fit each other."""
    if not isinstance(x, AssembledKey):
        return heads(name, x, shape)
    array(f"{name}.nope", x.nope, "[Tk, H, Dn]")
    array(f"{name}.rope", x.rope, "[Tk, Dr]")
    matches(f"{name}.rope", x.rope, f"[{x.shape[0]}, Dr]", (x.shape[0], None), f"{name}.nope")
    dtype_in(f"{name}.rope", x.rope, [x.dtype])
    return _populated(name, x, shape)


def heads(name: str, x: Any, shape: str) -> Any:
    """A token-major array [T, H, D] with at least one head and one column."""
    return _populated(name, array(name, x, shape), shape)


def _populated(name: str, x: Any, shape: str) -> Any:
    if x.shape[1] < 1 or x.shape[2] < 1:
        raise ValueError(
            f"{name}: expected shape {shape} with H >= 1 and D >= 1, got {list(x.shape)}"
        )
    return x


def dtype_in(name: str, x: Any, accepted: Sequence[Any], remark: str = "") -> None:
    """TypeError unless x.dtype is one of those accepted."""
    if x.dtype not in [np.dtype(dtype) for dtype in accepted]:
        names = " or ".join(np.dtype(dtype).name for dtype in accepted)
        raise TypeError(f"{name}: expected dtype {names}, got {np.dtype(x.dtype).name}{remark}")


def is_fp8(x: Any) -> bool:
    """Whether x holds one of the library's FP8 formats."""
    return np.dtype(x.dtype).name in FORMATS


def attention_dtype(name: str, x: Any, fmt: Fp8Format | None) -> None:
    """x is bfloat16, or FP8 in `fmt`; fmt None stands for a bfloat16 request."""
    if fmt is None:
        dtype_in(name, x, [jnp.bfloat16], " (precision='bf16' takes bfloat16 alone)")
        return
    if is_fp8(x) and x.dtype != fmt.dtype:
        raise ValueError(
            f"{name}: expected bfloat16 or {fmt.name}, the FP8 format of this request, got "
            f"{np.dtype(x.dtype).name}. {same_bits(np.dtype(x.dtype).name)}; dequantize and "
            f"quantize again for {fmt.name}, or pass fmt= for a device that speaks it"
        )
    dtype_in(name, x, [jnp.bfloat16, fmt.dtype])


def same_bits(given: str) -> str:
    """Why FP8 bits of one format are never read as the other."""
    factor = "half" if given == "float8_e4m3fn" else "twice"
    other = "float8_e4m3fnuz" if given == "float8_e4m3fn" else "float8_e4m3fn"
    return f"The same bits read as {other} mean {factor} the value"


def matches(name: str, x: Any, shape: str, expected: tuple[int | None, ...], other: str) -> None:
    """ValueError unless x.shape is `expected`, None standing for any length."""
    if len(x.shape) != len(expected) or any(
        want is not None and have != want for have, want in zip(x.shape, expected, strict=True)
    ):
        raise ValueError(f"{name}: expected shape {shape} to match {other}, got {list(x.shape)}")


def cu_seqlens(name: str, x: Any, num_tokens: int, tokens: str) -> jax.Array:
    """int32 [B + 1], checked by value where it has one, as a JAX array.

    Args:
      name: the argument's name.
      x: what was given.
      num_tokens: length of the array whose sequences it bounds.
      tokens: that array's name.
    """
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise TypeError(
            f"{name}: expected an int32 array of shape [B + 1], got {type(x).__name__}; "
            f"write jnp.array(..., jnp.int32)"
        )
    if x.dtype != np.int32:
        raise TypeError(
            f"{name}: expected dtype int32, got {np.dtype(x.dtype).name}; it is not narrowed for "
            "you, because an offset that does not fit would be silently wrong"
        )
    if len(x.shape) != 1 or x.shape[0] < 1:
        raise ValueError(
            f"{name}: expected shape [B + 1] (B sequences, at least [0]), got {list(x.shape)}"
        )
    if not is_traced(x):
        values = np.asarray(x)
        if values[0] != 0:
            raise ValueError(f"{name}: expected to start at 0, got {values[0]}")
        falls = np.flatnonzero(np.diff(values.astype(np.int64)) < 0)
        if falls.size:
            at = int(falls[0])
            raise ValueError(
                f"{name}: expected values that do not decrease, got {values[at]} at {at} and "
                f"{values[at + 1]} at {at + 1}"
            )
        if values[-1] > num_tokens:
            raise ValueError(
                f"{name}: expected to end within the {num_tokens} tokens of {tokens}, got "
                f"{values[-1]}"
            )
    return jnp.asarray(x)


def sound_cu_seqlens(x: jax.Array, num_tokens: int) -> jax.Array:
    """x made to start at 0, not to decrease, and to end within the array: the identity on good
    input. A traced array cannot be checked; this keeps kernels inside their buffers whatever it
    holds.
    """
    return jnp.clip(jax.lax.cummax(x.at[0].set(0)), 0, num_tokens)


def descale(name: str, x: Any, num_heads: int, to_match: str) -> jax.Array:
    """float32 [H], finite and > 0 where it can be read; float64 is rounded to float32."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise TypeError(
            f"{name}: expected a float32 array of shape [{num_heads}], got {type(x).__name__}"
        )
    dtype_in(name, x, [np.float32, np.float64])
    if x.shape != (num_heads,):
        raise ValueError(
            f"{name}: expected shape [{num_heads}], one per head of {to_match}, got {list(x.shape)}"
        )
    if not is_traced(x):
        values = np.asarray(x, np.float32)
        bad = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
        if bad.size:
            raise ValueError(
                f"{name}: expected finite values > 0, got {values[bad[0]]!s} for head {bad[0]}"
            )
    return jnp.asarray(x, jnp.float32)


def softmax_scale(x: Any, qk_head_dim: int) -> float:
    """The scale as a Python float; None is qk_head_dim ** -0.5."""
    if x is None:
        return float(qk_head_dim**-0.5)
    if is_traced(x):
        raise TypeError(
            "softmax_scale: expected a Python number, got a traced array; it is compiled into the "
            "kernel, so close over it or mark it static"
        )
    value = _number("softmax_scale", x, "a number or None")
    if not 0 < value < _MAX_SOFTMAX_SCALE:
        raise ValueError(f"softmax_scale: expected a finite number > 0, got {value}")
    return value


def _number(name: str, x: Any, expected: str) -> float:
    """x as a float. True and "1" are what float() takes and nobody means."""
    if not isinstance(x, bool | np.bool_ | str | bytes):
        with contextlib.suppress(TypeError, ValueError):
            return float(x)
    raise TypeError(f"{name}: expected {expected}, got {type(x).__name__}")


def margin(x: Any) -> float:
    """A finite number >= 1."""
    value = _number("margin", x, "a number")
    if not (math.isfinite(value) and value >= 1):
        raise ValueError(f"margin: expected a finite number >= 1, got {value}")
    return value


def flag(name: str, x: Any) -> bool:
    """A Python bool: it is compiled in, so a traced one cannot be had."""
    if not isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{name}: expected True or False, got {type(x).__name__}")
    return bool(x)


def fp8_format(x: Any) -> Fp8Format:
    """An Fp8Format."""
    if not isinstance(x, Fp8Format):
        raise TypeError(f"fmt: expected jaxfp8.E4M3FNUZ or jaxfp8.E4M3FN, got {type(x).__name__}")
    if x not in FORMATS.values():
        raise ValueError(f"fmt: expected jaxfp8.E4M3FNUZ or jaxfp8.E4M3FN, got {x!r}")
    return x


def states(a: S, b: S) -> tuple[S, S]:
    """Two attention states that can be merged."""
    for name, state in (("a", a), ("b", b)):
        if not (isinstance(state, tuple) and hasattr(state, "out") and hasattr(state, "lse")):
            raise TypeError(f"{name}: expected an AttentionState, got {type(state).__name__}")
        if isinstance(state.out, HeadSlice):
            raise TypeError(f"{name}.out: expected an array of shape [Tq, H, Dv], got HeadSlice")
        array(f"{name}.out", state.out, "[Tq, H, Dv]")
        array(f"{name}.lse", state.lse, "[H, Tq]")
        dtype_in(f"{name}.out", state.out, [jnp.bfloat16, np.float32])
        dtype_in(f"{name}.lse", state.lse, [np.float32])
        tokens, num_heads, _ = state.out.shape
        matches(
            f"{name}.lse", state.lse, f"[{num_heads}, {tokens}]", (num_heads, tokens), f"{name}.out"
        )
    matches("b.out", b.out, str(list(a.out.shape)), tuple(a.out.shape), "a.out")
    return a, b
