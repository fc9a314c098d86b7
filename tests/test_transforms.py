# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""jit, scan, shard_map, differentiation, and what is compiled how often."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jaxfp8
from tests import oracle
from tests.inputs import CAPACITY_K, CAPACITY_Q, cu_seqlens, qkv, with_capacity
from tests.tolerances import assert_attention

BACKENDS = ("xla", "interpret")
# Interpreted kernels compile for long, once for every way in which they are called.
SLOWLY = ("xla", pytest.param("interpret", marks=pytest.mark.slow))


def batch(seed, lengths_q, lengths_k, num_heads=2):
    arrays = qkv(np.random.default_rng(seed), sum(lengths_q), sum(lengths_k), num_heads)
    return tuple(jnp.asarray(x) for x in with_capacity(*arrays, lengths_q, lengths_k))


@pytest.mark.parametrize("backend", BACKENDS)
def test_under_jit(backend):
    arguments = batch(0, [30, 7], [50, 90])

    def attention(*arguments):
        return jaxfp8.prefill_attention(*arguments, causal=True, backend=backend)

    eager, jitted = attention(*arguments), jax.jit(attention)(*arguments)
    np.testing.assert_array_equal(eager.out, jitted.out)
    np.testing.assert_array_equal(eager.lse, jitted.lse)


class CompilationCount:
    """Counts what JAX compiles while it is entered."""

    def __enter__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        return self

    def __exit__(self, *error):
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _on_event(self, event, duration, **_):
        self.count += event == "/jax/core/compile/backend_compile_duration"


@pytest.mark.parametrize("backend", SLOWLY)
def test_lengths_do_not_recompile(backend):
    lengths = [([30, 7], [50, 90]), ([0, 192], [704, 0]), ([1, 2, 3], [65, 64, 63])]
    batches = [batch(seed, *lengths) for seed, lengths in enumerate(lengths)]

    def run(arguments):
        q, k, v, cu_q, cu_k = arguments
        jaxfp8.prefill_attention(q, k, v, cu_q, cu_k, causal=True, backend=backend)
        state = jaxfp8.start_prefill(q, cu_q, backend=backend)
        jaxfp8.attend_segment(state, k, v, cu_k)
        query = jaxfp8.quantize_query(q, cu_q, backend=backend)
        context = jaxfp8.quantize_context(k, v, cu_k, backend=backend)
        jax.block_until_ready(jaxfp8.attend(query, context, causal=False))

    with CompilationCount() as first:
        run(batches[0])
    with CompilationCount() as others:
        for arguments in batches[1:]:
            run(arguments)
    assert first.count > 0, "the counter does not count"
    assert others.count == 0


@pytest.mark.parametrize("backend", SLOWLY)
def test_a_pass_goes_through_scan(backend):
    """Four segments of one size under lax.scan give what a Python loop gives."""
    segments, tokens = 4, CAPACITY_K
    rng = np.random.default_rng(1)
    q, _, _ = qkv(rng, CAPACITY_Q, 1)
    lengths = [[300, 404], [0, 65], [64, 0], [1, 600]]
    k, v, cu_k = (
        jnp.stack(arrays)
        for arrays in zip(
            *(
                (*(jnp.asarray(x) for x in qkv(rng, 1, tokens)[1:]), cu_seqlens(lengths_k))
                for lengths_k in lengths
            ),
            strict=True,
        )
    )
    start = jaxfp8.start_prefill(q, cu_seqlens([100, 90]), backend=backend)

    @jax.jit
    def scanned(start):
        def step(state, segment):
            return jaxfp8.attend_segment(state, *segment), None

        return jax.lax.scan(step, start, (k, v, cu_k))[0]

    looped = start
    for i in range(segments):
        looped = jaxfp8.attend_segment(looped, k[i], v[i], cu_k[i])
    state = scanned(start)
    assert isinstance(state, jaxfp8.PrefillState)
    np.testing.assert_array_equal(state.out, looped.out)
    np.testing.assert_array_equal(state.lse, looped.lse)


