# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Packing for the Hopper attention kernel: token-major arrays to its layouts.

Queries and keys are head-major, [H, T, D]. Sequences of keys begin on a multiple of KEY_GRANULE.
Values are transposed in granules, [H * T / KEY_GRANULE, Dv, KEY_GRANULE]; for FP8 the keys of each
16 are permuted (KEY_ORDER), so that the kernel's probabilities meet them without moving. A NaN in V
is stored as 0, so that a probability of 0 hides it from the rows that do not see its key, and
reported in `first_nan`: since a row sees the keys before some limit, the first NaN of each column
is all that the kernel needs to put NaN where it belongs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8.formats import Fp8Format
from jaxfp8.head_slice import HeadSlice, as_array
from jaxfp8.ops.attention.pallas_mosaic_gpu_kernel import (
    KEY_GRANULE,
    KEY_ORDER,
    UPDATES_OPERANDS,
)
from jaxfp8.ops.attention.pallas_mosaic_gpu_schedule import packed_starts, sequence_of
from jaxfp8.ops.quantize import pallas_mosaic_gpu_kernel as kernels
from jaxfp8.ops.quantize import reference
from jaxfp8.ops.quantize.assembled_key import AssembledKey

# The copy engine wants whole boxes inside the arrays: the longest block of rows or keys.
_MIN_GRANULES = 8

_NEVER = np.iinfo(np.int32).max


def _stored(x: jax.Array, descale: jax.Array, fmt: Fp8Format | None) -> jax.Array:
    """x [T, H, D] as it is stored: quantized for FP8, finite or NaN for bfloat16."""
    if fmt is None:
        top = float(jnp.finfo(x.dtype).max)
        return jnp.clip(x, -top, top)
    if x.dtype == fmt.dtype:
        return x
    return reference.quantize_per_head(x, descale, fmt)


def _granules(num_tokens: int, num_sequences: int) -> int:
    """Granules with room for sequences of any lengths."""
    needed = (num_tokens + num_sequences * (KEY_GRANULE - 1)) // KEY_GRANULE
    return max(needed, _MIN_GRANULES)


def _granule_table(cu_seqlens: jax.Array, num_granules: int) -> jax.Array:
    """int32 [G, 4]: first token, number of tokens, sequence, place in the sequence."""
    starts = packed_starts(cu_seqlens)
    position = jnp.arange(num_granules, dtype=jnp.int32) * KEY_GRANULE
    sequence = sequence_of(starts, position)
    place = position - starts[sequence]
    count = jnp.clip(jnp.diff(cu_seqlens)[sequence] - place, 0, KEY_GRANULE)
    return jnp.stack([cu_seqlens[sequence] + place, count, sequence, place], axis=1)


def pack_query(q: jax.Array | HeadSlice, descale: jax.Array, fmt: Fp8Format | None) -> jax.Array:
    """[H, T', Dqk], T' a multiple of KEY_GRANULE; no row moves, as rows do not mix."""
    num_tokens = q.shape[0]
    num_granules = _granules(num_tokens, 1)
    if kernels.can_pack(q) and num_tokens > 0:
        whole = jnp.array([0, num_tokens], jnp.int32)
        table = _granule_table(whole, num_granules)
        return kernels.pack_rows(q, table, descale, fmt)
    stored = _stored(as_array(q), descale, fmt).transpose(1, 0, 2)
    return jnp.pad(stored, ((0, 0), (0, num_granules * KEY_GRANULE - num_tokens), (0, 0)))


def pack_context(
    k: jax.Array | HeadSlice | AssembledKey,
    v: jax.Array | HeadSlice,
    cu_seqlens: jax.Array,
    k_descale: jax.Array,
    v_descale: jax.Array,
    fmt: Fp8Format | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(k [H, 32 G, Dqk], v [H * G, Dv, 32], first_nan int32 [B, H, Dv]); 32 is KEY_GRANULE."""
    num_sequences = cu_seqlens.shape[0] - 1
    table = _granule_table(cu_seqlens, _granules(k.shape[0], num_sequences))
    if UPDATES_OPERANDS and kernels.can_pack(k) and kernels.can_pack(v):
        descales = jnp.stack([k_descale, v_descale])
        return kernels.pack_rows_and_values(k, v, table, descales, num_sequences, fmt)
    return _pack_with_xla(
        _stored(as_array(k), k_descale, fmt),
        _stored(as_array(v), v_descale, fmt),
        table,
        num_sequences,
        permute=fmt is not None,
    )


def _pack_with_xla(
    k: jax.Array, v: jax.Array, table: jax.Array, num_sequences: int, permute: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same from stored values, for inputs that are FP8 already or lie awkwardly."""
    num_tokens, num_heads, dv = v.shape
    num_granules = table.shape[0]
    row = jnp.arange(KEY_GRANULE, dtype=jnp.int32)
    first, count, sequence, place = (table[:, i, None] for i in range(4))
    exists = (row < count).reshape(-1)
    token = jnp.clip(first + row, 0, num_tokens - 1).reshape(-1)

    def gather(x: jax.Array) -> jax.Array:
        return jnp.where(exists[:, None, None], x[token], jnp.zeros((), x.dtype))

    packed_k = gather(k).transpose(1, 0, 2)

    values = gather(v).reshape(num_granules, KEY_GRANULE, num_heads, dv)
    is_nan = jnp.isnan(values)
    values = jnp.where(is_nan, jnp.zeros((), values.dtype), values)
    where = jnp.where(is_nan, (place + row)[:, :, None, None], _NEVER).min(axis=1)
    first_nan = jax.ops.segment_min(
        where, sequence[:, 0], num_segments=num_sequences, indices_are_sorted=True
    )
    if permute:
        order = np.arange(KEY_GRANULE).reshape(-1, 16)[:, list(KEY_ORDER)].reshape(-1)
        values = values[:, order]
    packed_v = values.transpose(2, 0, 3, 1).reshape(num_heads * num_granules, dv, KEY_GRANULE)
    return packed_k, packed_v, first_nan
