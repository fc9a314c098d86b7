# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The parts of the layer, each against float64."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8.models import mla, random_weights, rank_weights
from jaxfp8.models.weights import weight_shapes
from tests.models import oracle
from tests.models.builders import TINY, checkpoint_tensors, hidden_states, tiny_weights
from tests.tolerances import relative_error

pytestmark = pytest.mark.usefixtures("compiled_fast")

queries, latents, up_project, gated_output = (
    jax.jit(function, static_argnums=0)
    for function in (mla.queries, mla.latents, mla.up_project, mla.gated_output)
)
ROTARY = dataclasses.replace(TINY, rope_theta=10_000.0)
WEIGHTS = tiny_weights(1)
HIDDEN = hidden_states(np.random.default_rng(1), [23])[0]
POSITIONS = jnp.arange(23, dtype=jnp.int32)
# Relative error of one rounding to bfloat16, with half as much again for chance.
ROUNDING = oracle.LAYER_ERROR["bf16"] / 7**0.5


@pytest.fixture(scope="module", params=[TINY, ROTARY], ids=["nope", "rotary"])
def case(request):
    whole = oracle.layer(request.param, checkpoint_tensors(WEIGHTS), HIDDEN)
    return request.param, whole


def test_queries(case):
    config, whole = case
    q = queries(config, WEIGHTS, HIDDEN, POSITIONS)
    assert q.dtype == jnp.bfloat16
    # The latent, Q and, rotated, Q again.
    assert relative_error(q, whole.q) < 3**0.5 * ROUNDING


def test_latents(case):
    config, whole = case
    cached = latents(config, WEIGHTS, HIDDEN, POSITIONS)
    assert cached.dtype == jnp.bfloat16
    assert relative_error(cached, whole.latents) < ROUNDING


def test_keys_and_values(case):
    config, whole = case
    cached = latents(config, WEIGHTS, HIDDEN, POSITIONS)
    k, v = up_project(config, WEIGHTS, cached)
    assert relative_error(k.materialize(), whole.k) < 2**0.5 * ROUNDING
    assert relative_error(v.materialize(), whole.v) < 2**0.5 * ROUNDING


def test_up_projection_is_one_array_that_is_read_in_place():
    k, v = mla.up_project(TINY, WEIGHTS, np.ones((2, TINY.latent_dim), HIDDEN.dtype))
    assert k.nope.array is v.array


def test_rotation_depends_on_the_distance_alone():
    """Scores of rotated Q and K are those of positions moved by any number of tokens."""
    q = queries(ROTARY, WEIGHTS, HIDDEN, POSITIONS)
    k = latents(ROTARY, WEIGHTS, HIDDEN, POSITIONS)[:, TINY.kv_lora_rank :]
    moved_q = queries(ROTARY, WEIGHTS, HIDDEN, POSITIONS + 1000)
    moved_k = latents(ROTARY, WEIGHTS, HIDDEN, POSITIONS + 1000)[:, TINY.kv_lora_rank :]

    def scores(q, k):
        return jnp.einsum("qhd,kd->hqk", q[..., 128:], k, preferred_element_type=jnp.float32)

    # Two roundings of each side, and angles of float32 at position 1000.
    assert relative_error(scores(moved_q, moved_k), scores(q, k)) < 2 * ROUNDING
    assert relative_error(moved_q, np.asarray(q, np.float64)) > 0.1


