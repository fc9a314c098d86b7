# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""prefill_attention and its parts against the float64 oracle, on every backend that runs here."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jaxfp8
from tests import oracle
from tests.inputs import CAPACITY_K, CAPACITY_Q, cu_seqlens, qkv, with_capacity
from tests.tolerances import P_RMS, assert_attention, relative_error

BACKENDS = ("xla", "interpret")
FORMATS = {fmt.name: fmt for fmt in (jaxfp8.E4M3FNUZ, jaxfp8.E4M3FN)}
FNUZ = "float8_e4m3fnuz"


def expected_fp8(q, k, v, cu_q, cu_k, *, causal, fmt=FNUZ, scales=None, softmax_scale=None):
    """The oracle on what FP8 holds of the inputs."""
    scales = scales or (None, None, None)
    q, k, v = (
        oracle.through_fp8(x, fmt, descale, int(cu[-1]))
        for x, descale, cu in zip((q, k, v), scales, (cu_q, cu_k, cu_k), strict=True)
    )
    return oracle.attention(q, k, v, cu_q, cu_k, causal=causal, softmax_scale=softmax_scale)


def check(backend, q, k, v, cu_q, cu_k, *, causal, precision, fmt=FNUZ):
    """Runs one call and compares it."""
    state = jaxfp8.prefill_attention(
        q, k, v, cu_q, cu_k,
        causal=causal, precision=precision, fmt=FORMATS[fmt], backend=backend,
    )  # fmt: skip
    if precision == "fp8":
        expected = expected_fp8(q, k, v, cu_q, cu_k, causal=causal, fmt=fmt)
    else:
        expected = oracle.attention(q, k, v, cu_q, cu_k, causal=causal)
    assert_attention(state, expected, precision)
    return state, expected


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize("causal", [False, True])
def test_ragged_batches(backend, precision, causal):
    rng = np.random.default_rng(causal)
    for lengths_q, lengths_k in [
        ([130], [70]),
        ([1, 0, 129, 3, 40], [65, 20, 0, 2, 257]),
        ([0, 0, 7], [0, 31, 7]),
        ([64, 127, 1], [64, 128, 300]),
        ([CAPACITY_Q], [CAPACITY_K]),
        ([191], [1]),
    ]:
        arrays = qkv(rng, sum(lengths_q), sum(lengths_k))
        batch = with_capacity(*arrays, lengths_q, lengths_k)
        check(backend, *batch, causal=causal, precision=precision)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_arrays_that_just_fit(backend, precision):
    """No token past the end, sizes that are no multiple of any tile."""
    lengths_q, lengths_k = [70, 1, 60], [0, 67, 66]
    q, k, v = qkv(np.random.default_rng(2), sum(lengths_q), sum(lengths_k))
    check(
        backend, q, k, v, cu_seqlens(lengths_q), cu_seqlens(lengths_k),
        causal=True, precision=precision,
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fmt", list(FORMATS))
@pytest.mark.parametrize(
    "num_heads, qk_head_dim, v_head_dim", [(1, 192, 128), (5, 192, 128), (12, 128, 128)]
)
def test_heads_dims_and_formats(backend, fmt, num_heads, qk_head_dim, v_head_dim):
    rng = np.random.default_rng(num_heads)
    q, k, v = qkv(rng, 70, 200, num_heads, qk_head_dim, v_head_dim)
    check(
        backend, q, k, v, cu_seqlens([20, 50]), cu_seqlens([130, 70]),
        causal=True, precision="fp8", fmt=fmt,
    )  # fmt: skip


def test_xla_serves_any_head_dims():
    rng = np.random.default_rng(0)
    q, k, v = qkv(rng, 30, 50, 3, 40, 24)
    check(None, q, k, v, cu_seqlens([30]), cu_seqlens([50]), causal=True, precision="fp8")
    with pytest.raises(NotImplementedError, match=r"^backend interpret: .*40.*24"):
        jaxfp8.prefill_attention(
            q, k, v, cu_seqlens([30]), cu_seqlens([50]), causal=True, backend="interpret"
        )


def test_rounding_error_is_that_of_fp8_weights():
    rng = np.random.default_rng(3)
    q, k, v = qkv(rng, 32, 4096, 3)
    q = (q.astype(np.float32) / 8).astype(q.dtype)  # Flat softmax: many keys count.
    state, expected = check(
        "xla", q, k, v, cu_seqlens([32]), cu_seqlens([4096]), causal=False, precision="fp8"
    )
    assert relative_error(state.out, expected.out) < P_RMS["fp8"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize(
    "tokens_q, tokens_k, lengths_q, lengths_k",
    [(0, 0, [], []), (5, 7, [], []), (0, 40, [0], [40]), (9, 0, [9], [0]), (9, 40, [9], [0])],
)
def test_nothing_to_attend(backend, precision, tokens_q, tokens_k, lengths_q, lengths_k):
    q, k, v = qkv(np.random.default_rng(0), tokens_q, tokens_k)
    state = jaxfp8.prefill_attention(
        q, k, v, cu_seqlens(lengths_q), cu_seqlens(lengths_k),
        causal=True, precision=precision, backend=backend,
    )  # fmt: skip
    assert state.out.shape == (tokens_q, 2, 128)
    assert state.lse.shape == (2, tokens_q)
    assert not np.asarray(state.out).any()
    assert (np.asarray(state.lse) == -np.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_stays_in_the_rows_that_see_it(backend, precision, where):
    rng = np.random.default_rng(11)
    q, k, v = qkv(rng, 130, 190)
    q[5, 0, 3] = np.nan if where == "q" else q[5, 0, 3]
    if where == "k":
        k[100 + 70, 1, 9] = np.nan  # Seen by rows 70 ... 89 of the second sequence.
    if where == "v":
        v[100 + 70, 1, 9] = np.nan
    batch = with_capacity(q, k, v, [40, 90], [100, 90])
    state, _ = check(backend, *batch, causal=True, precision=precision)
    nan = np.isnan(np.asarray(state.out[:130], np.float32))
    want = np.zeros_like(nan)
    if where == "q":
        want[5, 0, :] = True
    if where == "k":
        want[40 + 70 :, 1, :] = True
    if where == "v":
        want[40 + 70 :, 1, 9] = True
    np.testing.assert_array_equal(nan, want)
    assert np.isnan(np.asarray(state.lse)).any() == (where != "v")


@pytest.mark.parametrize("backend", BACKENDS)
def test_infinities_saturate(backend):
    rng = np.random.default_rng(12)
    q, k, v = qkv(rng, 20, 60)
    q[3, 0, 5], k[7, 1, 8], v[9, 0, 2], v[10, 1, 2] = np.inf, -np.inf, np.inf, -np.inf
    check(backend, *with_capacity(q, k, v, [20], [60]), causal=False, precision="fp8")


@pytest.mark.parametrize("backend", BACKENDS)
def test_static_scales_that_saturate(backend):
    arrays = qkv(np.random.default_rng(13), 20, 60)
    scales = [0.2 * oracle.descale(x, FNUZ) for x in arrays]
    q, k, v, cu_q, cu_k = with_capacity(*arrays, [20], [60])
    state = jaxfp8.prefill_attention(
        q, k, v, cu_q, cu_k, causal=True, scales=jaxfp8.LayerScales(*scales), backend=backend
    )
    expected = expected_fp8(q, k, v, cu_q, cu_k, causal=True, scales=scales)
    assert_attention(state, expected, "fp8")


@pytest.mark.parametrize("backend", BACKENDS)
def test_static_scales_equal_to_the_dynamic_ones_change_no_bit(backend):
    arrays = qkv(np.random.default_rng(14), 20, 60)
    scales = jaxfp8.LayerScales(*(oracle.descale(x, FNUZ) for x in arrays))
    q, k, v, cu_q, cu_k = with_capacity(*arrays, [20], [60])
    static, dynamic = (
        jaxfp8.prefill_attention(q, k, v, cu_q, cu_k, causal=True, scales=s, backend=backend)
        for s in (scales, None)
    )
    np.testing.assert_array_equal(static.out, dynamic.out)
    np.testing.assert_array_equal(static.lse, dynamic.lse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_arrays_already_fp8(backend):
    rng = np.random.default_rng(15)
    arrays = qkv(rng, 20, 60)
    descales = [oracle.descale(x, FNUZ) for x in arrays]
    stored = [oracle.quantize(x, d, FNUZ) for x, d in zip(arrays, descales, strict=True)]
    scales = jaxfp8.LayerScales(*descales)
    once, twice = (
        jaxfp8.prefill_attention(
            *with_capacity(*xs, [20], [60]), causal=True, scales=scales, backend=backend
        )
        for xs in (arrays, stored)
    )
    np.testing.assert_array_equal(once.out, twice.out)
    np.testing.assert_array_equal(once.lse, twice.lse)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_softmax_scale(backend, precision):
    rng = np.random.default_rng(16)
    q, k, v = qkv(rng, 20, 60)
    cu_q, cu_k = cu_seqlens([20]), cu_seqlens([60])
    state = jaxfp8.prefill_attention(
        q, k, v, cu_q, cu_k,
        causal=False, softmax_scale=0.011, precision=precision, backend=backend,
    )  # fmt: skip
    if precision == "fp8":
        expected = expected_fp8(q, k, v, cu_q, cu_k, causal=False, softmax_scale=0.011)
    else:
        expected = oracle.attention(q, k, v, cu_q, cu_k, causal=False, softmax_scale=0.011)
    assert_attention(state, expected, precision)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_head_slices_are_read_in_place(backend, precision):
    """V as columns 128 ... 255 of kv_nope [T, H, 256], as serving stacks hold it."""
    q, k, v, cu_q, cu_k = with_capacity(*qkv(np.random.default_rng(17), 20, 60), [20], [60])
    kv_nope = np.concatenate([k[:, :, :128], v], axis=2)
    sliced, plain = (
        jaxfp8.prefill_attention(
            q, k, values, cu_q, cu_k, causal=True, precision=precision, backend=backend
        )
        for values in (jaxfp8.HeadSlice(kv_nope, 128, 128), v)
    )
    np.testing.assert_array_equal(sliced.out, plain.out)
    np.testing.assert_array_equal(sliced.lse, plain.lse)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_keys_in_two_parts(backend, precision):
    """K as columns 0 ... 127 of kv_nope [T, H, 256] and k_rope [T, 64], the same for all heads."""
    q, k, v, cu_q, cu_k = with_capacity(*qkv(np.random.default_rng(21), 20, 60), [20], [60])
    rope = k[:, 0, 128:]
    k[:, :, 128:] = rope[:, None]
    kv_nope = np.concatenate([k[:, :, :128], v], axis=2)
    parts = jaxfp8.AssembledKey(jaxfp8.HeadSlice(kv_nope, 0, 128), rope)
    assembled, plain = (
        jaxfp8.prefill_attention(
            q, keys, jaxfp8.HeadSlice(kv_nope, 128, 128), cu_q, cu_k,
            causal=True, precision=precision, backend=backend,
        )
        for keys in (parts, k)
    )  # fmt: skip
    np.testing.assert_array_equal(assembled.out, plain.out)
    np.testing.assert_array_equal(assembled.lse, plain.lse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_give_what_the_whole_gives(backend):
    arrays = qkv(np.random.default_rng(18), 20, 60)
    q, k, v, cu_q, cu_k = with_capacity(*arrays, [12, 8], [29, 31])
    whole = jaxfp8.prefill_attention(q, k, v, cu_q, cu_k, causal=True, backend=backend)
    query = jaxfp8.quantize_query(q, cu_q, backend=backend)
    context = jaxfp8.quantize_context(k, v, cu_k, backend=backend)
    state = jaxfp8.attend(query, context, causal=True)
    np.testing.assert_array_equal(state.out, whole.out)
    np.testing.assert_array_equal(state.lse, whole.lse)
    np.testing.assert_array_equal(query.descale, oracle.descale(arrays[0], FNUZ))
    np.testing.assert_array_equal(context.v_descale, oracle.descale(arrays[2], FNUZ))


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_large_logits(precision):
    """Scores of +-60: the weights span the whole range of float32 exponentials."""
    rng = np.random.default_rng(19)
    q, k, v = qkv(rng, 20, 600)
    cu_q, cu_k = cu_seqlens([20]), cu_seqlens([600])
    scores = oracle.attention(q, k, v, cu_q, cu_k, causal=False).lse
    q = (q.astype(np.float32) * (60 / np.abs(scores).max())).astype(q.dtype)
    check("xla", q, k, v, cu_q, cu_k, causal=False, precision=precision)


def test_more_than_one_tile_of_each():
    """Several query and key tiles of the XLA backend, tile edges inside sequences."""
    rng = np.random.default_rng(20)
    lengths_q, lengths_k = [513, 1, 511], [1025, 513, 512]
    q, k, v = qkv(rng, sum(lengths_q), sum(lengths_k), 1)
    for causal in (False, True):
        check(
            "xla", q, k, v, cu_seqlens(lengths_q), cu_seqlens(lengths_k),
            causal=causal, precision="bf16",
        )  # fmt: skip


def test_results_are_arrays_of_the_named_type():
    q, k, v = qkv(np.random.default_rng(0), 4, 4)
    state = jaxfp8.prefill_attention(q, k, v, cu_seqlens([4]), cu_seqlens([4]), causal=True)
    assert isinstance(state, jaxfp8.AttentionState)
    assert all(isinstance(x, jax.Array) for x in state)
