# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Kernels that Triton 3.9 compiled for gfx942; their sources are in data/triton/kernels.txt."""

from __future__ import annotations

import json
import math

import ml_dtypes
import numpy as np
import pytest

from tests.gfx942sim.assembly import DATA, load_data_kernel
from tests.gfx942sim.tools import needs_objdump

pytestmark = needs_objdump

FP8 = ml_dtypes.float8_e4m3fnuz
BF16 = ml_dtypes.bfloat16
LOG2_E = 1.4426950408889634


def launch(name: str, grid, args, **options):
    metadata = json.loads((DATA / "triton" / f"{name}.json").read_text())
    kernel = load_data_kernel("triton", name)
    threads = metadata["num_warps"] * metadata["warp_size"]
    return kernel.launch(grid, threads, args, dynamic_lds_bytes=metadata["shared"], **options)


def relative_rms(value: np.ndarray, reference: np.ndarray) -> float:
    return float(np.sqrt(((value - reference) ** 2).mean() / (reference**2).mean()))


def random_fp8(rng, *shape) -> np.ndarray:
    return rng.standard_normal(shape).astype(FP8)


def test_vector_add_with_masked_tail(rng):
    count = 3000
    a, b = (rng.standard_normal(4096).astype(np.float32) for _ in range(2))
    c = np.zeros(4096, np.float32)
    launch("vadd", 3, [a, b, c, np.int32(count)])
    np.testing.assert_array_equal(c[:count], (a + b)[:count])
    assert not c[count:].any()


