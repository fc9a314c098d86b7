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
from jaxfp8.ops.attention.pallas_mosaic_gpu_kernel import KEY_GRANULE, KEY_ORDER
from jaxfp8.ops.attention.pallas_mosaic_gpu_schedule import packed_starts, sequence_of

# The copy engine wants whole boxes inside the arrays: the longest block of rows or keys.
_MIN_QUERIES = 64
_MIN_KEYS = 256

_NEVER = np.iinfo(np.int32).max


def _stored(x: jax.Array, descale: jax.Array, fmt: Fp8Format | None) -> jax.Array:
    """x [T, H, D] as it is stored: quantized for FP8, finite or NaN for bfloat16."""
    if fmt is None:
        top = float(jnp.finfo(x.dtype).max)
        return jnp.clip(x, -top, top)
    if x.dtype == fmt.dtype:
        return x
    scaled = x.astype(jnp.float32) / descale[None, :, None]
    return jnp.clip(scaled, -fmt.max, fmt.max).astype(fmt.dtype)


def packed_queries(num_tokens: int) -> int:
    """Rows of packed queries: a multiple of 8."""
    return max(-(-num_tokens // 8) * 8, _MIN_QUERIES)


def packed_keys(num_tokens: int, num_sequences: int) -> int:
    """Rows of packed keys: a multiple of KEY_GRANULE with room for any lengths."""
    granules = (num_tokens + num_sequences * (KEY_GRANULE - 1)) // KEY_GRANULE
    return max(granules * KEY_GRANULE, _MIN_KEYS)


def pack_query(
    q: jax.Array | HeadSlice, cu_seqlens: jax.Array, descale: jax.Array, fmt: Fp8Format | None
) -> jax.Array:
    """[H, packed_queries(Tq), Dqk]. Rows past cu_seqlens[-1] are the caller's, quantized."""
    del cu_seqlens  # rows do not mix, so what lies in unused rows does not matter
    x = as_array(q)
    stored = _stored(x, descale, fmt).transpose(1, 0, 2)
    return jnp.pad(stored, ((0, 0), (0, packed_queries(x.shape[0]) - x.shape[0]), (0, 0)))


def pack_context(
    k: jax.Array | HeadSlice,
    v: jax.Array | HeadSlice,
    cu_seqlens: jax.Array,
    k_descale: jax.Array,
    v_descale: jax.Array,
    fmt: Fp8Format | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(k [H, T', Dqk], v [H * T' / 32, Dv, 32], first_nan int32 [B, H, Dv]), T' = packed_keys."""
    keys, values = as_array(k), as_array(v)
    num_tokens, num_heads, dv = values.shape
    num_sequences = cu_seqlens.shape[0] - 1
    rows = packed_keys(num_tokens, num_sequences)
    granules = rows // KEY_GRANULE

    starts = packed_starts(cu_seqlens)
    position = jnp.arange(rows, dtype=jnp.int32)
    sequence = sequence_of(starts, position)
    local = position - starts[sequence]
    exists = local < jnp.diff(cu_seqlens)[sequence]
    token = jnp.clip(cu_seqlens[sequence] + local, 0, num_tokens - 1)

    def gather(x: jax.Array) -> jax.Array:
        return jnp.where(exists[:, None, None], x[token], jnp.zeros((), x.dtype))

    packed_k = gather(_stored(keys, k_descale, fmt)).transpose(1, 0, 2)

    stored = gather(_stored(values, v_descale, fmt))
    is_nan = jnp.isnan(stored)
    stored = jnp.where(is_nan, jnp.zeros((), stored.dtype), stored)
    where = jnp.where(is_nan, local[:, None, None], _NEVER)
    where = where.reshape(granules, KEY_GRANULE, num_heads, dv).min(axis=1)
    first_nan = jax.ops.segment_min(
        where, sequence[::KEY_GRANULE], num_segments=num_sequences, indices_are_sorted=True
    )
    if fmt is not None:
        order = np.arange(KEY_GRANULE).reshape(-1, 16)[:, list(KEY_ORDER)].reshape(-1)
        stored = stored.reshape(granules, KEY_GRANULE, num_heads, dv)[:, order]
    blocks = stored.reshape(granules, KEY_GRANULE, num_heads, dv).transpose(2, 0, 3, 1)
    return packed_k, blocks.reshape(num_heads * granules, dv, KEY_GRANULE), first_nan


def amax(x: jax.Array | HeadSlice, num_tokens: jax.Array) -> jax.Array:
    """float32 [H]: the largest finite |x| of each head over the first `num_tokens` rows, else 0."""
    values = jnp.abs(as_array(x).astype(jnp.float32))
    row = jnp.arange(values.shape[0], dtype=jnp.int32)[:, None, None]
    counted = (row < num_tokens) & jnp.isfinite(values)
    return jnp.max(jnp.where(counted, values, 0.0), axis=(0, 2), initial=0.0)
