# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""A prefill pass: new tokens, then context in segments, against one attention over all of it."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxfp8
from tests import oracle
from tests.inputs import cu_seqlens, qkv
from tests.tolerances import assert_attention

FNUZ = "float8_e4m3fnuz"
CAPACITY = 256
LENGTHS_Q = [13, 0, 40]


def whole_prefill(q, new_k, new_v, contexts):
    """float64 attention of every sequence over its context and, causally, its new tokens."""
    cu_q = cu_seqlens(LENGTHS_Q)
    k, v, lengths = [], [], []
    for b, (context_k, context_v) in enumerate(contexts):
        new = slice(cu_q[b], cu_q[b + 1])
        k += [context_k, new_k[new]]
        v += [context_v, new_v[new]]
        lengths.append(len(context_k) + LENGTHS_Q[b])
    # Aligned bottom right, causal over context and new tokens together is exactly this.
    return oracle.attention(
        q, np.concatenate(k), np.concatenate(v), cu_q, cu_seqlens(lengths), causal=True
    )


def run_pass(q, new_k, new_v, contexts, cuts, precision, scales=(None, None, None)):
    """The pass over each context cut at the same relative places."""
    state = jaxfp8.start_prefill(
        q, cu_seqlens(LENGTHS_Q), precision=precision, q_descale=scales[0], backend="xla"
    )
    state = jaxfp8.attend_new_tokens(state, new_k, new_v)
    bounds = [0.0, *sorted(cuts), 1.0]
    for low, high in itertools.pairwise(bounds):
        parts = [
            tuple(x[round(low * len(x)) : round(high * len(x))] for x in context)
            for context in contexts
        ]
        arrays = []
        for which in (0, 1):
            x = np.concatenate([part[which] for part in parts])
            tail = np.full((CAPACITY - len(x), *x.shape[1:]), np.nan, x.dtype)
            arrays.append(np.concatenate([x, tail]))
        cu_k = cu_seqlens([len(part[0]) for part in parts])
        state = jaxfp8.attend_segment(
            state, *arrays, cu_k, k_descale=scales[1], v_descale=scales[2]
        )
    return state


def inputs(seed):
    rng = np.random.default_rng(seed)
    q, new_k, new_v = qkv(rng, sum(LENGTHS_Q), sum(LENGTHS_Q))
    contexts = [qkv(rng, 1, tokens)[1:] for tokens in (100, 37, 119)]
    return q, new_k, new_v, contexts


@settings(deadline=None, max_examples=15)
@given(cuts=st.lists(st.floats(0, 1), max_size=4), seed=st.integers(0, 3))
def test_any_split_gives_what_one_piece_gives_in_bf16(cuts, seed):
    q, new_k, new_v, contexts = inputs(seed)
    state = run_pass(q, new_k, new_v, contexts, cuts, "bf16")
    assert_attention(state, whole_prefill(q, new_k, new_v, contexts), "bf16")


@settings(deadline=None, max_examples=15)
@given(cuts=st.lists(st.floats(0, 1), max_size=4), seed=st.integers(0, 3))
def test_any_split_gives_what_one_piece_gives_in_fp8(cuts, seed):
    """Static scales, inputs that FP8 holds exactly: what remains is the rounding of P."""
    q, new_k, new_v, contexts = inputs(seed)
    k = np.concatenate([context[0] for context in contexts])
    v = np.concatenate([context[1] for context in contexts])
    # Powers of two, so that the dequantized values are bfloat16 too.
    scales = [np.exp2(np.ceil(np.log2(oracle.descale(x, FNUZ)))) for x in (q, k, v)]
    held = [
        oracle.through_fp8(x, FNUZ, scale).astype(x.dtype)
        for x, scale in zip((q, k, v), scales, strict=True)
    ]
    ends = np.cumsum([0, *(len(context[0]) for context in contexts)])
    contexts = [(held[1][a:b], held[2][a:b]) for a, b in itertools.pairwise(ends)]
    state = run_pass(held[0], new_k, new_v, contexts, cuts, "fp8", scales)
    assert_attention(state, whole_prefill(held[0], new_k, new_v, contexts), "fp8")


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_nothing_attended_yet(precision):
    q, *_ = inputs(0)
    state = jaxfp8.start_prefill(q, cu_seqlens(LENGTHS_Q), precision=precision)
    assert state.out.shape == (53, 2, 128)
    assert state.out.dtype == jnp.bfloat16
    assert not np.asarray(state.out).any()
    assert np.isneginf(state.lse).all()


def test_new_tokens_in_fp8():
    q, new_k, new_v, _ = inputs(1)
    state = jaxfp8.start_prefill(q, cu_seqlens(LENGTHS_Q))
    state = jaxfp8.attend_new_tokens(state, new_k, new_v, precision="fp8")
    held = (oracle.through_fp8(x, FNUZ) for x in (q, new_k, new_v))
    cu = cu_seqlens(LENGTHS_Q)
    assert_attention(state, oracle.attention(*held, cu, cu, causal=True), "fp8")


def test_query_is_quantized_once(monkeypatch):
    from jaxfp8.ops.attention.reference import XlaBackend

    q, new_k, new_v, contexts = inputs(2)
    packed = []
    original = XlaBackend.pack_query

    def counting(self, q, cu_seqlens, descale, spec):
        packed.append(spec.precision)
        return original(self, q, cu_seqlens, descale, spec)

    monkeypatch.setattr(XlaBackend, "pack_query", counting)
    jax.clear_caches()
    run_pass(q, new_k, new_v, contexts, [0.2, 0.5, 0.9], "fp8")
    assert packed.count("fp8") == 1


def test_state_merges_with_states_from_elsewhere():
    q, new_k, new_v, contexts = inputs(3)
    alone = run_pass(q, new_k, new_v, [(k[:0], v[:0]) for k, v in contexts], [], "bf16")
    elsewhere = jaxfp8.prefill_attention(
        q,
        *(np.concatenate([context[i] for context in contexts]) for i in (0, 1)),
        cu_seqlens(LENGTHS_Q),
        cu_seqlens([len(context[0]) for context in contexts]),
        causal=False,
        precision="bf16",
    )
    merged = jaxfp8.merge_states(alone.attention_state, elsewhere)
    together = run_pass(q, new_k, new_v, contexts, [], "bf16")
    # Two roundings to bfloat16 more than the pass, which merges in float32.
    np.testing.assert_allclose(
        merged.out.astype(np.float32), together.out.astype(np.float32), rtol=2**-6, atol=2**-6
    )
    np.testing.assert_allclose(merged.lse, together.lse, rtol=1e-5, atol=1e-5)
