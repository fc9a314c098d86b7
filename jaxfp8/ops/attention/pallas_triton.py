# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The Pallas Triton backend: FP8 and BF16 attention on AMD gfx942, and on NVIDIA from sm89 on."""

from __future__ import annotations

import dataclasses
import math
import re

import jax
import jax.numpy as jnp

from jaxfp8.head_slice import HeadSlice
from jaxfp8.ops.attention import pallas_triton_kernel as kernel
from jaxfp8.ops.attention.base import AttentionSpec, QuantizedContext, QuantizedQuery
from jaxfp8.ops.attention.heuristics import Device, KernelConfig, default_config, device_of
from jaxfp8.ops.attention.schedule import choose_splits
from jaxfp8.ops.quantize import pallas_triton as packing
from jaxfp8.ops.quantize.assembled_key import AssembledKey
from jaxfp8.states import AttentionState
from jaxfp8.targets import Target, detect_target

HEAD_DIMS = ((192, 128), (128, 128))
"""The pairs (Dqk, Dv) that the kernels serve."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedQuery:
    """Queries as the kernel reads them: values [H, tiles * config.block_q, Dqk]."""

    values: jax.Array
    config: KernelConfig = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedContext:
    """Keys and values as the kernel reads them (ops/quantize/pallas_triton.py).

    Attributes:
      k: [H, tiles * config.block_k, Dqk].
      v: [H, tiles, Dv, config.block_k].
      nonfinite: float32 [1 or 2, H, B, Dv], where V is not finite.
      config: what it was packed for.
    """

    k: jax.Array
    v: jax.Array
    nonfinite: jax.Array
    config: KernelConfig = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class PallasTritonBackend:
    """The backend, for a GPU or in interpret mode.

    Attributes:
      name: its name in the registry.
      interpret: run the kernels in Pallas interpret mode, on any device.
      config: tile shapes and compiler settings; None takes the target's.
      device: what the order of programs and the splits are chosen for; None takes the target's.
    """

    name: str = "pallas_triton"
    interpret: bool = False
    config: KernelConfig | None = None
    device: Device | None = None

    def unsupported(self, spec: AttentionSpec, target: Target) -> str | None:
        """See AttentionBackend."""
        dims = (spec.qk_head_dim, spec.v_head_dim)
        if dims not in HEAD_DIMS and not (
            spec.v_head_dim is None and spec.qk_head_dim in {qk for qk, _ in HEAD_DIMS}
        ):
            served = ", ".join(f"({qk}, {v})" for qk, v in HEAD_DIMS)
            return (
                f"the kernels serve the head dims (Dqk, Dv) {served}, not "
                f"({spec.qk_head_dim}, {spec.v_head_dim}); backend='xla' serves any"
            )
        if self.interpret:
            return None
        if target.arch == "cpu":
            return "runs on a GPU; on a CPU use backend='interpret' (tests) or 'xla'"
        nvidia = re.fullmatch(r"sm(\d+)", target.arch)
        if target.arch != "gfx942" and not (nvidia and int(nvidia[1]) >= 89):
            return f"the kernels run on gfx942 and on sm89 or later, not on {target.arch}"
        if spec.fmt is not None and not target.speaks(spec.fmt):
            return f"{target.arch} computes in {target.fp8_format}, not in {spec.fmt}"
        return None

    def amax(self, x: jax.Array | HeadSlice | AssembledKey, num_tokens: jax.Array) -> jax.Array:
        """See AttentionBackend."""
        return packing.amax(x, num_tokens, interpret=self.interpret)

    def pack_query(
        self,
        q: jax.Array | HeadSlice,
        cu_seqlens: jax.Array,
        descale: jax.Array,
        spec: AttentionSpec,
    ) -> PackedQuery:
        """See AttentionBackend."""
        config = self._config(spec)
        values = packing.pack_rows(
            q, cu_seqlens, descale, spec.fmt, block=config.block_q, interpret=self.interpret
        )
        return PackedQuery(values, config)

    def pack_context(
        self,
        k: jax.Array | HeadSlice | AssembledKey,
        v: jax.Array | HeadSlice,
        cu_seqlens: jax.Array,
        k_descale: jax.Array,
        v_descale: jax.Array,
        spec: AttentionSpec,
    ) -> PackedContext:
        """See AttentionBackend."""
        config = self._config(spec)
        packed = packing.pack_keys_and_values(
            k, v, cu_seqlens, k_descale, v_descale, spec.fmt,
            block=config.block_k, interpret=self.interpret,
        )  # fmt: skip
        return PackedContext(*packed, config)

    def attend(
        self,
        query: QuantizedQuery,
        context: QuantizedContext,
        *,
        causal: bool,
        softmax_scale: float,
    ) -> AttentionState:
        """See AttentionBackend."""
        q, kv = query.data, context.data
        heads, v_size = context.spec.num_heads, kv.v.shape[2]
        if q.values.shape[1] == 0 or kv.k.shape[1] == 0:
            return AttentionState(
                jnp.zeros((query.num_tokens, heads, v_size), jnp.bfloat16),
                jnp.full((heads, query.num_tokens), -jnp.inf, jnp.float32),
            )
        # The rows of a tile are what the queries were packed in.
        config = dataclasses.replace(kv.config, block_q=q.config.block_q)
        work = kernel.work_table(
            query.cu_seqlens,
            context.cu_seqlens,
            query.num_tokens,
            causal=causal,
            config=config,
        )
        device = self.device or device_of(detect_target().arch)
        splits = choose_splits(
            heads,
            query.num_tokens,
            context.num_tokens,
            query.cu_seqlens.shape[0] - 1,
            v_size,
            causal,
            config,
            device,
        )
        factor = query.descale * context.k_descale * (softmax_scale * math.log2(math.e))
        out, lse = kernel.attend(
            q.values,
            kv.k,
            kv.v,
            kv.nonfinite,
            work,
            jnp.stack([factor, context.v_descale]),
            num_tokens=query.num_tokens,
            causal=causal,
            fmt=context.spec.fmt,
            config=config,
            splits=splits,
            dies=device.dies,
            interpret=self.interpret,
        )
        if splits > 1:
            out, lse = kernel.merge_splits(out, lse)
        return AttentionState(out, lse)

    def _config(self, spec: AttentionSpec) -> KernelConfig:
        return self.config or default_config(detect_target().arch, spec.precision, spec.qk_head_dim)


BACKEND = PallasTritonBackend()
