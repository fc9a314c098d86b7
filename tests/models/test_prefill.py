# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""A pass through the layer with its cache, against the whole layer in float64."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxfp8
from jaxfp8 import models
from jaxfp8.models import MlaConfig, PrefillBatch, prefill_layer
from tests import oracle as attention_oracle
from tests.inputs import cu_seqlens
from tests.models import oracle
from tests.models.builders import TINY, checkpoint_tensors, hidden_states, tiny_weights
from tests.tolerances import relative_error

pytestmark = pytest.mark.usefixtures("compiled_fast")

# One bucket for all tests of a precision, so that it is compiled once.
TOKENS, CAPACITY, SEQUENCES, SEGMENT = 48, 256, 4, 32
WEIGHTS = tiny_weights()


class Case(NamedTuple):
    """A batch, and what the layer makes of its sequences."""

    hidden: np.ndarray  # [TOKENS, hidden_size], NaN past the end
    cache: np.ndarray  # [CAPACITY, latent_dim], NaN where there is no context
    batch: PrefillBatch
    whole: list[oracle.Layer]


def make_case(
    context: list[int], new: list[int], spare: list[int], *, seed: int, config: MlaConfig = TINY
) -> Case:
    """Sequences of context[b] + new[b] tokens in regions with room for spare[b] more."""
    rng = np.random.default_rng(seed)
    sequences = hidden_states(rng, np.add(context, new))
    tensors = checkpoint_tensors(WEIGHTS)
    whole = [oracle.layer(config, tensors, x) for x in sequences]
    regions = cu_seqlens(np.add(np.add(context, new), spare))
    hidden = np.full((TOKENS, TINY.hidden_size), np.nan, ml_dtypes.bfloat16)
    cache = np.full((CAPACITY, TINY.latent_dim), np.nan, ml_dtypes.bfloat16)
    rows = cu_seqlens(new)
    for b, (x, expected) in enumerate(zip(sequences, whole, strict=True)):
        hidden[rows[b] : rows[b + 1]] = x[context[b] :]
        held = expected.latents[: context[b]].astype(ml_dtypes.bfloat16)
        cache[regions[b] : regions[b] + context[b]] = held
    return Case(hidden, cache, PrefillBatch(rows, np.array(context, np.int32), regions), whole)


def run(case: Case, config: MlaConfig = TINY, **options: Any) -> models.PrefilledLayer:
    return prefill_layer(
        config, WEIGHTS, case.hidden, case.cache, case.batch, segment=SEGMENT, **options
    )


def scales_of(case: Case) -> jaxfp8.LayerScales:
    """What a calibration on these sequences would give."""
    values = (np.concatenate([getattr(x, name) for x in case.whole]) for name in "qkv")
    return jaxfp8.LayerScales(*(attention_oracle.descale(x, jaxfp8.E4M3FNUZ.name) for x in values))


def assert_pass(case: Case, result: models.PrefilledLayer, precision: str) -> None:
    """The output is the layer's; new latents are in their rows, and nothing else has changed."""
    out, cache = np.asarray(result.out, np.float64), np.asarray(result.cache)
    expected_cache = case.cache.copy()
    rows, regions = case.batch.cu_seqlens_q, case.batch.cu_seqlens_cache
    for b, (context, whole) in enumerate(zip(case.batch.context_lens, case.whole, strict=True)):
        count = rows[b + 1] - rows[b]
        if count == 0:
            continue
        error = relative_error(out[rows[b] : rows[b + 1]], whole.out[context:])
        assert error < oracle.LAYER_ERROR[precision], f"sequence {b}"
        at = slice(regions[b] + context, regions[b] + context + count)
        new = cache[at].astype(np.float64)
        # One rounding to bfloat16; before it, sums of float32.
        np.testing.assert_allclose(new, whole.latents[context:], rtol=2**-8, atol=1e-4)
        expected_cache[at] = cache[at]
    assert not out[rows[-1] :].any()
    np.testing.assert_array_equal(cache.view(np.uint16), expected_cache.view(np.uint16))


BATCHES = {
    "several segments": ([100, 0, 37, 5], [13, 20, 1, 14], [0, 3, 0, 20]),
    "one new sequence, one that waits": ([0, 63, 0, 0], [30, 0, 0, 0], [5, 0, 0, 9]),
    "exactly full": ([96, 32, 80, 0], [16, 16, 16, 0], [0, 0, 0, 0]),
    "nothing": ([0, 0, 0, 0], [0, 0, 0, 0], [0, 9, 0, 0]),
}


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_bf16(lengths):
    case = make_case(*lengths, seed=0)
    assert_pass(case, run(case), "bf16")


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_fp8_static(lengths):
    case = make_case(*lengths, seed=1)
    scales = scales_of(make_case(*BATCHES["several segments"], seed=1))
    result = run(case, precision="fp8", new_tokens_precision="fp8", scales=scales)
    assert_pass(case, result, "fp8")


def test_fp8_dynamic_with_a_rotary_embedding():
    config = dataclasses.replace(TINY, rope_theta=10_000.0)
    case = make_case(*BATCHES["several segments"], seed=2, config=config)
    result = run(case, config, precision="fp8")
    assert_pass(case, result, "fp8")
    # It was FP8 indeed, over the context.
    error = relative_error(result.out[:13], case.whole[0].out[100:])
    assert error > oracle.LAYER_ERROR["bf16"]
    # The new tokens were not: sequence 1 has no context.
    error = relative_error(result.out[13:33], case.whole[1].out)
    assert error < oracle.LAYER_ERROR["bf16"]


def test_other_lengths_compile_nothing_and_the_cache_is_donated():
    def run_donating(lengths: list[list[int]]) -> None:
        case = make_case(*lengths, seed=3)
        cache = jnp.asarray(case.cache)
        result = run(case._replace(cache=cache))
        assert cache.is_deleted()
        assert_pass(case, result, "bf16")

    compiled = []

    def on_event(event: str, seconds: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(seconds)

    run_donating([[1, 0, 0, 0], [1, 2, 3, 4], [0, 0, 0, 0]])
    jax.monitoring.register_event_duration_secs_listener(on_event)
    try:
        for lengths in BATCHES.values():
            run_donating(lengths)
    finally:
        jax.monitoring.unregister_event_duration_listener(on_event)
    assert compiled == []
