# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Shapes that change with every call: few programs, the right numbers, no growth."""

from __future__ import annotations

import gc
import itertools
import os

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jaxfp8  # noqa: E402
import jaxfp8_torch  # noqa: E402
from jaxfp8_torch import buckets, crossing  # noqa: E402
from jaxfp8_torch import warm_up as warm_up_module  # noqa: E402
from jaxfp8_torch.buckets import Buckets  # noqa: E402
from tests import oracle  # noqa: E402
from tests.inputs import cu_seqlens, qkv  # noqa: E402
from tests.interop.tensors import array, assert_same_bits, tensors  # noqa: E402
from tests.tolerances import assert_attention  # noqa: E402

TRAFFIC = Buckets(query_tokens=(16,), context_tokens=(32,), sequences=(4,))
SMALL = Buckets(query_tokens=(16, 64), context_tokens=(128,), sequences=(4,))


@pytest.fixture(autouse=True)
def restored():
    before = jaxfp8_torch.get_buckets()
    yield
    jaxfp8_torch.set_buckets(before)


def random_batch(rng, most_q, most_k, most_sequences, heads=1):
    sequences = int(rng.integers(1, most_sequences + 1))
    lengths_q = rng.multinomial(int(rng.integers(most_q + 1)), np.ones(sequences) / sequences)
    lengths_k = rng.multinomial(int(rng.integers(most_k + 1)), np.ones(sequences) / sequences)
    q, k, v = qkv(rng, int(lengths_q.sum()), int(lengths_k.sum()), num_heads=heads)
    return q, k, v, cu_seqlens(lengths_q), cu_seqlens(lengths_k)


class AsNumpy:
    """An AttentionState of tensors, for assert_attention."""

    def __init__(self, state):
        self.out, self.lse = array(state.out), array(state.lse)


@pytest.mark.parametrize("seed", range(6))
def test_padded_calls_are_right(seed):
    jaxfp8_torch.set_buckets(SMALL)
    arrays = random_batch(np.random.default_rng(seed), 64, 128, 4, heads=2)
    given = tensors(arrays, "cpu")
    state = jaxfp8_torch.prefill_attention(*given, causal=True, precision="bf16")
    expected = oracle.attention(*arrays, causal=True)
    assert_attention(AsNumpy(state), expected, "bf16")
    q, k, v, cu_q, cu_k = given
    started = jaxfp8_torch.start_prefill(q, cu_q, precision="bf16")
    assert_attention(
        AsNumpy(jaxfp8_torch.attend_segment(started, k, v, cu_k)),
        oracle.attention(*arrays, causal=False),
        "bf16",
    )


def test_padding_changes_no_scale():
    """Dynamic scales see the tokens alone, whatever the memory behind them held."""
    jaxfp8_torch.set_buckets(SMALL)
    q, k, v, cu_q, cu_k = random_batch(np.random.default_rng(3), 40, 90, 2)
    padded = jaxfp8_torch.dynamic_quantize_per_head(*tensors([q], "cpu"), jaxfp8.E4M3FNUZ)
    exact = jaxfp8.dynamic_quantize_per_head(q, jaxfp8.E4M3FNUZ)
    for a, b in zip(padded, exact, strict=True):
        assert_same_bits(a, b)
    state = jaxfp8_torch.start_prefill(*tensors((q, cu_q), "cpu"))
    assert_same_bits(state.query, exact[0])
    assert_same_bits(state.q_descale, exact[1])
    state = jaxfp8_torch.prefill_attention(*tensors((q, k, v, cu_q, cu_k), "cpu"), causal=True)
    dequantized = [oracle.through_fp8(x, "float8_e4m3fnuz") for x in (q, k, v)]
    expected = oracle.attention(*dequantized, cu_q, cu_k, causal=True)
    assert_attention(AsNumpy(state), expected, "fp8")


def test_a_tensor_of_a_bucket_is_not_copied(monkeypatch):
    """A workspace is passed whole, however little of it is filled."""
    jaxfp8_torch.set_buckets(SMALL)
    q, k, v = tensors(qkv(np.random.default_rng(0), 64, 128), "cpu")
    wide = torch.cat([v, v], dim=2)
    crossed = []
    to_jax = crossing.to_jax

    def recording(*tensors):
        crossed.extend(x.data_ptr() for x in tensors)
        return to_jax(*tensors)

    monkeypatch.setattr(crossing, "to_jax", recording)
    cu_q, cu_k = tensors((cu_seqlens([3, 5]), cu_seqlens([20, 1])), "cpu")
    for queries in (q, q[:50]):  # one program
        crossed.clear()
        jaxfp8_torch.prefill_attention(
            queries, k, wide[:, :, 128:], cu_q, cu_k, causal=True, precision="bf16"
        )
        assert {k.data_ptr(), wide.data_ptr()} <= set(crossed)
        assert (q.data_ptr() in crossed) == (queries is q)


def test_sizes():
    jaxfp8_torch.set_buckets(SMALL)
    found = [buckets.query_capacity(n) for n in (0, 1, 16, 17, 64, 65, 130)]
    assert found == [16, 16, 16, 64, 64, 128, 192]
    jaxfp8_torch.set_buckets(None)
    assert buckets.context_capacity(77) == 77


