# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels lower with the installed JAX, on a machine without a GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import jaxfp8
from jaxfp8.ops.attention.base import AttentionSpec, QuantizedContext, QuantizedQuery
from jaxfp8.ops.attention.pallas_mosaic_gpu import BACKEND
from jaxfp8.targets import Target, target_of_arch


def run(q, k, v, cu_q, cu_k, descale, *, causal, spec):
    query = QuantizedQuery(
        BACKEND.pack_query(q, cu_q, descale, spec), cu_q, descale, BACKEND.name, spec, q.shape[0]
    )
    packed = BACKEND.pack_context(k, v, cu_k, descale, descale, spec)
    context = QuantizedContext(packed, cu_k, descale, descale, BACKEND.name, spec, k.shape[0])
    return BACKEND.attend(query, context, causal=causal, softmax_scale=0.07)


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize(
    ("tokens_q", "tokens_k", "heads", "dqk", "sequences", "causal"),
    [
        (4096, 65536, 12, 192, 1, False),
        (700, 2100, 5, 192, 5, True),
        (64, 65536, 1, 128, 1, False),
        (5, 3, 1, 128, 2, True),
    ],
)
def test_lowers(tokens_q, tokens_k, heads, dqk, sequences, causal, precision):
    fmt = jaxfp8.E4M3FN if precision == "fp8" else None
    spec = AttentionSpec(precision, fmt, heads, dqk, 128)
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((tokens_q, heads, dqk), jnp.bfloat16),
            ((tokens_k, heads, dqk), jnp.bfloat16),
            ((tokens_k, heads, 128), jnp.bfloat16),
            ((sequences + 1,), jnp.int32),
            ((sequences + 1,), jnp.int32),
            ((heads,), jnp.float32),
        )
    ]
    function = jax.jit(functools.partial(run, causal=causal, spec=spec))
    text = function.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 2


@pytest.mark.parametrize(
    ("spec", "target", "reason"),
    [
        (("fp8", jaxfp8.E4M3FN, 12, 192, 128), "gfx942", "the target is gfx942"),
        (("fp8", jaxfp8.E4M3FN, 12, 192, 128), "cpu", "the target is cpu"),
        (("fp8", jaxfp8.E4M3FN, 12, 192, 128), "sm100", "the target is sm100"),
        (("fp8", jaxfp8.E4M3FNUZ, 12, 192, 128), "sm90", "not float8_e4m3fnuz"),
        (("bf16", None, 12, 64, 64), "sm90", "use backend='xla'"),
        (("bf16", None, 12, 192, 192), "sm90", "use backend='xla'"),
    ],
)
def test_says_what_it_does_not_serve(spec, target, reason):
    assert reason in BACKEND.unsupported(AttentionSpec(*spec), target_of_arch(target))


def test_serves_its_shapes_on_hopper():
    target = Target("sm90", jaxfp8.E4M3FN)
    for dqk, dv in ((192, 128), (128, 128), (192, None)):
        assert BACKEND.unsupported(AttentionSpec("fp8", jaxfp8.E4M3FN, 5, dqk, dv), target) is None
        assert BACKEND.unsupported(AttentionSpec("bf16", None, 5, dqk, dv), target) is None