@pytest.mark.parametrize("function", [queries, latents])
def test_rotation_needs_positions(function):
    with pytest.raises(ValueError, match=r"positions: needed with a rotary embedding"):
        function(ROTARY, WEIGHTS, HIDDEN)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: mla.queries(ROTARY, WEIGHTS, HIDDEN, POSITIONS[:1]), ValueError, "positions: .*1"),
        (lambda: mla.latents(ROTARY, WEIGHTS, HIDDEN, POSITIONS[:1]), ValueError, "positions: .*1"),
        (lambda: mla.latents(ROTARY, WEIGHTS, HIDDEN, [0]), TypeError, "positions: .* got list"),
        (
            lambda: mla.queries(ROTARY, WEIGHTS, HIDDEN, POSITIONS.astype(jnp.float32)),
            TypeError,
            "positions: expected dtype int32, got float32",
        ),
        (lambda: mla.queries(TINY, WEIGHTS, HIDDEN[:, :1]), ValueError, r"hidden: .*\[23, 1\]"),
        (lambda: mla.latents(TINY, WEIGHTS, HIDDEN[:, :1]), ValueError, r"hidden: .*\[23, 1\]"),
        (lambda: mla.up_project(TINY, WEIGHTS, HIDDEN), ValueError, r"cached: .*\[23, 96\]"),
        (
            lambda: mla.gated_output(TINY, WEIGHTS, HIDDEN, np.ones((1, 4, 128))),
            ValueError,
            r"attention: expected shape \[23, 4, 128\] to match hidden and weights, got \[1, 4,",
        ),
    ],
)
def test_what_would_be_broadcast_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        jax.eval_shape(call)


@pytest.mark.parametrize("gate", [True, False])
def test_gated_output(gate):
    config = dataclasses.replace(TINY, output_gate=gate)
    weights = WEIGHTS if gate else WEIGHTS._replace(g_proj=None)
    whole = oracle.layer(config, checkpoint_tensors(weights), HIDDEN)
    out = gated_output(config, weights, HIDDEN, jnp.asarray(whole.attention, jnp.float32))
    assert out.dtype == jnp.float32
    assert relative_error(out, whole.out) < ROUNDING


@pytest.mark.parametrize("tp_size", [2, 4])
def test_ranks_add_up(tp_size):
    whole = oracle.layer(TINY, checkpoint_tensors(WEIGHTS), HIDDEN)
    total = np.zeros_like(whole.out)
    for rank in range(tp_size):
        part = rank_weights(WEIGHTS, rank, tp_size)
        heads = slice(rank * part.num_heads, (rank + 1) * part.num_heads)
        q = queries(TINY, part, HIDDEN)
        assert relative_error(q, whole.q[:, heads]) < 2**0.5 * ROUNDING
        attention = jnp.asarray(whole.attention[:, heads], jnp.float32)
        total += np.asarray(gated_output(TINY, part, HIDDEN, attention), np.float64)
    assert relative_error(total, whole.out) < ROUNDING


@pytest.mark.parametrize(
    ("rank", "size", "message"),
    [
        (0, 3, r"tp_size: expected a divisor of the 4 heads of weights, got 3"),
        (0, 0, r"tp_size: expected a divisor of the 4 heads of weights, got 0"),
        (2, 2, r"tp_rank: expected 0 to 1, got 2"),
        (-1, 2, r"tp_rank: expected 0 to 1, got -1"),
    ],
)
def test_ranks_that_cannot_be(rank, size, message):
    with pytest.raises(ValueError, match=message):
        rank_weights(WEIGHTS, rank, size)


def test_rms_norm_of_zeros_is_zero():
    normed = mla.rms_norm(jnp.zeros((2, 8), jnp.bfloat16), jnp.ones(8, jnp.bfloat16), 1e-5)
    assert normed.dtype == jnp.float32
    assert not np.asarray(normed).any()


def test_random_weights():
    """Of the shapes of a layer, and such that Q, K and V have about unit variance."""
    draw = jax.jit(random_weights, static_argnames=("config", "num_heads"))
    weights = draw(TINY, jax.random.key(0, impl="rbg"), num_heads=2)
    shapes = {name: x.shape for name, x in weights._asdict().items()}
    assert shapes == weight_shapes(TINY, 2)
    assert {x.dtype for x in weights} == {jnp.dtype(jnp.bfloat16)}
    hidden = np.random.default_rng(0).standard_normal((50, 96)).astype(HIDDEN.dtype)
    q = queries(TINY, weights, hidden)
    k, v = up_project(TINY, weights, latents(TINY, weights, hidden))
    for x in (q, k.materialize(), v.materialize()):
        assert 0.9 < np.std(np.asarray(x, np.float64)) < 1.1
    without = jax.eval_shape(
        lambda key: random_weights(dataclasses.replace(TINY, output_gate=False), key),
        jax.random.key(0),
    )
    assert without.g_proj is None
    assert without.num_heads == 4