@pytest.mark.parametrize("sizes", [(), (0, 4), (4, 2), (4, 4)])
def test_sizes_that_are_none(sizes):
    with pytest.raises(ValueError, match="sequences: expected ascending sizes >= 1"):
        Buckets(sequences=sizes)


@pytest.mark.parametrize("sizes", [5, "16", None, (16.0,), ("16",), (True,)])
def test_sizes_that_are_no_integers(sizes):
    with pytest.raises(TypeError, match="query_tokens: expected (an integer|sizes), got"):
        Buckets(query_tokens=sizes)


def test_buckets_of_another_kind():
    with pytest.raises(TypeError, match="buckets: expected Buckets or None, got tuple"):
        jaxfp8_torch.set_buckets((1, 2))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"buckets": 5}, TypeError, "buckets: expected Buckets, got int"),
        ({"num_heads": 1.5}, TypeError, "num_heads: expected an integer, got float"),
        ({"num_heads": 0}, ValueError, "num_heads: expected at least 1, got 0"),
        ({"v_head_dim": "128"}, TypeError, "v_head_dim: expected an integer, got str"),
        ({"v_width": 64}, ValueError, "v_width: expected at least v_head_dim, 128, got 64"),
        ({"causal": True}, TypeError, "causal: expected a sequence of the values that calls will"),
        ({"precision": "int8"}, ValueError, "precision: expected 'fp8' or 'bf16', got 'int8'"),
        ({"cache_dir": 5}, TypeError, "directory: expected a path, got int"),
    ],
)
def test_a_warm_up_that_cannot_be(changes, error, message):
    with pytest.raises(error, match=message):
        jaxfp8_torch.warmup(**{"buckets": TRAFFIC, "num_heads": 1} | changes)


class Traffic:
    """Calls of random shapes, cheap to make: their tensors are the beginnings of a few large ones.

    A step is one call or the three of a pass; in every other pair of steps V is inside a wider
    tensor.
    """

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        most_q, most_k = TRAFFIC.query_tokens[-1], TRAFFIC.context_tokens[-1]
        self.q, self.k, v = tensors(qkv(self.rng, most_q, most_k, num_heads=1), "cpu")
        self.v = (v, torch.cat([self.k[:, :, :128], v], dim=2)[:, :, 128:])
        one = torch.full((1,), 0.05)
        self.scales = jaxfp8.LayerScales(one, one, one)

    def lengths(self, most, sequences):
        total = int(self.rng.integers(most + 1))
        lengths = self.rng.multinomial(total, np.ones(sequences) / sequences)
        return total, torch.from_numpy(cu_seqlens(lengths))

    def step(self, step):
        sequences = int(self.rng.integers(1, TRAFFIC.sequences[-1] + 1))
        new, cu_q = self.lengths(len(self.q), sequences)
        cached, cu_k = self.lengths(len(self.k), sequences)
        q, k, v = self.q[:new], self.k[:cached], self.v[step // 2 % 2][:cached]
        if step % 2:
            return jaxfp8_torch.prefill_attention(
                q, k, v, cu_q, cu_k, causal=True, scales=self.scales
            )
        state = jaxfp8_torch.start_prefill(q, cu_q, q_descale=self.scales.q)
        state = jaxfp8_torch.attend_new_tokens(state, q, self.v[0][:new])
        return jaxfp8_torch.attend_segment(
            state, k, v, cu_k, k_descale=self.scales.k, v_descale=self.scales.v
        )


def test_a_warm_up_calls_with_every_size(monkeypatch):
    called = []

    def recorder(name, result=None):
        def call(*arguments, **options):
            called.append((name, *(x.shape[0] for x in arguments if isinstance(x, torch.Tensor))))
            return result

        return call

    for name in ("prefill_attention", "attend_new_tokens", "attend_segment"):
        monkeypatch.setattr(warm_up_module, name, recorder(name))
    monkeypatch.setattr(warm_up_module, "start_prefill", recorder("start_prefill", "a state"))
    sizes = Buckets(query_tokens=(2, 3), context_tokens=(5, 7), sequences=(11, 13))
    jaxfp8_torch.warmup(sizes, 1, precision="bf16", causal=(True, False))
    assert jaxfp8_torch.get_buckets() is sizes
    batches = list(itertools.product((2, 3), (12, 14)))
    expected = [("start_prefill", q, cu) for q, cu in batches]
    expected += [("attend_new_tokens", q, q) for q, _ in batches]
    for q, cu in batches:
        for k in (5, 7):
            expected += [("attend_segment", k, k, cu)]
            expected += [("prefill_attention", q, k, k, cu, cu)] * 2
    assert sorted(called) == sorted(expected)


def warm_up():
    return jaxfp8_torch.warmup(TRAFFIC, 1, v_width=256)


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_ten_thousand_calls_after_the_warm_up_compile_nothing_and_keep_no_memory():
    programs = warm_up()
    # Start; new tokens, a segment and a prefill, each with V plain and in place.
    assert programs <= 1 + 2 * 3
    assert warm_up() == 0
    before = jaxfp8_torch.compilation_count()
    traffic = Traffic(0)
    for step in range(250):
        traffic.step(step)
    gc.collect()
    memory = resident_bytes()
    for step in range(5_000):  # of two calls on average
        traffic.step(step)
    gc.collect()
    assert jaxfp8_torch.compilation_count() == before
    # Less than 2 kB a call would be a leak of one small array each.
    assert resident_bytes() - memory < 16 * 2**20
