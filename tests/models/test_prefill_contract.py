# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""What a pass promises beside its numbers: errors before compilation, donation, skipped segments,
scan.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxfp8
from jaxfp8.models import (
    MlaWeights,
    PrefillBatch,
    attend_context,
    empty_cache,
    mla,
    prefill,
    prefill_layer,
    rank_weights,
)  # fmt: skip
from tests.inputs import cu_seqlens
from tests.models.builders import TINY, hidden_states, tiny_weights

pytestmark = pytest.mark.usefixtures("compiled_fast")

WEIGHTS = tiny_weights()
HIDDEN = hidden_states(np.random.default_rng(0), [16])[0]
BATCH = PrefillBatch(cu_seqlens([9, 7]), np.array([100, 20], np.int32), cu_seqlens([109, 31]))
SCALES = jaxfp8.LayerScales(*(np.full(4, 0.01, np.float32),) * 3)


class Compiled(Exception):
    """The pass came as far as to be traced."""


@pytest.fixture
def untraced(monkeypatch):
    def refuse(*args, **kwargs):
        raise Compiled

    monkeypatch.setattr(prefill, "_prefill_layer", refuse)


def call(config=TINY, weights=WEIGHTS, hidden=HIDDEN, batch=BATCH, **options):
    cache = options.pop("cache", None)
    cache = empty_cache(TINY, 140) if cache is None else cache
    try:
        return prefill_layer(config, weights, hidden, cache, batch, **options)
    finally:
        if not isinstance(cache, jax.core.Tracer):
            assert not cache.is_deleted(), "an error must leave the cache as it was"


BAD = {
    "cache shorter than the context": (
        {"cache": jnp.zeros((120, 128), jnp.bfloat16)},
        ValueError,
        "cu_seqlens_cache: expected to end within the 120 tokens of cache, got 140",
    ),
    "region shorter than the context": (
        {"batch": BATCH._replace(context_lens=np.array([101, 20], np.int32))},
        ValueError,
        "cache: expected room for the context and the new tokens of every sequence "
        "(cu_seqlens_cache), got sequence 0: 109 rows for 101 + 9 tokens",
    ),
    "cache of another model": (
        {"cache": jnp.zeros((140, 576), jnp.bfloat16)},
        ValueError,
        "cache: expected shape [capacity, 128] to match config, got [140, 576]",
    ),
    "cache dtype": (
        {"cache": jnp.zeros((140, 128), jnp.float32)},
        TypeError,
        "cache: expected dtype bfloat16, got float32",
    ),
    "hidden of another model": (
        {"hidden": HIDDEN[:, :90]},
        ValueError,
        "hidden: expected shape [T, 96] to match config, got [16, 90]",
    ),
    "hidden dtype": (
        {"hidden": HIDDEN.astype(np.float32)},
        TypeError,
        "hidden: expected dtype bfloat16, got float32",
    ),
    "new tokens past hidden": (
        {"hidden": HIDDEN[:15]},
        ValueError,
        "cu_seqlens_q: expected to end within the 15 tokens of hidden, got 16",
    ),
    "weights of another kind": (
        {"weights": tuple(WEIGHTS)},
        TypeError,
        "weights: expected an MlaWeights, got tuple",
    ),
    "weights of another model": (
        {"config": dataclasses.replace(TINY, q_lora_rank=32)},
        ValueError,
        "weights.q_a_proj: expected shape [32, 96] to match config, got [48, 96]",
    ),
    "a weight that is missing": (
        {"weights": WEIGHTS._replace(q_b_proj=None)},
        TypeError,
        "weights.q_b_proj: expected a JAX or NumPy array of shape [H, qk_head_dim, q_lora_rank], "
        "got NoneType",
    ),
    "weights of other ranks mixed": (
        {"weights": WEIGHTS._replace(o_proj=rank_weights(WEIGHTS, 0, 2).o_proj)},
        ValueError,
        "weights.o_proj: expected shape [96, 4, 128] to match config, got [96, 2, 128]",
    ),
    "weights without heads": (
        {"weights": WEIGHTS._replace(q_b_proj=WEIGHTS.q_b_proj[:0])},
        ValueError,
        "weights.q_b_proj: expected at least one head, got none",
    ),
    "weights dtype": (
        {"weights": WEIGHTS._replace(kv_b_proj=WEIGHTS.kv_b_proj.astype(jnp.float32))},
        TypeError,
        "weights.kv_b_proj: expected dtype bfloat16, got float32",
    ),
    "no gate": (
        {"weights": WEIGHTS._replace(g_proj=None)},
        ValueError,
        "weights.g_proj: expected an array with config.output_gate=True, got None",
    ),
    "a gate that is not used": (
        {"config": dataclasses.replace(TINY, output_gate=False)},
        ValueError,
        "weights.g_proj: expected None with config.output_gate=False, got an array",
    ),
    "config kind": ({"config": {}}, TypeError, "config: expected an MlaConfig, got dict"),
    "batch kind": ({"batch": tuple(BATCH)}, TypeError, "batch: expected a PrefillBatch, got tuple"),
    "backend kind": ({"backend": []}, TypeError, "backend: expected a name or None, got list"),
    "format kind": (
        {"fmt": []},
        TypeError,
        "fmt: expected jaxfp8.E4M3FNUZ or jaxfp8.E4M3FN, got list",
    ),
    "precision kind": (
        {"precision": []},
        ValueError,
        "precision: expected 'fp8' or 'bf16', got []",
    ),
    "segment": ({"segment": 0}, ValueError, "segment: expected a number of tokens >= 1, got 0"),
    "segment kind": (
        {"segment": 64.0},
        ValueError,
        "segment: expected a number of tokens >= 1, got 64.0",
    ),
    "precision": (
        {"precision": "int8"},
        ValueError,
        "precision: expected 'fp8' or 'bf16', got 'int8'",
    ),
    "new tokens alone in FP8": (
        {"new_tokens_precision": "fp8"},
        ValueError,
        "new_tokens_precision: expected 'bf16' in a pass of precision 'bf16', got 'fp8'",
    ),
    "scales without FP8": (
        {"scales": SCALES},
        ValueError,
        "scales: expected None with precision='bf16', which has no scales to use",
    ),
    "scales of all heads for a rank": (
        {"scales": SCALES, "precision": "fp8", "weights": rank_weights(WEIGHTS, 0, 2)},
        ValueError,
        "scales.q: expected shape [2], one per head of q, got [4]",
    ),
    "scales kind": (
        {"scales": tuple(SCALES), "precision": "fp8"},
        TypeError,
        "scales: expected a LayerScales or None, got tuple",
    ),
    "scales that are not finite": (
        {"scales": SCALES._replace(v=np.array([1, 2, np.inf, 1], np.float32)), "precision": "fp8"},
        ValueError,
        "scales.v: expected finite values > 0, got inf for head 2",
    ),
}


