# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of what a caller gives to the model, made before anything is compiled.

Messages and errors are those of jaxfp8/checks.py. A pass on one device and one over a mesh check
alike, by these; the weights are checked by `weights.check_weights`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8 import checks
from jaxfp8.formats import Fp8Format
from jaxfp8.models.config import MlaConfig
from jaxfp8.ops.attention.base import Precision
from jaxfp8.ops.attention.registry import get_backend
from jaxfp8.scales.arguments import integer, require
from jaxfp8.scales.errors import listed
from jaxfp8.scales.layer_scales import LayerScales


@dataclasses.dataclass(frozen=True)
class PassOptions:
    """What a pass is compiled for, beside shapes: `prefill_layer` explains each."""

    segment: int
    precision: Precision
    new_tokens_precision: Precision
    fmt: Fp8Format | None
    backend: str | None


def check_config(config: Any) -> None:
    """TypeError unless config is an MlaConfig."""
    require("config", config, MlaConfig, "an MlaConfig")


def check_number(name: str, x: Any, least: int) -> int:
    """An integer from `least` on: TypeError for another kind, ValueError for less."""
    value = integer(name, x)
    if value < least:
        raise ValueError(f"{name}: expected an integer >= {least}, got {value}")
    return value


def check_tp_rank(tp_rank: Any, tp_size: int) -> int:
    """A rank among tp_size."""
    value = integer("tp_rank", tp_rank)
    if not 0 <= value < tp_size:
        raise ValueError(f"tp_rank: expected 0 to {tp_size - 1}, got {value}")
    return value


def check_layers(layers: Any) -> tuple[int, ...]:
    """Distinct indices of layers, at least one, in the order given. Any iterable, read once."""
    if isinstance(layers, str | bytes) or not isinstance(layers, Iterable):
        raise TypeError(f"layers: expected layer indices, got {type(layers).__name__}")
    indices = tuple(check_number("layers", layer, 0) for layer in layers)
    if not indices:
        raise ValueError("layers: expected at least one layer index, got none")
    if len(set(indices)) < len(indices):
        raise ValueError(f"layers: expected distinct layer indices, got {listed(indices)}")
    return indices


def check_hidden(config: MlaConfig, hidden: Any) -> None:
    """bfloat16 [T, hidden_size]."""
    shape = f"[T, {config.hidden_size}]"
    checks.array("hidden", hidden, shape)
    checks.matches("hidden", hidden, shape, (None, config.hidden_size), "config")
    checks.dtype_in("hidden", hidden, [jnp.bfloat16])


def check_cache(config: MlaConfig, cache: Any, capacity: str = "capacity") -> None:
    """bfloat16 [capacity, latent_dim], the capacity being called so."""
    shape = f"[{capacity}, {config.latent_dim}]"
    checks.array("cache", cache, shape)
    checks.matches("cache", cache, shape, (None, config.latent_dim), "config")
    checks.dtype_in("cache", cache, [jnp.bfloat16])


def check_segment(segment: Any) -> int:
    """A number of tokens >= 1."""
    if isinstance(segment, bool) or not isinstance(segment, int | np.integer) or segment < 1:
        raise ValueError(f"segment: expected a number of tokens >= 1, got {segment!r}")
    return int(segment)


def check_precision(name: str, precision: Any) -> None:
    """ValueError unless it is "fp8" or "bf16"."""
    if not (isinstance(precision, str) and precision in get_args(Precision)):
        raise ValueError(f"{name}: expected 'fp8' or 'bf16', got {precision!r}")


def check_options(
    segment: Any, precision: Any, new_tokens_precision: Any, fmt: Any, backend: Any
) -> PassOptions:
    """The options of a pass, each sound, and the new tokens not in FP8 alone."""
    segment = check_segment(segment)
    check_precision("precision", precision)
    check_precision("new_tokens_precision", new_tokens_precision)
    if new_tokens_precision == "fp8" and precision == "bf16":
        raise ValueError(
            "new_tokens_precision: expected 'bf16' in a pass of precision 'bf16', got 'fp8'"
        )
    if fmt is not None:
        checks.fp8_format(fmt)
    if backend is not None:
        get_backend(backend)
    return PassOptions(segment, precision, new_tokens_precision, fmt, backend)


def check_scales(scales: Any, precision: Precision, num_heads: int) -> LayerScales | None:
    """None, or float32 [num_heads] each for Q, K and V in a pass that is "fp8".

    Values are checked where this process has all of them.
    """
    if scales is None:
        return None
    require("scales", scales, LayerScales, "a LayerScales or None")
    if precision == "bf16":
        raise ValueError("scales: expected None with precision='bf16', which has no scales to use")
    return LayerScales(
        *(_check_descale(name, x, num_heads) for name, x in zip("qkv", scales, strict=True))
    )


def _check_descale(name: str, x: Any, num_heads: int) -> jax.Array:
    if not isinstance(x, jax.Array) or checks.is_traced(x) or x.is_fully_addressable:
        return checks.descale(f"scales.{name}", x, num_heads, name)
    checks.matches(f"scales.{name}", x, f"[{num_heads}]", (num_heads,), "config")
    checks.dtype_in(f"scales.{name}", x, [np.float32])
    return x
