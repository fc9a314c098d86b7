# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""In programs that forbid implicit promotion of ranks and dtypes everything works as elsewhere."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from tests.inputs import cu_seqlens, qkv
from tests.scales import builders

FMT = jaxfp8.E4M3FNUZ
Q, K, V = (jnp.asarray(x) for x in qkv(np.random.default_rng(0), 40, 60, 2))
# The rows that see it take another way through the XLA backend.
V = V.at[3, 0, 5].set(jnp.nan)
CU_Q, CU_K = (jnp.asarray(cu_seqlens(x)) for x in ([15, 25], [40, 20]))


def attention(backend):
    for precision in ("fp8", "bf16"):
        yield jaxfp8.prefill_attention(
            Q, K, V, CU_Q, CU_K, causal=True, precision=precision, backend=backend
        )


def views(backend):
    key = jaxfp8.AssembledKey(K[:, :, :128], K[:, 0, 128:])
    value = jaxfp8.HeadSlice(jnp.concatenate([V, V], axis=2), 128, 128)
    return jaxfp8.prefill_attention(Q, key, value, CU_Q, CU_K, causal=False, backend=backend)


def parts(backend):
    query = jaxfp8.quantize_query(Q, CU_Q, backend=backend)
    context = jaxfp8.quantize_context(K, V, CU_K, backend=backend)
    return jaxfp8.attend(query, context, causal=False)


def a_pass(backend):
    state = jaxfp8.start_prefill(Q, CU_Q, backend=backend)
    state = jaxfp8.attend_new_tokens(state, Q, V[: len(Q)])
    state = jaxfp8.attend_segment(state, K, V, CU_K)
    return jaxfp8.merge_states(state.attention_state, state.attention_state)


def quantizers(backend):
    del backend
    x = jaxfp8.HeadSlice(Q, 128, 64)
    amax = jaxfp8.per_head_amax(x)
    descale = jaxfp8.descale_from_amax(amax, FMT, margin=1.25)
    return jaxfp8.quantize_per_head(x, descale, FMT), jaxfp8.dynamic_quantize_per_head(Q, FMT)


def calibration(backend):
    del backend
    identity = builders.identity(local_heads=2)
    watched = jaxfp8.Calibrator(identity, tp_rank=0, pp_rank=0, layers={3: "a"})
    watched.arm()
    arrays = K, K, jaxfp8.HeadSlice(K, 64, 128)
    watched.observe(3, *arrays)
    watched.observe(3, *arrays, num_tokens=4)
    watched.observe_amax(3, *map(jaxfp8.per_head_amax, arrays))
    return watched.shard().layers[3].q


CALLS = [attention, views, parts, a_pass, quantizers, calibration]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_without_implicit_promotion(call):
    def run():
        return jax.tree.leaves(list(call("xla")) if call is attention else call("xla"))

    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.numpy_rank_promotion("raise"))
        stack.enter_context(jax.numpy_dtype_promotion("strict"))
        strict = run()
    for actual, expected in zip(strict, run(), strict=True):
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(
            np.asarray(actual, np.float32), np.asarray(expected, np.float32)
        )