@pytest.mark.parametrize(("change", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_before_anything_is_traced(untraced, change, error, message):
    with pytest.raises(error) as caught:
        call(**change)
    assert str(caught.value) == message


def test_the_input_that_these_are_changes_of_is_good(untraced):
    with pytest.raises(Compiled):
        call(precision="fp8", new_tokens_precision="fp8", scales=SCALES)


def test_a_backend_that_does_not_serve_leaves_the_cache():
    with pytest.raises(NotImplementedError, match="backend pallas_triton"):
        call(precision="fp8", backend="pallas_triton")
    with pytest.raises(ValueError, match="backend: expected None or one of"):
        call(backend="cuda")


@pytest.mark.parametrize(
    ("context", "segments"), [([0, 0], 0), ([1, 0], 1), ([40, 24], 1), ([40, 25], 2), ([99, 93], 3)]
)
def test_segments_past_the_context_are_not_run(monkeypatch, context, segments):
    """Each segment adds 1 to the accumulator."""

    def count(state, config, weights, cached, cu_seqlens_k, scales):
        assert cached.shape == (64, TINY.latent_dim)
        return dataclasses.replace(state, acc=state.acc + 1)

    monkeypatch.setattr(mla, "attend_latents", count)
    q = jnp.ones((16, 4, 192), jnp.bfloat16)
    state = jaxfp8.start_prefill(q, BATCH.cu_seqlens_q, precision="bf16")
    walk = jax.jit(lambda batch, cache: walked(state, batch, cache))
    batch = BATCH._replace(context_lens=np.array(context, np.int32))
    batch = batch._replace(cu_seqlens_cache=cu_seqlens([500, 500]))
    assert walk(batch, empty_cache(TINY, 1000))[0, 0, 0] == segments


def walked(state, batch, cache):
    return attend_context(state, TINY, WEIGHTS, cache, batch, segment=64).acc


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"segment": -1}, ValueError, "segment: expected a number of tokens >= 1, got -1"),
        ({"segment": False}, ValueError, "segment: expected a number of tokens >= 1, got False"),
        ({"segment": 2.5}, ValueError, "segment: expected a number of tokens >= 1, got 2.5"),
        ({"config": {}}, TypeError, "config: expected an MlaConfig, got dict"),
        ({"batch": None}, TypeError, "batch: expected a PrefillBatch, got NoneType"),
        ({"batch": PrefillBatch([0], [], [0])}, TypeError, "cu_seqlens_q: expected a JAX or NumPy"),
        ({"scales": {}}, TypeError, "scales: expected a LayerScales or None, got dict"),
        ({"scales": SCALES}, ValueError, "scales: expected None with precision='bf16'"),
        ({"cache": HIDDEN}, ValueError, "cache: expected shape"),
    ],
)
def test_a_context_is_not_skipped_for_a_mistake(change, error, message):
    q = jax.ShapeDtypeStruct((16, 4, 192), jnp.bfloat16)
    given = {
        "config": TINY, "weights": WEIGHTS, "cache": empty_cache(TINY, 140), "batch": BATCH,
        "segment": 64, **change,
    }  # fmt: skip

    def walk(q):
        state = jaxfp8.start_prefill(q, BATCH.cu_seqlens_q, precision="bf16")
        return attend_context(state, **given)

    with pytest.raises(error, match=message):
        jax.eval_shape(walk, q)


