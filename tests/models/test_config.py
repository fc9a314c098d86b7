# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Dimensions of the presets, and dimensions that are refused."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from jaxfp8.models import (
    KIMI_K3,
    KIMI_K3_MLA_LAYERS,
    SMALL,
    MlaWeights,
    empty_cache,
    random_weights,
    rank_weights,
    segment_bytes,
)  # fmt: skip


def test_kimi_k3():
    assert (KIMI_K3.qk_head_dim, KIMI_K3.v_head_dim, KIMI_K3.latent_dim) == (192, 128, 576)
    assert KIMI_K3.softmax_scale == 192**-0.5
    assert KIMI_K3.local_heads(8) == 12
    assert len(KIMI_K3_MLA_LAYERS) == 24
    assert KIMI_K3_MLA_LAYERS[:3] == (3, 7, 11)
    assert KIMI_K3_MLA_LAYERS[-2:] == (91, 92)


def test_small_has_the_head_dims_of_the_model():
    assert (SMALL.qk_head_dim, SMALL.v_head_dim) == (KIMI_K3.qk_head_dim, KIMI_K3.v_head_dim)
    assert hash(SMALL) != hash(KIMI_K3)


def test_bytes_of_a_segment():
    """The figures of the docstring of prefill.py."""
    assert segment_bytes(KIMI_K3, 12, 65_536, "fp8") == 65_536 * (1152 + 12 * (512 + 320))
    assert round(segment_bytes(KIMI_K3, 12, 65_536, "fp8") / 1e9, 2) == 0.73
    assert segment_bytes(KIMI_K3, 12, 1, "bf16") - segment_bytes(KIMI_K3, 12, 1, "fp8") == 12 * 320


@pytest.mark.parametrize("tp_size", [5, 64, 0, -8, 1.5, "8", True])
def test_ranks_that_do_not_divide_the_heads(tp_size):
    with pytest.raises(ValueError, match=rf"tp_size: expected .*, got '?{tp_size}"):
        KIMI_K3.local_heads(tp_size)


@pytest.mark.parametrize("tp_size", [1, 2, 96, np.int64(8)])
def test_ranks_that_do(tp_size):
    assert KIMI_K3.local_heads(tp_size) * tp_size == 96


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 0}, "num_heads: expected an integer >= 1, got 0"),
        ({"hidden_size": 7168.0}, "hidden_size: expected an integer >= 1, got 7168.0"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim: expected an even number, got 63"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps: expected a finite number > 0, got 0.0"),
        ({"rope_theta": math.inf}, "rope_theta: expected a finite number > 0, got inf"),
        ({"rms_norm_eps": True}, "rms_norm_eps: expected a finite number > 0, got True"),
        ({"rope_theta": True}, "rope_theta: expected a finite number > 0, got True"),
        ({"output_gate": 1}, "output_gate: expected True or False, got 1"),
        (
            {"v_head_dim": -1, "output_gate": None},
            "v_head_dim: expected an integer >= 1, got -1; "
            "output_gate: expected True or False, got None",
        ),
    ],
)
def test_dimensions_that_make_no_sense(change, message):
    with pytest.raises(ValueError) as caught:
        dataclasses.replace(KIMI_K3, **change)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: segment_bytes(KIMI_K3, 12, 1, "int8"), ValueError, "precision: expected 'fp8' or"),
        (lambda: segment_bytes(KIMI_K3, 0, 1, "fp8"), ValueError, "num_heads: expected an integer"),
        (lambda: segment_bytes(KIMI_K3, 12, 1.5, "fp8"), TypeError, "segment: expected an integer"),
        (lambda: segment_bytes({}, 12, 1, "fp8"), TypeError, "config: expected an MlaConfig"),
        (lambda: empty_cache(SMALL, -1), ValueError, "capacity: expected an integer >= 0, got -1"),
        (lambda: empty_cache(SMALL, 1.5), TypeError, "capacity: expected an integer, got float"),
        (lambda: empty_cache(None, 1), TypeError, "config: expected an MlaConfig, got NoneType"),
        (lambda: random_weights(SMALL, 0), TypeError, "key: expected a key from jax.random.key"),
        (
            lambda: random_weights(SMALL, np.zeros((2, 2), np.uint32)),
            ValueError,
            r"key: expected one key from jax.random.key, got uint32 \[2, 2\]",
        ),
        (
            lambda: random_weights(SMALL, np.zeros(2, np.uint32), num_heads=0),
            ValueError,
            "num_heads: expected an integer >= 1, got 0",
        ),
        (
            lambda: rank_weights(MlaWeights(*[None] * 8), 0, 2),
            TypeError,
            "weights.q_b_proj: expected a JAX or NumPy array",
        ),
        (lambda: rank_weights((), 0, 2), TypeError, "weights: expected an MlaWeights, got tuple"),
    ],
)
def test_arguments_that_cannot_be(call, error, message):
    with pytest.raises(error, match=message):
        call()
