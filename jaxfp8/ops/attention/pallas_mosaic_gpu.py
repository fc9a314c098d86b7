# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The Hopper backend: Pallas lowered through Mosaic GPU, for sm90.

pallas_mosaic_gpu_kernel.py is the kernel, pallas_mosaic_gpu_schedule.py its task table,
ops/quantize/pallas_mosaic_gpu.py the packing.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxfp8.formats import E4M3FN
from jaxfp8.head_slice import HeadSlice, as_array
from jaxfp8.ops.attention import pallas_mosaic_gpu_kernel as kernels
from jaxfp8.ops.attention import pallas_mosaic_gpu_schedule as schedule
from jaxfp8.ops.attention.base import (
    AttentionSpec,
    Precision,
    QuantizedContext,
    QuantizedQuery,
)
from jaxfp8.ops.attention.pallas_mosaic_gpu_consumer import LOG2_E
from jaxfp8.ops.quantize import pallas_mosaic_gpu as packing
from jaxfp8.ops.quantize import reference
from jaxfp8.ops.quantize.assembled_key import AssembledKey
from jaxfp8.states import AttentionState
from jaxfp8.targets import Target

_HEAD_DIMS = ((192, 128), (128, 128))

_CONFIGS = {
    "fp8": kernels.KernelConfig(block_kv=160, consumers=2, stages=3),
    "bf16": kernels.KernelConfig(block_kv=128, consumers=2, stages=2),
}

# Multiprocessors of an H100 or H200 (SXM); a chip with fewer runs the same grid in turns.
_NUM_SMS = 132

# No piece of a KV split is shorter than this many blocks: its prologue would cost more than the
# idle multiprocessors it occupies.
_MIN_PART_BLOCKS = 4

# The matrix unit's float32 accumulator loses a little at every addition: over 1,048,576 keys of
# nonzero mean in one piece the output came out 0.5 % small. FP8 is added up outside of it.
_BF16_MAX_PART = 2**18


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedContext:
    """Keys and values in the kernel's layouts; see ops/quantize/pallas_mosaic_gpu.py."""

    k: jax.Array
    v: jax.Array
    first_nan: jax.Array
    first_nan_of_head: jax.Array


def _num_parts(num_tokens: int, num_keys: int, num_heads: int, precision: Precision) -> int:
    """Pieces to cut the keys into."""
    config = _CONFIGS[precision]
    # So many that the tiles occupy every multiprocessor.
    tiles = max(1, -(-num_tokens // config.block_q)) * num_heads
    blocks = -(-num_keys // config.block_kv)
    parts = min(_NUM_SMS // tiles, blocks // _MIN_PART_BLOCKS)
    if precision == "bf16":
        parts = max(parts, -(-num_keys // _BF16_MAX_PART))
    return max(1, parts)


def _merge_parts(out: jax.Array, lse: jax.Array) -> AttentionState:
    """Merge float32 [P, Tq, H, Dv] and [P, H, Tq] by their log-sum-exps."""
    top = jnp.max(lse, axis=0)
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.exp(lse - top)
    total = jnp.sum(weights, axis=0)
    share = weights / jnp.where(total == 0, 1.0, total)
    merged = jnp.sum(share.transpose(0, 2, 1)[..., None] * out, axis=0)
    return AttentionState(merged.astype(jnp.bfloat16), top + jnp.log(total))


class MosaicGpuBackend:
    """Attention on Hopper's matrix units; ops/attention/base.py says what a backend provides."""

    name = "pallas_mosaic_gpu"

    def unsupported(self, spec: AttentionSpec, target: Target) -> str | None:
        """Why the request cannot be served; None if it can."""
        if target.arch != "sm90":
            return f"needs an NVIDIA Hopper GPU (sm90), and the target is {target.arch}"
        if spec.precision == "fp8" and spec.fmt != E4M3FN:
            return f"Hopper's FP8 is {E4M3FN}, not {spec.fmt}"
        served = [dv for dqk, dv in _HEAD_DIMS if dqk == spec.qk_head_dim]
        if not served or spec.v_head_dim not in (None, *served):
            return (
                f"head dims ({spec.qk_head_dim}, {spec.v_head_dim}) have no kernel; "
                f"served are {', '.join(map(str, _HEAD_DIMS))}; use backend='xla'"
            )
        return None

    def amax(self, x: jax.Array | HeadSlice | AssembledKey, num_tokens: jax.Array) -> jax.Array:
        """float32 [H]: largest finite |x| of each head over the first `num_tokens` rows."""
        return reference.per_head_amax(as_array(x), num_tokens)

    def pack_query(
        self,
        q: jax.Array | HeadSlice,
        cu_seqlens: jax.Array,
        descale: jax.Array,
        spec: AttentionSpec,
    ) -> jax.Array:
        """[H, Tq rounded up, Dqk]."""
        return packing.pack_query(q, descale, spec.fmt)

    def pack_context(
        self,
        k: jax.Array | HeadSlice | AssembledKey,
        v: jax.Array | HeadSlice,
        cu_seqlens: jax.Array,
        k_descale: jax.Array,
        v_descale: jax.Array,
        spec: AttentionSpec,
    ) -> PackedContext | None:
        """The context packed; None where there is no room for a key."""
        if k.shape[0] == 0 or cu_seqlens.shape[0] == 1:
            return None
        k, v, first_nan = packing.pack_context(k, v, cu_seqlens, k_descale, v_descale, spec.fmt)
        return PackedContext(k, v, first_nan, jnp.min(first_nan, axis=2))

    def attend(
        self,
        query: QuantizedQuery,
        context: QuantizedContext,
        *,
        causal: bool,
        softmax_scale: float,
    ) -> AttentionState:
        """Attention of packed queries over a packed context."""
        num_tokens, num_heads = query.num_tokens, query.spec.num_heads
        packed: PackedContext = context.data
        precision = query.spec.precision
        config = _CONFIGS[precision]
        parts = _num_parts(num_tokens, context.num_tokens, num_heads, precision)
        tasks = schedule.attention_tasks(
            query.cu_seqlens,
            context.cu_seqlens,
            num_tokens,
            block_q=config.block_q,
            block_kv=config.block_kv,
            causal=causal,
            parts=parts,
        )
        # A scale of 0 would turn masked scores, -inf, into NaN.
        exponent = query.descale * context.k_descale * (softmax_scale * LOG2_E)
        scales = jnp.stack([jnp.maximum(exponent, 1e-30), context.v_descale], axis=1)
        out, lse = kernels.attention_kernel(
            query.data,
            packed.k,
            packed.v,
            packed.first_nan,
            packed.first_nan_of_head,
            tasks,
            scales.astype(jnp.float32),
            config=config,
            causal=causal,
            parts=parts,
            # Tasks of one length run head by head, so that K and V are read from memory once.
            head_major=not causal and query.cu_seqlens.shape[0] == 2,
            num_blocks=min(_NUM_SMS, (tasks.shape[0] - 1) * num_heads),
            num_tokens=num_tokens,
        )
        return AttentionState(out, lse) if parts == 1 else _merge_parts(out, lse)


BACKEND = MosaicGpuBackend()