@pytest.mark.parametrize("backend, check_vma", [("xla", True), ("interpret", False)])
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_shard_map_over_heads(backend, check_vma, precision):
    """Eight devices, a head each: scales are per head, so that no device needs another.

    pallas_call needs check_vma=False.
    """
    devices = jax.devices()
    assert len(devices) == 8
    q, k, v, cu_q, cu_k = batch(2, [40, 9], [130, 66], num_heads=8)
    mesh = Mesh(np.array(devices), ("heads",))
    by_head, everywhere = PartitionSpec(None, "heads"), PartitionSpec()

    def attention(q, k, v, cu_q, cu_k):
        return jaxfp8.prefill_attention(
            q, k, v, cu_q, cu_k, causal=True, precision=precision, backend=backend
        )

    sharded = jax.jit(
        jax.shard_map(
            attention,
            mesh=mesh,
            in_specs=(by_head, by_head, by_head, everywhere, everywhere),
            out_specs=jaxfp8.AttentionState(by_head, PartitionSpec("heads")),
            check_vma=check_vma,
        )
    )(q, k, v, cu_q, cu_k)
    if precision == "fp8":
        dequantized = (
            oracle.through_fp8(x, "float8_e4m3fnuz", None, int(cu[-1]))
            for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k))
        )
        expected = oracle.attention(*dequantized, cu_q, cu_k, causal=True)
    else:
        expected = oracle.attention(q, k, v, cu_q, cu_k, causal=True)
    assert_attention(sharded, expected, precision)


def test_a_pass_goes_through_scan_under_shard_map():
    q, k, v, cu_q, cu_k = batch(5, [40, 9], [130, 66], num_heads=8)
    mesh = Mesh(np.array(jax.devices()), ("heads",))
    by_head = PartitionSpec(None, "heads")

    def prefill(q, k, v):
        def step(state, segment):
            return jaxfp8.attend_segment(state, *segment, cu_k), None

        segments = jnp.stack([k, k]), jnp.stack([v, v])
        state, _ = jax.lax.scan(step, jaxfp8.start_prefill(q, cu_q), segments)
        return state.out

    sharded = jax.shard_map(prefill, mesh=mesh, in_specs=(by_head,) * 3, out_specs=by_head)
    np.testing.assert_array_equal(jax.jit(sharded)(q, k, v), jax.jit(prefill)(q, k, v))


@pytest.mark.parametrize("backend", SLOWLY)
def test_64_bit_mode_changes_nothing(backend):
    q, k, v, cu_q, cu_k = (np.asarray(x) for x in batch(6, [30, 7], [50, 90]))

    def run():
        state = jaxfp8.start_prefill(q, cu_q, backend=backend)
        state = jaxfp8.attend_new_tokens(state, q, v[: len(q)])
        state = jaxfp8.attend_segment(state, k, v, cu_k)
        return np.asarray(state.out), np.asarray(state.lse)

    with jax.enable_x64(True):
        wide = run()
    for actual, expected in zip(wide, run(), strict=True):
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual, expected)


def test_differentiation_is_refused():
    q, k, v, cu_q, cu_k = batch(3, [5], [9])
    message = "^jaxfp8 is for inference: .*stop_gradient"

    def loss(q, k, v):
        state = jaxfp8.prefill_attention(q, k, v, cu_q, cu_k, causal=True)
        return state.out.astype(jnp.float32).sum() + state.lse[:, :5].sum()

    for argument in range(3):
        with pytest.raises(NotImplementedError, match=message):
            jax.grad(loss, argnums=argument)(q, k, v)
    with pytest.raises(NotImplementedError, match=message):
        jax.jvp(loss, (q, k, v), (q, k, v))
    with pytest.raises(NotImplementedError, match=message):
        jax.grad(lambda q: jaxfp8.start_prefill(q, cu_q).query.descale.sum())(q)
    with pytest.raises(NotImplementedError, match=message):
        jax.grad(lambda x: jaxfp8.per_head_amax(x).sum())(q)
    state = jaxfp8.prefill_attention(q, k, v, cu_q, cu_k, causal=True)
    with pytest.raises(NotImplementedError, match=message):
        jax.grad(lambda s: jaxfp8.merge_states(s, state).lse[:, :5].sum())(state)


def test_stop_gradient_makes_a_constant_of_it():
    q, k, v, cu_q, cu_k = batch(4, [5], [9])

    def loss(weight):
        fixed = jax.lax.stop_gradient((weight * q).astype(jnp.bfloat16))
        state = jaxfp8.prefill_attention(fixed, k, v, cu_q, cu_k, causal=True)
        return weight * state.out.astype(jnp.float32).sum()

    assert np.isfinite(jax.grad(loss)(1.0))