@pytest.mark.parametrize("name", ["dot16", "dot32"])
@pytest.mark.parametrize("shape", [(128, 128, 64), (128, 64, 256)])
def test_fp8_dot(rng, name, shape):
    m, n, k = shape
    a, b = random_fp8(rng, m, k), random_fp8(rng, n, k)
    if k == 64:  # every finite code
        codes = np.arange(256, dtype=np.uint8)
        codes[0x80] = 0
        a.view(np.uint8)[:4] = codes.reshape(4, 64)
    c = np.full((m, n), np.nan, np.float32)
    launch(name, (m // 64, n // 64), [a, b, c, np.int32(m), np.int32(n), np.int32(k)])
    reference = a.astype(float) @ b.astype(float).T
    np.testing.assert_allclose(c, reference, atol=1e-6 * np.abs(reference).max())


@pytest.mark.parametrize("scale", [1.0, 2e-6], ids=["normal", "f16 denormals"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("dot_bf16_16", BF16),
        ("dot_bf16_32", BF16),
        ("dot_fp16_16", np.float16),
        ("dot_fp16_32", np.float16),
    ],
)
def test_16_bit_dot(rng, name, dtype, scale):
    n, k = 64, 96
    a = (rng.standard_normal((n, k)) * scale).astype(dtype)
    b = rng.standard_normal((k, n)).astype(dtype)
    c = np.full((n, n), np.nan, np.float32)
    launch(name, 1, [a, b, c, np.int32(n), np.int32(k)])
    reference = a.astype(float) @ b.astype(float)
    np.testing.assert_allclose(c, reference, atol=1e-6 * np.abs(reference).max())


def fp8_attention_same_algorithm(q, k, v, scale, block_m, block_n=64):
    """Causal attention with the tiles and the fp8 rounding of the Triton kernel."""
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    rows, size = q.shape
    output = np.zeros((rows, size), np.float32)
    for start in range(0, rows, block_m):
        tile = slice(start, start + block_m)
        peak = np.full(block_m, -np.inf, np.float32)
        total, acc = np.zeros(block_m, np.float32), np.zeros((block_m, size), np.float32)
        for column in range(0, start + block_m, block_n):
            keys = slice(column, column + block_n)
            scores = (q[tile] @ k[keys].T) * scale
            visible = np.arange(start, start + block_m)[:, None] >= np.arange(
                column, column + block_n
            )
            scores = np.where(visible, scores, -np.inf)
            new_peak = np.maximum(peak, scores.max(1))
            weights, decay = np.exp2(scores - new_peak[:, None]), np.exp2(peak - new_peak)
            total, peak = total * decay + weights.sum(1), new_peak
            acc = (
                acc * decay[:, None]
                + (weights * np.float32(128)).astype(FP8).astype(np.float32) @ v[keys]
            )
        output[tile] = acc / (total * 128)[:, None]
    return output


def fp8_attention(rng, name, block_m, **options):
    rows, size = 256, 128
    q, k, v = (random_fp8(rng, 1, rows, size) for _ in range(3))
    output = np.full((1, rows, size), np.nan, np.float32).astype(BF16)
    scale = np.float32(LOG2_E / np.sqrt(size))
    stats = launch(name, (rows // block_m, 1), [q, k, v, output, scale, np.int32(rows)], **options)
    reference = fp8_attention_same_algorithm(q[0], k[0], v[0], scale, block_m)
    return output[0].astype(np.float32), reference, stats


@pytest.mark.parametrize(("name", "block_m"), [("fa16", 64), ("fa32big", 256)])
def test_fp8_causal_attention(rng, name, block_m):
    output, reference, _ = fp8_attention(rng, name, block_m)
    # bf16 rounding, and rare flips of an fp8 rounding.
    assert relative_rms(output, reference) < 4e-3


@pytest.mark.parametrize(
    "options", [{"reverse_waves": True}, {"uninitialized": 0}, {"detect_races": True}], ids=str
)
def test_attention_is_independent_of_order_and_uninitialized_data(options):
    expected, _, _ = fp8_attention(np.random.default_rng(1), "fa16", 64)
    output, _, _ = fp8_attention(np.random.default_rng(1), "fa16", 64, **options)
    np.testing.assert_array_equal(output, expected)


@pytest.mark.parametrize("name", ["dec1", "dec4"])
def test_paged_decode(rng, name):
    batch, heads, size, page, pages_per_sequence, pages = 3, 16, 128, 16, 12, 64
    lengths = np.array([1, 100, 190], np.int32)
    q = random_fp8(rng, batch, heads, size)
    k, v = random_fp8(rng, pages, page, size), random_fp8(rng, pages, page, size)
    table = rng.permutation(pages)[: batch * pages_per_sequence].reshape(batch, -1).astype(np.int32)
    output = np.full((batch, heads, size), np.nan, np.float32).astype(BF16)
    q_scale, k_scale, v_scale = np.float32(LOG2_E / np.sqrt(size)), np.float32(0.7), np.float32(1.3)
    launch(
        name,
        batch,
        [q, k, v, table, lengths, output, q_scale, k_scale, v_scale, np.int32(pages_per_sequence)],
    )
    for b, length in enumerate(lengths):
        keys, values = (x[table[b]].reshape(-1, size)[:length].astype(float) for x in (k, v))
        scores = q[b].astype(float) @ keys.T * q_scale * k_scale
        weights = np.exp2(scores - scores.max(-1, keepdims=True))
        reference = weights @ values * v_scale / weights.sum(-1, keepdims=True)
        assert relative_rms(output[b].astype(float), reference) < 0.03


def test_fp8_quantization_rounds_like_ml_dtypes(rng):
    values = np.arange(256, dtype=np.uint8).view(FP8).astype(np.float32)
    values = values[np.isfinite(values)]
    ordered = np.sort(values)
    middles = (ordered[1:] + ordered[:-1]) / 2
    special = np.float32(
        [0.0, -0.0, np.nan, np.inf, -np.inf, 247.9, 248, 250, 1e30, -248, 1e-40, 2**-11, -(2**-11)]
    )
    spread = rng.standard_normal(8000) * 10.0 ** rng.uniform(-5, 3, 8000)
    above, below = (np.nextafter(middles, np.float32(end)) for end in (1e9, -1e9))
    x = np.concatenate([values, middles, above, below, special, spread]).astype(np.float32)
    count = x.size
    padded = np.zeros(-(-count // 1024) * 1024, np.float32)
    padded[:count] = x
    codes, decoded = np.zeros(padded.size, np.uint8), np.zeros(padded.size, np.float32)
    launch("cvt", padded.size // 1024, [padded, codes, decoded, np.int32(count)])
    saturated = np.where(np.isnan(x), x, np.clip(x, -240, 240)).astype(FP8)
    np.testing.assert_array_equal(codes[:count], saturated.view(np.uint8))
    np.testing.assert_array_equal(decoded[:count], saturated.astype(np.float32))


@pytest.mark.parametrize("name", ["red1", "red4"])
def test_softmax_reduction(rng, name):
    count, rows = 1000, 3
    x = rng.standard_normal((rows, count)).astype(np.float32) * 3
    total, peak, normalized = (
        np.zeros(rows, np.float32),
        np.zeros(rows, np.float32),
        np.zeros((rows, count), np.float32),
    )
    launch(name, rows, [x, total, peak, normalized, np.int32(count)])
    expected_peak = x.max(1)
    weights = np.exp(x.astype(float) - expected_peak[:, None])
    np.testing.assert_array_equal(peak, expected_peak)
    np.testing.assert_allclose(total, np.log(weights.sum(1)), atol=1e-5)
    np.testing.assert_allclose(normalized, weights / weights.sum(1, keepdims=True), atol=1e-6)


@pytest.mark.parametrize("name", ["ub_glob", "ub_buf"])
def test_unaligned_bytes_and_halves(rng, name):
    count, size = 700, 4096
    x = (rng.standard_normal(size) * 3).astype(FP8)
    bytes_out, halves_out = np.full(size, 0xAA, np.uint8), np.full(size, 0x5555, np.uint16)
    launch(name, 3, [x, bytes_out, halves_out, np.int32(count)])
    index = np.arange(count)
    picked = x.astype(np.float32)[index * 3 + 1]
    expected_bytes, expected_halves = (
        np.full(size, 0xAA, np.uint8),
        np.full(size, 0x5555, np.uint16),
    )
    expected_bytes[index * 3 + 2] = (picked * 2).clip(-240, 240).astype(FP8).view(np.uint8)
    expected_halves[index * 3 + 1] = picked.astype(BF16).view(np.uint16)
    np.testing.assert_array_equal(bytes_out, expected_bytes)
    np.testing.assert_array_equal(halves_out, expected_halves)


@pytest.mark.parametrize("name", ["atom_glob", "atom_buf"])
def test_atomic_add(rng, name):
    count = 700
    x = rng.standard_normal(1024).astype(np.float32)
    index = rng.integers(0, 37, 1024).astype(np.int32)
    y = np.zeros(64, np.float32)
    launch(name, 3, [x, y, index, np.int32(count)])
    np.testing.assert_allclose(
        y, np.bincount(index[:count], x[:count].astype(float), 64), atol=1e-4
    )


# ---------------------------------------------------------------- numbers and lanes


def test_row_quantization_from_bf16(rng):
    rows, count = 5, 1000
    x = (rng.standard_normal((rows, count)) * 3).astype(BF16)
    codes, scale = np.zeros((rows, count), FP8), np.zeros(rows, np.float32)
    launch("quant", rows, [x, codes, scale, np.int32(count)], detect_races=True)
    values = x.astype(np.float32)
    expected_scale = np.maximum(np.abs(values).max(1) / np.float32(240), np.float32(1e-12))
    np.testing.assert_array_equal(scale, expected_scale)
    expected = (values / expected_scale[:, None]).astype(FP8)
    np.testing.assert_array_equal(codes.view(np.uint8), expected.view(np.uint8))


def test_f16_to_bf8(rng):
    count = 5000
    x = (rng.standard_normal(count) * 10.0 ** rng.uniform(-6, 4, count)).astype(np.float16)
    y = np.zeros(count, np.float32)
    launch("quant5", 5, [x, y, np.int32(count)])
    limited = np.clip(x.astype(np.float32), -57344, 57344)
    np.testing.assert_array_equal(y, limited.astype(ml_dtypes.float8_e5m2fnuz).astype(np.float32))


def test_rms_norm(rng):
    rows, count = 4, 1000
    x, weight = (
        rng.standard_normal((rows, count)).astype(BF16),
        rng.standard_normal(count).astype(np.float16),
    )
    y = np.zeros((rows, count), np.float16)
    launch("rmsnorm", rows, [x, weight, y, np.int32(count), np.float32(1e-5)], detect_races=True)
    values = x.astype(float)
    expected = values / np.sqrt((values**2).mean(1, keepdims=True) + 1e-5) * weight.astype(float)
    np.testing.assert_allclose(y.astype(float), expected, rtol=1e-3)


def test_rotary_embedding(rng):
    positions, size = np.array([0, 1, 5, 100, 4000], np.int32), 128
    half = size // 2
    x = rng.standard_normal((positions.size, size)).astype(np.float32)
    y = np.zeros_like(x)
    launch("rope", positions.size, [x, positions, y, np.int32(size)])
    angle = positions[:, None] * np.exp2(-np.arange(half) * (13.287712 / half))
    cosine, sine = np.cos(angle), np.sin(angle)
    a, b = x[:, :half], x[:, half:]
    expected = np.concatenate([a * cosine - b * sine, a * sine + b * cosine], axis=1)
    np.testing.assert_allclose(y, expected, atol=1e-3)  # f32 angles of a few thousand radians


def test_elementwise_functions(rng):
    count = 3000
    x = (rng.standard_normal(count) * 5).astype(np.float32)
    x[:6] = 0, -0.0, np.inf, -np.inf, np.nan, -87
    y = np.zeros((8, count), np.float32)
    launch("unary", 3, [x, y, np.int32(count)])
    wide = x.astype(float)
    with np.errstate(all="ignore"):
        expected = [
            np.exp(wide),
            np.log(np.abs(wide)),
            np.sqrt(np.abs(wide)),
            np.array([math.erf(value) for value in wide]),
            1 / (1 + np.exp(-wide)),
            np.floor(wide) + np.ceil(wide * 0.5),
            np.sin(wide),
            np.tanh(wide),
        ]
    np.testing.assert_allclose(y, np.float32(expected), rtol=1e-5)


def test_integer_arithmetic(rng):
    count = 3000
    x, y = (rng.integers(-(2**31), 2**31, count).astype(np.int32) for _ in range(2))
    y[:1000] = rng.integers(1, 100, 1000)
    z = np.zeros((8, count), np.int32)
    launch("ints", 3, [x, y, z, np.int32(count)])
    a, b = x.astype(np.int64), y.astype(np.int64)
    quotient = np.abs(a) // np.abs(b) * np.sign(a) * np.sign(b)
    high = (x.view(np.uint32).astype(np.uint64) * y.view(np.uint32)) >> np.uint64(32)
    total = a * b + 12345678901
    with np.errstate(over="ignore"):
        narrow = x.astype(np.int16) * y.astype(np.int16) + x.astype(np.int8).astype(np.int16)
    expected = [
        quotient,
        a - quotient * b,
        high.astype(np.uint32).view(np.int32),
        (x << 3) ^ ((y >> 2) & 0xFF) | (x & y),
        np.minimum(x, y) - np.maximum(x, 7),
        total >> 17,
        np.abs(total) // 1000003 * np.sign(total),
        narrow,
    ]
    for value, reference in zip(z, expected, strict=True):
        np.testing.assert_array_equal(value, reference.astype(np.int32))


def test_scan_sort_and_arg_reductions(rng):
    count = 512
    x = rng.standard_normal(count).astype(np.float32)
    y, positions = np.zeros((2, count), np.float32), np.zeros(2, np.int32)
    launch("scan", 1, [x, y, positions, np.int32(count)], detect_races=True)
    np.testing.assert_allclose(y[0], np.cumsum(x.astype(float)), atol=1e-5)
    np.testing.assert_array_equal(y[1], np.sort(x))
    np.testing.assert_array_equal(positions, [x.argmax(), x.argmin()])


@pytest.mark.parametrize("instruction_rows", [16, 32])
@pytest.mark.parametrize("kind", ["i8", "f32", "bf8"])
def test_other_dot_types(rng, kind, instruction_rows):
    rows, k = 64, 128
    dtype = {"i8": np.int8, "f32": np.float32, "bf8": ml_dtypes.float8_e5m2fnuz}[kind]
    a, b = (
        (rng.standard_normal((rows, k)) * (30 if kind == "i8" else 1)).astype(dtype)
        for _ in range(2)
    )
    c = np.zeros((rows, rows), np.int32 if kind == "i8" else np.float32)
    launch(f"dot{kind}_{instruction_rows}", 1, [a, b, c, np.int32(k)])
    reference = a.astype(float) @ b.astype(float).T
    np.testing.assert_allclose(
        c, reference, atol=0 if kind == "i8" else 1e-6 * np.abs(reference).max()
    )


def test_f64_arithmetic(rng):
    count = 1500
    x = rng.standard_normal(count) * 10.0 ** rng.uniform(-5, 5, count)
    y = np.zeros(count)
    launch("f64k", 2, [x, y, np.int32(count)])
    np.testing.assert_allclose(y, x * x + 1 / x - np.sqrt(np.abs(x)), rtol=1e-13)


def test_f16_arithmetic(rng):
    count = 3000
    x, y = (
        rng.standard_normal(count).astype(np.float16),
        (rng.standard_normal(count) * 30).astype(np.float16),
    )
    z = np.zeros((4, count), np.float16)
    launch("f16k", 3, [x, y, z, np.int32(count)])
    a, b = x.astype(float), y.astype(float)
    expected = [
        (a * b + a).astype(np.float16),
        np.maximum(x, y) - np.minimum(x * x, y),
        (a / b).astype(np.float16),
        x.astype(np.int32).astype(np.float16) + y.astype(np.int16).astype(np.float16),
    ]
    np.testing.assert_array_equal(z, expected)


def test_contended_atomics(rng):
    """Only values >= 0: Triton 3.9 combines lanes of a signed atomic_max with v_max_u32."""
    count = 3000
    x, index = (
        rng.integers(0, 50, count).astype(np.int32),
        rng.integers(0, 40, count).astype(np.int32),
    )
    largest, counts, total = (
        np.full(64, -1, np.int32),
        np.zeros(64, np.int32),
        np.zeros(64, np.float16),
    )
    launch("atomics", 3, [x, index, largest, counts, total, np.int32(count)])
    expected = np.full(64, -1, np.int32)
    np.maximum.at(expected, index, x)
    np.testing.assert_array_equal(largest, expected)
    np.testing.assert_array_equal(counts, np.bincount(index, minlength=64))
    np.testing.assert_allclose(total, np.bincount(index, x, 64), rtol=2e-3)
