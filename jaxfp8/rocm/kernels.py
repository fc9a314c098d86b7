# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Every kernel of the library, with the arguments that `jaxfp8 codegen` compiles it for.

The shapes are those of a TP8 rank of Kimi-K3: 12 heads, 4096 new tokens, a context segment of
65,536 keys, in 4 sequences. What a kernel compiles to depends on them only through strides and
the bounds of offsets.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp8
from jaxfp8 import packing
from jaxfp8.ops.attention.base import Precision, QuantizedContext, QuantizedQuery
from jaxfp8.ops.attention.heuristics import KernelConfig, default_config, device_of
from jaxfp8.ops.attention.pallas_triton_kernel import merge_splits
from jaxfp8.ops.attention.schedule import choose_splits
from jaxfp8.rocm.compile import CompiledKernel, compile_for_gfx942, described_gfx942

_ARCH = "gfx942"
NUM_HEADS = 12
NUM_QUERIES = 4096
NUM_KEYS = 65536
NUM_SEQUENCES = 4
V_HEAD_DIM = 128

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function, its abstract arguments, and its configuration."""


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """One kernel of the library.

    Attributes:
      name: its name in tables and files.
      op: "attention", "quantize", "reduce" or "merge".
      precision: of its operands.
      symbol: the name of the Pallas kernel in the function; None for the kernels that XLA makes.
      call: makes the function that contains it, on abstract arguments. Called within
        `described_gfx942()`.
    """

    name: str
    op: str
    precision: Precision
    symbol: str | None
    call: Callable[[], Call]


@dataclasses.dataclass(frozen=True)
class LibraryKernel:
    """A kernel of the library, compiled.

    Attributes:
      name: of its spec, with a number where XLA made several.
      spec: what it was compiled from.
      config: the configuration it was compiled with.
      kernel: what came out.
    """

    name: str
    spec: KernelSpec
    config: dict[str, Any]
    kernel: CompiledKernel


def compile_kernel(spec: KernelSpec) -> list[LibraryKernel]:
    """Compiles one kernel of the library; more than one result only where XLA made several.

    Raises:
      MissingToolError: as `compile_for_gfx942`.
      LookupError: the function does not contain the kernel.
    """
    with described_gfx942():
        function, args, config = spec.call()
    found = [
        kernel
        for kernel in compile_for_gfx942(function, *args)
        if (kernel.name == spec.symbol if spec.symbol else not kernel.pallas)
    ]
    if not found:
        raise LookupError(f"{spec.name}: compiled without a kernel {spec.symbol or 'of XLA'}")
    names = [spec.name] if len(found) == 1 else [f"{spec.name}_{i}" for i in range(len(found))]
    return [
        LibraryKernel(name, spec, config, kernel) for name, kernel in zip(names, found, strict=True)
    ]


def kernel_specs() -> tuple[KernelSpec, ...]:
    """The kernels of the library, quantizers first."""
    precisions: tuple[Precision, ...] = ("fp8", "bf16")
    specs = []
    for qk in (192, 128):
        dims = "" if qk == 192 else f"_d{qk}"
        specs += [
            KernelSpec(
                f"amax{dims}", "quantize", "bf16", "jaxfp8_amax",
                functools.partial(_quantize_query, "fp8", qk, dynamic=True),
            )
        ]  # fmt: skip
        for precision in precisions:
            specs += [
                KernelSpec(
                    f"pack_query_{precision}{dims}", "quantize", precision, "jaxfp8_pack_query",
                    functools.partial(_quantize_query, precision, qk),
                ),
                KernelSpec(
                    f"pack_context_{precision}{dims}", "quantize", precision,
                    "jaxfp8_pack_context", functools.partial(_quantize_context, precision, qk),
                ),
            ]  # fmt: skip
            variants = [(False, None), (True, None), (False, 1), (True, 1)]
            for causal, splits in variants if qk == 192 else variants[:2]:
                name = f"{precision}{'_causal' if causal else ''}{'_unsplit' if splits else ''}"
                name += dims
                specs += [
                    KernelSpec(
                        f"attention_{name}", "attention", precision, "jaxfp8_attention",
                        functools.partial(_attend, precision, qk, causal, splits),
                    )
                ]  # fmt: skip
    specs += [
        KernelSpec(
            "pack_context_fp8_assembled",
            "quantize",
            "fp8",
            "jaxfp8_pack_context",
            _quantize_assembled_context,
        ),
        KernelSpec("merge_splits", "reduce", "bf16", None, _merge_splits),
        KernelSpec("merge_states", "merge", "bf16", None, _merge_states),
    ]
    return tuple(specs)


def _array(shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


_CU_SEQLENS = _array((NUM_SEQUENCES + 1,), np.int32)
_DESCALE = _array((NUM_HEADS,), np.float32)


def _shape_config(qk: int, **others: Any) -> dict[str, Any]:
    return {"num_heads": NUM_HEADS, "qk_head_dim": qk, "v_head_dim": V_HEAD_DIM, **others}


def _packed_config(packed: QuantizedQuery | QuantizedContext) -> dict[str, Any]:
    return dataclasses.asdict(packed.data.config)


def _quantize_query(precision: Precision, qk: int, *, dynamic: bool = False) -> Call:
    def function(q: Any, cu_seqlens: Any, descale: Any) -> QuantizedQuery:
        given = None if dynamic or precision == "bf16" else descale
        return packing.pack_query(
            q, cu_seqlens, given, precision, None, None, v_head_dim=V_HEAD_DIM
        )

    args = (_array((NUM_QUERIES, NUM_HEADS, qk)), _CU_SEQLENS, _DESCALE)
    config = _packed_config(jax.eval_shape(function, *args))
    return function, args, _shape_config(qk, num_queries=NUM_QUERIES, **config)


def _quantize_context(precision: Precision, qk: int) -> Call:
    def function(k: Any, v: Any, cu_seqlens: Any, k_descale: Any, v_descale: Any) -> Any:
        if precision == "bf16":
            k_descale = v_descale = None
        return packing.pack_context(k, v, cu_seqlens, k_descale, v_descale, precision, None, None)

    args = (
        _array((NUM_KEYS, NUM_HEADS, qk)),
        _array((NUM_KEYS, NUM_HEADS, V_HEAD_DIM)),
        _CU_SEQLENS,
        _DESCALE,
        _DESCALE,
    )
    config = _packed_config(jax.eval_shape(function, *args))
    return function, args, _shape_config(qk, num_keys=NUM_KEYS, **config)


def _quantize_assembled_context() -> Call:
    """K [T, H, 192] out of kv_nope [T, H, 256], where V is too, and the shared k_rope [T, 64]."""

    def function(kv: Any, rope: Any, cu_seqlens: Any, k_descale: Any, v_descale: Any) -> Any:
        k = jaxfp8.AssembledKey(jaxfp8.HeadSlice(kv, 0, 128), rope)
        v = jaxfp8.HeadSlice(kv, 128, V_HEAD_DIM)
        return jaxfp8.quantize_context(k, v, cu_seqlens, k_descale=k_descale, v_descale=v_descale)

    args = (
        _array((NUM_KEYS, NUM_HEADS, 256)),
        _array((NUM_KEYS, 64)),
        _CU_SEQLENS,
        _DESCALE,
        _DESCALE,
    )
    config = _packed_config(jax.eval_shape(function, *args))
    return function, args, _shape_config(192, num_keys=NUM_KEYS, **config)


def _attend(precision: Precision, qk: int, causal: bool, splits: int | None) -> Call:
    """splits: None takes what the library takes at this shape; 1 has an output of its own."""

    def function(query: QuantizedQuery, context: QuantizedContext) -> Any:
        return jaxfp8.attend(query, context, causal=causal)

    pack_query, query_args, _ = _quantize_query(precision, qk)
    pack_context, context_args, _ = _quantize_context(precision, qk)
    query = jax.eval_shape(pack_query, *query_args)
    context = jax.eval_shape(pack_context, *context_args)
    kernel_config = dataclasses.replace(context.data.config, splits=splits)
    data = dataclasses.replace(context.data, config=kernel_config)
    context = dataclasses.replace(context, data=data)
    config = dataclasses.asdict(kernel_config)
    config["splits"] = _num_splits(causal, kernel_config)
    shape = _shape_config(qk, num_queries=NUM_QUERIES, num_keys=NUM_KEYS, causal=causal)
    return function, (query, context), {**shape, **config}


def _num_splits(causal: bool, config: KernelConfig) -> int:
    return choose_splits(
        NUM_HEADS, NUM_QUERIES, NUM_KEYS, NUM_SEQUENCES, V_HEAD_DIM, causal, config,
        device_of(_ARCH),
    )  # fmt: skip


def _merge_splits() -> Call:
    splits = _num_splits(False, default_config(_ARCH, "fp8"))
    args = (
        _array((splits, NUM_QUERIES, NUM_HEADS, V_HEAD_DIM), np.float32),
        _array((splits, NUM_HEADS, NUM_QUERIES), np.float32),
    )
    return merge_splits, args, {"num_heads": NUM_HEADS, "splits": splits}


def _merge_states() -> Call:
    state = jaxfp8.AttentionState(
        _array((NUM_QUERIES, NUM_HEADS, V_HEAD_DIM)), _array((NUM_HEADS, NUM_QUERIES), np.float32)
    )
    return jaxfp8.merge_states, (state, state), {"num_heads": NUM_HEADS}
