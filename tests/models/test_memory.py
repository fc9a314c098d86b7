# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Peak memory of a pass: the cache and one segment, whatever the length of the context.

Read from what XLA plans for the compiled pass: of a CPU, and of a gfx942 that is not there.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxfp8.models import PrefillBatch, prefill, segment_bytes
from jaxfp8.models.arguments import check_options
from jaxfp8.rocm.compile import described_gfx942
from jaxfp8.rocm.plugin import mi300x_mesh
from tests.models.builders import TINY, tiny_weights
from tests.rocm.tools import needs_rocm_compiler

TOKENS, SEQUENCES, SEGMENT = 32, 2, 1024
CACHE_ROW = TINY.latent_dim * 2
CAPACITIES = (4 * SEGMENT, 16 * SEGMENT)


def traced(capacity: int, precision: str, sharding: NamedSharding | None) -> Any:
    def shape(*dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    offsets = shape(SEQUENCES + 1, dtype=np.int32)
    return prefill._prefill_layer.trace(
        TINY,
        jax.tree.map(lambda x: shape(*x.shape), tiny_weights()),
        shape(TOKENS, TINY.hidden_size),
        shape(capacity, TINY.latent_dim),
        PrefillBatch(offsets, shape(SEQUENCES, dtype=np.int32), offsets),
        None,
        options=check_options(SEGMENT, precision, "bf16", None, None),
    )  # fmt: skip


def assert_cache_and_one_segment(short: Any, long: Any, segment_limit: int) -> None:
    """Four times the cache adds its own bytes, and nothing of what the pass needs beside it."""
    more = (CAPACITIES[1] - CAPACITIES[0]) * CACHE_ROW
    assert long.argument_size_in_bytes - short.argument_size_in_bytes == more
    # The cache comes back in the place where it was.
    for memory, capacity in zip((short, long), CAPACITIES, strict=True):
        assert memory.alias_size_in_bytes == capacity * CACHE_ROW
    # What is held for each token of the context takes a byte of each at least. Less is how XLA
    # packs what it holds: it differs between these capacities, and not between the next two.
    assert abs(long.temp_size_in_bytes - short.temp_size_in_bytes) < CAPACITIES[1] - CAPACITIES[0]
    assert long.temp_size_in_bytes < segment_limit


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason="XLA of JAX 0.10 moves bfloat16 on CPUs by way of float32 copies of the whole cache",
)
def test_on_a_cpu():
    """On a CPU, XLA keeps K and V of a segment in several forms: within six times the formula."""
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    short, long = (
        traced(capacity, "fp8", None).lower().compile(options).memory_analysis()
        for capacity in CAPACITIES
    )
    assert_cache_and_one_segment(short, long, 6 * segment_bytes(TINY, 4, SEGMENT, "fp8"))


@pytest.mark.slow
@needs_rocm_compiler
def test_on_gfx942():
    """Up-projection, quantization and attention in the kernels of the target: the formula holds,
    with a fifth for what belongs to the new tokens.
    """
    sharding = NamedSharding(mi300x_mesh(), PartitionSpec())
    memories = []
    for capacity in CAPACITIES:
        with described_gfx942():
            lowered = traced(capacity, "fp8", sharding).lower(lowering_platforms=("rocm",))
        memories.append(lowered.compile().memory_analysis())
    limit = 1.2 * segment_bytes(TINY, 4, SEGMENT, "fp8")
    assert_cache_and_one_segment(*memories, limit)
