# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""In programs that forbid implicit promotion of ranks and dtypes everything works as elsewhere."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8 import models
from tests.inputs import cu_seqlens, qkv
from tests.scales import builders

FMT = jaxfp8.E4M3FNUZ
Q, K, V = (jnp.asarray(x) for x in qkv(np.random.default_rng(0), 40, 60, 2))
CU_Q, CU_K = (jnp.asarray(cu_seqlens(x)) for x in ([15, 25], [40, 20]))


def attention(backend):
    return [
        jaxfp8.prefill_attention(Q, K, V, CU_Q, CU_K, causal=causal, precision=p, backend=backend)
        for p in ("fp8", "bf16")
        for causal in (False, True)
    ]


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


@pytest.fixture
def strict():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


CALLS = [attention, views, parts, a_pass, quantizers]


@pytest.mark.parametrize("backend", ["xla", "interpret"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_tracing(call, backend, strict):
    """Promotion is refused where a program is traced: nothing needs to be compiled or run."""
    jax.eval_shape(lambda: call(backend))


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize("rope_theta", [None, 10000.0])
def test_tracing_a_layer(precision, rope_theta, strict):
    config = dataclasses.replace(models.SMALL, rope_theta=rope_theta)
    batch = models.PrefillBatch(
        cu_seqlens_q=jnp.array([0, 40, 64], jnp.int32),
        context_lens=jnp.array([64, 3], jnp.int32),
        cu_seqlens_cache=jnp.array([0, 128, 256], jnp.int32),
    )

    def layer(hidden):
        weights = models.random_weights(config, jax.random.key(0))
        cache = models.empty_cache(config, 256)
        return models.prefill_layer(
            config, weights, hidden, cache, batch, segment=128, precision=precision
        )

    jax.eval_shape(layer, jax.ShapeDtypeStruct((64, config.hidden_size), jnp.bfloat16))


def test_calibration(strict):
    identity = builders.identity(local_heads=2)
    watched = jaxfp8.Calibrator(identity, tp_rank=0, pp_rank=0, layers={3: "a"})
    watched.arm()
    arrays = K, K, jaxfp8.HeadSlice(K, 64, 128)
    watched.observe(3, *arrays)
    watched.observe(3, *arrays, num_tokens=4)
    watched.observe_amax(3, *map(jaxfp8.per_head_amax, arrays))
    expected = np.abs(np.asarray(K, np.float32)).max(axis=(0, 2))
    np.testing.assert_array_equal(watched.shard().layers[3].q, expected)


@pytest.mark.parametrize("promote", [lambda x: x + x[0], lambda x: x + jnp.ones(3, jnp.bfloat16)])
def test_promotion_is_refused_even_where_it_was_compiled_before(promote):
    """What the tests above rely on."""
    compiled = jax.jit(promote)
    x = jnp.ones((3, 3), jnp.float32)
    compiled(x)
    with (
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
        pytest.raises(ValueError, match="[Pp]romotion"),
    ):
        compiled(x)