def test_a_context_of_numpy_arrays():
    """Inside a caller's jit too, where the loop indexes them by traced numbers."""
    cache = np.zeros((140, TINY.latent_dim), HIDDEN.dtype)

    def walk(q):
        state = jaxfp8.start_prefill(q, BATCH.cu_seqlens_q, precision="bf16")
        batch = PrefillBatch(*map(np.asarray, BATCH))
        return attend_context(state, TINY, WEIGHTS, cache, batch, segment=64).acc

    assert jax.eval_shape(walk, jax.ShapeDtypeStruct((16, 4, 192), jnp.bfloat16)).ndim == 3


def test_an_empty_cache_has_no_segments():
    q = jnp.ones((16, 4, 192), jnp.bfloat16)
    state = jaxfp8.start_prefill(q, BATCH.cu_seqlens_q, precision="bf16")
    assert attend_context(state, TINY, WEIGHTS, empty_cache(TINY, 0), BATCH, segment=64) is state


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("tokens", "capacity", "sequences"), [(0, 140, 2), (16, 140, 0), (0, 0, 2), (0, 0, 0)]
)
def test_nothing_to_do(precision, tokens, capacity, sequences):
    zeros = np.zeros(sequences + 1, np.int32)
    batch = PrefillBatch(zeros, zeros[1:], zeros)
    out, cache = jax.eval_shape(
        lambda hidden, cache: call(hidden=hidden, cache=cache, batch=batch, precision=precision),
        jax.ShapeDtypeStruct((tokens, TINY.hidden_size), jnp.bfloat16),
        jax.ShapeDtypeStruct((capacity, TINY.latent_dim), jnp.bfloat16),
    )
    assert out.shape == (tokens, TINY.hidden_size)
    assert cache.shape == (capacity, TINY.latent_dim)


def test_no_tokens_at_all():
    zeros = np.zeros(1, np.int32)
    result = prefill_layer(
        TINY, WEIGHTS, HIDDEN[:0], empty_cache(TINY, 0), PrefillBatch(zeros, zeros[1:], zeros)
    )
    assert result.out.shape == (0, TINY.hidden_size)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_stack_of_layers_scans(precision):
    """Over stacked weights and caches, in a caller's jit: traced, not run."""
    layers = 3
    stacked = MlaWeights(*(jnp.stack([x] * layers) for x in WEIGHTS))
    caches = jnp.stack([empty_cache(TINY, 140)] * layers)
    scales = jaxfp8.LayerScales(*(jnp.stack([jnp.asarray(x)] * layers) for x in SCALES))

    def stack(hidden, caches, batch):
        def layer(hidden, xs):
            weights, cache, scales = xs
            out, cache = prefill_layer(
                TINY, weights, hidden, cache, batch, segment=64, precision=precision,
                scales=scales if precision == "fp8" else None,
            )  # fmt: skip
            return hidden + out.astype(hidden.dtype), cache

        return jax.lax.scan(layer, hidden, (stacked, caches, scales))

    out, caches = jax.eval_shape(stack, HIDDEN, caches, BATCH)
    assert (out.shape, out.dtype) == ((16, 96), ml_dtypes.bfloat16)
    assert caches.shape == (3, 140, 128)
