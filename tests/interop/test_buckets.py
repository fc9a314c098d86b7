# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Shapes that change with every call: few programs, the right numbers, no growth."""

from __future__ import annotations

import gc

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jaxfp8  # noqa: E402
import jaxfp8_torch  # noqa: E402
from jaxfp8_torch import buckets  # noqa: E402
from jaxfp8_torch.buckets import Buckets  # noqa: E402
from tests import oracle  # noqa: E402
from tests.inputs import cu_seqlens, qkv  # noqa: E402
from tests.interop.tensors import array, assert_same_bits, tensors  # noqa: E402
from tests.tolerances import assert_attention  # noqa: E402

TRAFFIC = Buckets(query_tokens=(64,), context_tokens=(64, 128), sequences=(1, 4))
SMALL = Buckets(query_tokens=(16, 64), context_tokens=(64, 128), sequences=(1, 4))


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
    arrays = random_batch(np.random.default_rng(seed), 70, 150, 5, heads=2)
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


def test_a_tensor_of_a_bucket_is_not_copied():
    jaxfp8_torch.set_buckets(SMALL)
    x = torch.ones(64, 2, 192)
    assert buckets.pad_rows(x, buckets.query_capacity(64)) is x


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


def test_buckets_of_another_kind():
    with pytest.raises(TypeError, match="buckets: expected Buckets or None, got tuple"):
        jaxfp8_torch.set_buckets((1, 2))


def a_call(rng, step):
    q, k, v, cu_q, cu_k = tensors(random_batch(rng, 64, 128, 4), "cpu")
    if step % 3 == 0:
        kv_nope = torch.cat([k[:, :, :128], v], dim=2)
        v = kv_nope[:, :, 128:]
    if step % 2:
        jaxfp8_torch.prefill_attention(q, k, v, cu_q, cu_k, causal=True, precision="bf16")
        return
    state = jaxfp8_torch.start_prefill(q, cu_q, precision="bf16")
    state = jaxfp8_torch.attend_new_tokens(state, q, q[:, :, :128].contiguous())
    state = jaxfp8_torch.attend_segment(state, k, v, cu_k)


def warm_up():
    return jaxfp8_torch.warmup(TRAFFIC, 1, v_width=256, precision="bf16", backend=None)


def test_a_days_traffic_compiles_nothing_after_the_warm_up():
    programs = warm_up()
    # 2 sizes of a batch: start, new tokens (V plain and in place), and for each of 2 contexts a
    # segment and a prefill, V plain and in place.
    assert programs <= 2 * (1 + 2 + 2 * 2 * 2)
    assert warm_up() == 0
    before = jaxfp8_torch.compilation_count()
    rng = np.random.default_rng(0)
    for step in range(300):
        a_call(rng, step)
    assert jaxfp8_torch.compilation_count() == before


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.slow
def test_ten_thousand_calls_grow_neither_memory_nor_compilations():
    warm_up()
    rng = np.random.default_rng(1)
    for step in range(500):
        a_call(rng, step)
    gc.collect()
    programs, memory = jaxfp8_torch.compilation_count(), resident_bytes()
    for step in range(10_000):
        a_call(rng, step)
    gc.collect()
    assert jaxfp8_torch.compilation_count() == programs
    # Less than 2 kB a call would be a leak of one small array each.
    assert resident_bytes() - memory < 16 * 2**20
