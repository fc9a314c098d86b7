# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Vector ALU instructions against numpy, one snippet each."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from tests.gfx942sim.tools import needs_assembler

pytestmark = needs_assembler

U32, I32, F32, F16 = np.uint32, np.int32, np.float32, np.float16

SPECIAL_F32 = F32(
    [
        0,
        -0.0,
        1,
        -1,
        np.inf,
        -np.inf,
        np.nan,
        1e-40,
        -1e-40,
        3.4e38,
        2**-126,
        65504,
        1.5,
        2.5,
        -2.5,
        240,
    ]
)


def random_u32(rng) -> np.ndarray:
    return rng.integers(0, 1 << 32, 64, dtype=U32)


def random_f32(rng) -> np.ndarray:
    values = (rng.standard_normal(64) * 10.0 ** rng.uniform(-4, 4, 64)).astype(F32)
    values[: SPECIAL_F32.size] = rng.permutation(SPECIAL_F32)
    return values


def signed(x):
    return x.view(I32)


def shift(x, amount):
    return x << (amount & U32(31))


INTEGER_CASES = [
    ("v_add_u32 v100, v1, v2", lambda a, b, c: a + b),
    ("v_sub_u32 v100, v1, v2", lambda a, b, c: a - b),
    ("v_subrev_u32 v100, v1, v2", lambda a, b, c: b - a),
    ("v_add_u32 v100, 7, v2", lambda a, b, c: b + U32(7)),
    ("v_add_u32 v100, -3, v2", lambda a, b, c: b - U32(3)),
    ("v_add_u32 v100, 0x12345678, v2", lambda a, b, c: b + U32(0x12345678)),
    (
        "v_add_u32_e64 v100, v1, v2 clamp",
        lambda a, b, c: np.minimum(a.astype(np.uint64) + b, 0xFFFFFFFF).astype(U32),
    ),
    ("v_sub_u32_e64 v100, v1, v2 clamp", lambda a, b, c: np.where(a > b, a - b, 0).astype(U32)),
    ("v_mul_lo_u32 v100, v1, v2", lambda a, b, c: a * b),
    (
        "v_mul_hi_u32 v100, v1, v2",
        lambda a, b, c: (a.astype(np.uint64) * b >> np.uint64(32)).astype(U32),
    ),
    (
        "v_mul_hi_i32 v100, v1, v2",
        lambda a, b, c: (signed(a).astype(np.int64) * signed(b) >> 32).astype(U32),
    ),
    ("v_mul_u32_u24 v100, v1, v2", lambda a, b, c: (a & U32(0xFFFFFF)) * (b & U32(0xFFFFFF))),
    (
        "v_mad_u32_u24 v100, v1, v2, v3",
        lambda a, b, c: (a & U32(0xFFFFFF)) * (b & U32(0xFFFFFF)) + c,
    ),
    ("v_add3_u32 v100, v1, v2, v3", lambda a, b, c: a + b + c),
    ("v_lshl_add_u32 v100, v1, v2, v3", lambda a, b, c: shift(a, b) + c),
    ("v_add_lshl_u32 v100, v1, v2, v3", lambda a, b, c: shift(a + b, c)),
    ("v_lshl_or_b32 v100, v1, v2, v3", lambda a, b, c: shift(a, b) | c),
    ("v_and_or_b32 v100, v1, v2, v3", lambda a, b, c: a & b | c),
    ("v_or3_b32 v100, v1, v2, v3", lambda a, b, c: a | b | c),
    ("v_xad_u32 v100, v1, v2, v3", lambda a, b, c: (a ^ b) + c),
    ("v_bfe_u32 v100, v1, 5, 7", lambda a, b, c: a >> U32(5) & U32(127)),
    ("v_bfe_i32 v100, v1, 5, 7", lambda a, b, c: (a.view(I32) << I32(20) >> I32(25)).view(U32)),
    (
        "v_bfe_i32 v100, v1, 4, 1",
        lambda a, b, c: np.where(a >> U32(4) & U32(1), U32(0xFFFFFFFF), U32(0)),
    ),
    ("v_bfi_b32 v100, v1, v2, v3", lambda a, b, c: a & b | ~a & c),
    ("v_bfrev_b32 v100, v1", lambda a, b, c: U32([int(f"{x:032b}"[::-1], 2) for x in a.tolist()])),
    (
        "v_ffbh_u32 v100, v1",
        lambda a, b, c: U32([32 - x.bit_length() if x else 2**32 - 1 for x in a.tolist()]),
    ),
    (
        "v_ffbl_b32 v100, v1",
        lambda a, b, c: U32([(x & -x).bit_length() - 1 if x else 2**32 - 1 for x in a.tolist()]),
    ),
    ("v_bcnt_u32_b32 v100, v1, v2", lambda a, b, c: U32([x.bit_count() for x in a.tolist()]) + b),
    ("v_lshlrev_b32 v100, v1, v2", lambda a, b, c: shift(b, a)),
    ("v_lshrrev_b32 v100, v1, v2", lambda a, b, c: b >> (a & U32(31))),
    (
        "v_ashrrev_i32 v100, v1, v2",
        lambda a, b, c: (b.view(I32) >> (a & U32(31)).astype(I32)).view(U32),
    ),
    ("v_alignbit_b32 v100, v1, v2, 12", lambda a, b, c: b >> U32(12) | a << U32(20)),
    ("v_alignbyte_b32 v100, v1, v2, 1", lambda a, b, c: b >> U32(8) | a << U32(24)),
    ("v_min_i32 v100, v1, v2", lambda a, b, c: np.minimum(a.view(I32), b.view(I32)).view(U32)),
    ("v_max_u32 v100, v1, v2", lambda a, b, c: np.maximum(a, b)),
    ("v_max3_u32 v100, v1, v2, v3", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    (
        "v_med3_i32 v100, v1, v2, v3",
        lambda a, b, c: np.sort(np.stack([a, b, c]).view(I32), axis=0)[1].view(U32),
    ),
    ("v_not_b32 v100, v1", lambda a, b, c: ~a),
    ("v_xnor_b32 v100, v1, v2", lambda a, b, c: ~(a ^ b)),
    ("v_add_u16 v100, v1, v2", lambda a, b, c: a + b & U32(0xFFFF)),
    ("v_lshlrev_b16 v100, 8, v2", lambda a, b, c: b << U32(8) & U32(0xFFFF)),
    ("v_cndmask_b32 v100, v1, v2, vcc", lambda a, b, c: np.where(a < b, b, a)),
]


@pytest.mark.parametrize(
    ("text", "expected"), INTEGER_CASES, ids=[text for text, _ in INTEGER_CASES]
)
def test_integer(run, rng, text, expected):
    a, b, c = (random_u32(rng) for _ in range(3))
    a[:2] = 0, 1
    result = run(f"v_cmp_lt_u32 vcc, v1, v2\n{text}", a, b, c)
    np.testing.assert_array_equal(result, expected(a, b, c))


@pytest.mark.parametrize("selector", [0x07060302, 0x05040100, 0x0C0C0007, 0x0D080B0A, 0x090C0403])
@pytest.mark.parametrize("uniform", [True, False])
def test_perm(run, rng, selector, uniform):
    a, b = random_u32(rng), random_u32(rng)
    text = f"s_mov_b32 s8, 0x{selector:x}\n" + (
        "v_perm_b32 v100, v1, v2, s8" if uniform else "v_perm_b32 v100, v1, v2, v3"
    )
    result = run(text, a, b, U32(selector))
    for high, low, value in zip(a.tolist(), b.tolist(), result.tolist(), strict=True):
        data = (high << 32 | low).to_bytes(8, "little")
        signs = [0xFF if data[i] & 0x80 else 0 for i in (1, 3, 5, 7)]
        table = [*data, *signs, 0, 0xFF]
        assert value == int.from_bytes(
            bytes(table[s] for s in selector.to_bytes(4, "little")), "little"
        )


FLOAT_CASES = [
    ("v_add_f32 v100, v1, v2", lambda a, b, c: a + b),
    ("v_sub_f32 v100, v1, v2", lambda a, b, c: a - b),
    ("v_subrev_f32 v100, v1, v2", lambda a, b, c: b - a),
    ("v_mul_f32 v100, v1, v2", lambda a, b, c: a * b),
    ("v_mul_f32_e64 v100, -v1, |v2|", lambda a, b, c: -a * np.abs(b)),
    ("v_mul_f32_e64 v100, v1, v2 mul:2", lambda a, b, c: a * b * F32(2)),
    (
        "v_add_f32_e64 v100, v1, v2 clamp",
        lambda a, b, c: np.nan_to_num(np.clip(a + b, F32(0), F32(1)), nan=0),
    ),
    ("v_add_f32 v100, 0.5, v2", lambda a, b, c: F32(0.5) + b),
    ("v_max_f32 v100, v1, v2", lambda a, b, c: np.fmax(a, b)),
    ("v_min_f32 v100, v1, v2", lambda a, b, c: np.fmin(a, b)),
    ("v_max3_f32 v100, v1, v2, v3", lambda a, b, c: np.fmax(np.fmax(a, b), c)),
    ("v_min3_f32 v100, v1, v2, v3", lambda a, b, c: np.fmin(np.fmin(a, b), c)),
    ("v_floor_f32 v100, v1", lambda a, b, c: np.floor(a)),
    ("v_rndne_f32 v100, v1", lambda a, b, c: np.rint(a)),
    ("v_trunc_f32 v100, v1", lambda a, b, c: np.trunc(a)),
    ("v_cndmask_b32_e64 v100, -v1, |v2|, vcc", lambda a, b, c: np.where(a < b, np.abs(b), -a)),
    ("v_mov_b32 v100, 1.0", lambda a, b, c: np.ones_like(a)),
    ("v_cvt_f32_i32 v100, v4", lambda a, b, c: np.arange(64).astype(F32)),
]


@pytest.mark.parametrize(("text", "expected"), FLOAT_CASES, ids=[text for text, _ in FLOAT_CASES])
def test_float(run, rng, text, expected):
    a, b, c = (random_f32(rng) for _ in range(3))
    result = run(f"v_cmp_lt_f32 vcc, v1, v2\n{text}", a, b, c, np.arange(64, dtype=U32), dtype=F32)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(result, expected(a, b, c))


def exact_round_f32(value: Fraction) -> np.float32:
    """Round an exact rational to the nearest f32, ties to even."""
    guess = F32(float(value))
    candidates = [np.nextafter(guess, F32(-np.inf)), guess, np.nextafter(guess, F32(np.inf))]
    return min(candidates, key=lambda x: (abs(Fraction(float(x)) - value), int(x.view(U32)) & 1))


@pytest.mark.parametrize(
    "text", ["v_fma_f32 v100, v1, v2, v3", "v_mov_b32 v100, v3\nv_fmac_f32 v100, v1, v2"]
)
def test_fma_rounds_once(run, rng, text):
    a, b = (rng.standard_normal(64).astype(F32) for _ in range(2))
    c = (-(a.astype(float) * b.astype(float)) * (1 + rng.uniform(-1e-6, 1e-6, 64))).astype(F32)
    # Ties of the f32 rounding that only a tiny addend breaks.
    a[:8], b[:8], c[:8] = (
        F32(1 + 2**-12),
        F32(1 + 2**-12),
        F32([2**-60, -(2**-60), 0, 1, 2**-90, -(2**-90), 2**40, -(2**-30)]),
    )
    a[8:12], b[8:12], c[8:12] = F32(2**-75), F32(2**-75), F32([2**-149, 0, -(2**-149), 2**-126])
    result = run(text, a, b, c, dtype=F32)
    expected = [
        exact_round_f32(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
        for x, y, z in zip(a, b, c, strict=True)
    ]
    np.testing.assert_array_equal(result, F32(expected))


def test_fmamk_and_fmaak(run, rng):
    a, b = (rng.integers(-100, 100, 64).astype(F32) for _ in range(2))
    result = run(
        "v_fmamk_f32 v100, v1, 0x40400000, v2\nv_fmaak_f32 v101, v1, v2, 0x40400000",
        a,
        b,
        outputs=2,
        dtype=F32,
    )
    np.testing.assert_array_equal(result, [a * 3 + b, a * b + 3])


def test_med3_and_nan(run):
    a, b, c = F32([1, 5, 3, np.nan]), F32([2, 1, 1, 2]), F32([3, 9, 2, 1])
    result = run(
        "v_med3_f32 v100, v1, v2, v3",
        np.resize(a, 64),
        np.resize(b, 64),
        np.resize(c, 64),
        dtype=F32,
    )
    np.testing.assert_array_equal(result[:4], F32([2, 5, 2, 1]))


def test_max_quiets_signaling_nan_and_orders_zeros(run):
    signaling = U32([0x7F800001, 0x7FC00000, 0x80000000, 0x00000000])
    other = U32([0x3F800000, 0x3F800000, 0x00000000, 0x80000000])
    result = run(
        "v_max_f32 v100, v1, v2\nv_min_f32 v101, v1, v2",
        np.resize(signaling, 64),
        np.resize(other, 64),
        outputs=2,
    )
    np.testing.assert_array_equal(result[0, :4], U32([0x7FC00001, 0x3F800000, 0, 0]))
    np.testing.assert_array_equal(result[1, 2:4], U32([0x80000000, 0x80000000]))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("exp", np.exp2),
        ("log", np.log2),
        ("rcp", lambda x: 1 / x),
        ("rsq", lambda x: 1 / np.sqrt(x)),
        ("sqrt", np.sqrt),
    ],
)
def test_transcendental_flushes_denormals(run, rng, name, function):
    x = np.abs(random_f32(rng))
    with np.errstate(all="ignore"):
        flushed = np.where(np.abs(x) < 2.0**-126, 0, x).astype(float)
        expected = function(flushed).astype(F32)
        expected = np.where(np.abs(expected) < 2.0**-126, 0, expected)
    np.testing.assert_array_equal(run(f"v_{name}_f32 v100, v1", x, dtype=F32), expected)


DIVIDE_F32 = """
  v_div_scale_f32 v10, s[8:9], v2, v2, v1
  v_rcp_f32 v11, v10
  v_div_scale_f32 v12, vcc, v1, v2, v1
  v_fma_f32 v13, -v10, v11, 1.0
  v_fmac_f32 v11, v13, v11
  v_mul_f32 v13, v12, v11
  v_fma_f32 v14, -v10, v13, v12
  v_fmac_f32 v13, v14, v11
  v_fma_f32 v10, -v10, v13, v12
  v_div_fmas_f32 v10, v10, v11, v13
  v_div_fixup_f32 v100, v10, v2, v1
"""


@pytest.mark.parametrize("exponents", [(-3, 3), (-37, 37), (-44, 38)])
def test_division_sequence_is_correctly_rounded(run, rng, exponents):
    a, b = (
        (rng.standard_normal(64) * 10.0 ** rng.uniform(*exponents, 64)).astype(F32)
        for _ in range(2)
    )
    a[:10] = 0, 0, 1, -1, np.inf, np.inf, np.nan, 1, 3.4e38, 1e-38
    b[:10] = 0, 1, 0, 0, np.inf, 2, 1, np.inf, 1e-3, 2**24
    with np.errstate(all="ignore"):
        expected = a / b
    np.testing.assert_array_equal(run(DIVIDE_F32, a, b, dtype=F32), expected)


def test_ldexp_frexp_fract(run):
    x = F32([1.5, -3.75, 0.1, 1e-40])
    text = (
        "v_ldexp_f32 v100, v1, -3\nv_frexp_mant_f32 v101, v1\n"
        "v_frexp_exp_i32_f32 v102, v1\nv_fract_f32 v103, v1"
    )
    result = run(text, np.resize(x, 64), outputs=4)[:, :4]
    mantissa, exponent = np.frexp(x)
    np.testing.assert_array_equal(result[0].view(F32), np.ldexp(x, -3))
    np.testing.assert_array_equal(result[1].view(F32), mantissa)
    np.testing.assert_array_equal(result[2].view(I32), exponent)
    np.testing.assert_array_equal(result[3].view(F32), x - np.floor(x))


def test_float_to_integer_saturates(run):
    x = F32([1.9, -1.9, 3e9, 5e9, -3e9, np.nan, np.inf, -np.inf])
    result = run("v_cvt_u32_f32 v100, v1\nv_cvt_i32_f32 v101, v1", np.resize(x, 64), outputs=2)[
        :, :8
    ]
    np.testing.assert_array_equal(
        result[0], U32([1, 0, 3000000000, 0xFFFFFFFF, 0, 0, 0xFFFFFFFF, 0])
    )
    np.testing.assert_array_equal(
        result[1].view(I32), I32([1, -1, 2**31 - 1, 2**31 - 1, -(2**31), 0, 2**31 - 1, -(2**31)])
    )


def test_compares_and_classes(run):
    a, b = F32([1, 2, np.nan, -0.0, np.inf, 1e-40]), F32([2, 1, 1, 0.0, np.inf, 0])
    text = """
      v_cmp_lt_f32 vcc, v1, v2
      v_mov_b32 v100, vcc_lo
      v_cmp_o_f32_e64 s[8:9], v1, v2
      v_mov_b32 v101, s8
      v_cmp_nge_f32 vcc, v1, v2
      v_mov_b32 v102, vcc_lo
      v_mov_b32 v3, 0x230
      v_cmp_class_f32 vcc, v1, v3
      v_mov_b32 v103, vcc_lo
      v_cmp_gt_i32 vcc, -1, v1
      v_mov_b32 v104, vcc_lo
    """
    result = run(
        text,
        np.resize(np.append(a, F32([0, 0])), 64),
        np.resize(np.append(b, F32([0, 0])), 64),
        outputs=5,
    )
    bits = result[:, 0] & 0x3F
    np.testing.assert_array_equal(bits, [0b000001, 0b111011, 0b000101, 0b011000, 0b001000])


def test_inactive_lanes_keep_their_value_and_compare_to_zero(run):
    text = """
      v_mov_b32 v100, 5
      v_mov_b32 v101, 0
      s_mov_b64 s[8:9], exec
      s_mov_b64 exec, 0xf0
      v_mov_b32 v100, 6
      v_cmp_eq_u32 vcc, v0, v0
      s_mov_b64 exec, s[8:9]
      v_mov_b32 v101, vcc_lo
    """
    result = run(text, outputs=2)
    np.testing.assert_array_equal(result[0], [6 if 4 <= lane < 8 else 5 for lane in range(64)])
    assert result[1, 0] == 0xF0


def test_cmpx_sets_exec(run):
    result = run(
        "v_mov_b32 v100, 0\nv_cmpx_gt_u32 exec, 3, v0\nv_mov_b32 v100, 1\ns_mov_b64 exec, -1"
    )
    np.testing.assert_array_equal(result, [1] * 3 + [0] * 61)


def test_64_bit_integers(run, rng):
    a, b, c, d = (random_u32(rng) for _ in range(4))
    text = """
      v_lshl_add_u64 v[100:101], v[2:3], 3, v[4:5]
      v_lshlrev_b64 v[102:103], 12, v[2:3]
      v_ashrrev_i64 v[104:105], 12, v[2:3]
      v_mad_u64_u32 v[106:107], s[8:9], v2, v3, v[4:5]
      v_add_co_u32 v108, vcc, v2, v4
      v_addc_co_u32 v109, vcc, v3, v5, vcc
      v_sub_co_u32 v110, vcc, v2, v4
      v_subb_co_u32 v111, vcc, v3, v5, vcc
    """
    result = run(text, a, a, b, c, d, outputs=12)
    pair = [
        (result[i].astype(object) + (result[i + 1].astype(object) << 32)) for i in range(0, 12, 2)
    ]
    x, y = a.astype(object) + (b.astype(object) << 32), c.astype(object) + (d.astype(object) << 32)
    signed = np.where(x >= 1 << 63, x - (1 << 64), x)
    for value, expected in zip(
        pair,
        (
            (x << 3) + y,
            x << 12,
            signed >> 12,
            a.astype(object) * b.astype(object) + y,
            x + y,
            x - y,
        ),
        strict=True,
    ):
        np.testing.assert_array_equal(value, expected % (1 << 64))


def test_packed_f32(run, rng):
    a, b, c, d = (rng.standard_normal(64).astype(F32) for _ in range(4))
    text = """
      s_mov_b32 s8, 2.0
      s_mov_b32 s9, 3.0
      v_pk_mul_f32 v[100:101], v[2:3], v[4:5] op_sel_hi:[0,1]
      v_pk_add_f32 v[102:103], v[2:3], v[4:5] op_sel_hi:[1,0] neg_lo:[0,1] neg_hi:[0,1]
      v_pk_mul_f32 v[104:105], v[2:3], s[8:9]
      v_pk_fma_f32 v[106:107], v[2:3], 2.0, v[4:5] op_sel:[1,0,0] op_sel_hi:[0,0,1]
      v_pk_mov_b32 v[108:109], v[2:3], v[4:5] op_sel:[1,0]
    """
    result = run(text, a, a, b, c, d, outputs=10, dtype=F32)
    expected = [a * c, a * d, a - c, b - c, a * 2, b * 3, b * 2 + c, a * 2 + d, b, c]
    np.testing.assert_array_equal(result, expected)


def test_packed_16(run, rng):
    halves = [rng.standard_normal((64, 2)).astype(F16) for _ in range(3)]
    a, b, c = (x.view(U32)[:, 0] for x in halves)
    text = """
      v_pk_add_f16 v100, v1, v2
      v_pk_mul_f16 v101, v1, v2 op_sel:[1,0] op_sel_hi:[0,1]
      v_pk_fma_f16 v102, v1, v2, v3 neg_lo:[1,0,0]
      v_pk_add_u16 v103, v1, v2
      v_pk_lshlrev_b16 v104, 3, v1 op_sel_hi:[0,1]
    """
    result = run(text, a, b, c, outputs=5)
    x, y, z = halves
    sign = np.float64([-1, 1])
    fma = (x.astype(float) * y.astype(float) * sign + z.astype(float)).astype(F16)
    integers = [h.view(np.uint16) for h in halves]
    for value, expected in zip(
        result,
        (x + y, x[:, ::-1] * y, fma, integers[0] + integers[1], integers[0] << 3),
        strict=True,
    ):
        np.testing.assert_array_equal(value, np.ascontiguousarray(expected).view(U32)[:, 0])


def test_f16_arithmetic_and_conversions(run, rng):
    a, b = (rng.standard_normal(64).astype(F16) for _ in range(2))
    packed = np.stack([a, b], axis=1).view(U32)[:, 0]
    x = (rng.standard_normal(64) * 100).astype(F32)
    text = """
      v_cvt_f32_f16 v100, v1
      v_cvt_f32_f16_sdwa v101, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1
      v_cvt_f16_f32 v102, v2
      v_cvt_pkrtz_f16_f32 v103, v2, -v2
      v_add_f16_sdwa v104, v1, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_0 src1_sel:WORD_1
      v_pack_b32_f16 v105, v1, v1 op_sel:[1,0]
    """  # noqa: E501
    result = run(text, packed, x, outputs=6)
    np.testing.assert_array_equal(result[:2].view(F32), [a, b])
    np.testing.assert_array_equal(result[2], x.astype(F16).view(np.uint16))
    toward_zero = result[3].astype(np.uint16).view(F16)
    assert (np.abs(toward_zero.astype(F32)) <= np.abs(x)).all()
    np.testing.assert_allclose(toward_zero, x, rtol=1e-3)
    np.testing.assert_array_equal(result[4], (a + b).view(np.uint16))
    np.testing.assert_array_equal(result[5], np.stack([b, a], axis=1).view(U32)[:, 0])


def test_fma_mix(run, rng):
    halves = rng.standard_normal((64, 2)).astype(F16)
    x, y = (rng.standard_normal(64).astype(F32) for _ in range(2))
    text = """
      v_fma_mix_f32 v100, v1, v2, -v3 op_sel:[1,0,0] op_sel_hi:[1,0,0]
      v_mov_b32 v101, 0
      v_fma_mixhi_f16 v101, v2, v2, v3
    """
    result = run(text, halves.view(U32)[:, 0], x, y, outputs=2)
    expected = (halves[:, 1].astype(float) * x - y).astype(F32)
    np.testing.assert_array_equal(result[0].view(F32), expected)
    high = (x.astype(float) * x + y).astype(F32).astype(F16)
    np.testing.assert_array_equal(result[1], high.view(np.uint16).astype(U32) << 16)


def test_sdwa_selects(run, rng):
    a, b = random_u32(rng), random_u32(rng)
    text = """
      v_and_b32_sdwa v100, v1, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:DWORD
      v_mov_b32 v101, v2
      v_add_u32_sdwa v101, v1, v2 dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_2 src1_sel:BYTE_0
      v_lshrrev_b32_sdwa v102, v1, v2 dst_sel:BYTE_3 dst_unused:UNUSED_PAD src0_sel:BYTE_0 src1_sel:DWORD
      v_mov_b32_sdwa v103, sext(v1) dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_3
      v_cmp_gt_u32_sdwa vcc, v1, v2 src0_sel:BYTE_1 src1_sel:BYTE_1
      v_cndmask_b32 v104, 0, 1, vcc
    """  # noqa: E501
    result = run(text, a, b, outputs=5)
    byte = U32(0xFF)
    total = (a >> U32(16) & byte) + (b & byte) & byte
    np.testing.assert_array_equal(result[0], a >> U32(16) & b)
    np.testing.assert_array_equal(result[1], b & ~U32(0xFF00) | total << U32(8))
    np.testing.assert_array_equal(result[2], (b >> (a & byte & U32(31)) & byte) << U32(24))
    np.testing.assert_array_equal(result[3], (a.view(I32) >> I32(24)).view(U32))
    np.testing.assert_array_equal(result[4], (a >> U32(8) & byte) > (b >> U32(8) & byte))


LANES = np.arange(64)


@pytest.mark.parametrize(
    ("control", "source"),
    [
        ("quad_perm:[1,0,3,2]", LANES ^ 1),
        ("quad_perm:[2,2,2,2]", LANES // 4 * 4 + 2),
        ("row_ror:4", LANES // 16 * 16 + (LANES - 4) % 16),
        ("row_mirror", LANES // 16 * 16 + 15 - LANES % 16),
        ("row_half_mirror", LANES // 8 * 8 + 7 - LANES % 8),
        ("row_newbcast:3", LANES // 16 * 16 + 3),
        ("row_shr:1", np.where(LANES % 16 >= 1, LANES - 1, -1)),
        ("row_shl:2", np.where(LANES % 16 < 14, LANES + 2, -1)),
        ("wave_shr:1", LANES - 1),
        ("row_bcast:15", np.where(LANES >= 16, LANES // 16 * 16 - 1, -1)),
        ("row_bcast:31", np.where(LANES >= 32, 31, -1)),
    ],
    ids=str,
)
def test_dpp(run, rng, control, source):
    a = random_u32(rng)
    text = f"""
      v_mov_b32 v100, 7
      s_nop 1
      v_mov_b32_dpp v100, v1 {control} row_mask:0xf bank_mask:0xf
      v_mov_b32 v101, 7
      v_mov_b32_dpp v101, v1 {control} row_mask:0xf bank_mask:0xf bound_ctrl:0
      v_mov_b32 v102, 7
      v_mov_b32_dpp v102, v1 {control} row_mask:0xa bank_mask:0xf
    """
    result = run(text, a, outputs=3)
    np.testing.assert_array_equal(result[0], np.where(source < 0, 7, a[source]))
    np.testing.assert_array_equal(result[1], np.where(source < 0, 0, a[source]))
    np.testing.assert_array_equal(
        result[2], np.where((source < 0) | (LANES // 16 % 2 == 0), 7, a[source])
    )


def test_dpp_of_16_bits(run, rng):
    a, b = random_u32(rng), random_u32(rng)
    text = """
      v_mov_b32 v100, v2
      s_nop 1
      v_max_i16_dpp v100, v1, v2 quad_perm:[2,3,0,1] row_mask:0xf bank_mask:0xf bound_ctrl:0
    """
    result = run(text, a, b)
    low, other = (x.astype(np.uint16).view(np.int16) for x in (a[LANES ^ 2], b))
    np.testing.assert_array_equal(result, np.maximum(low, other).view(np.uint16).astype(U32))


def test_lane_access(run, rng):
    a = random_u32(rng)
    text = """
      v_readlane_b32 s8, v1, 5
      v_mov_b32 v100, s8
      s_mov_b64 s[10:11], exec
      s_mov_b64 exec, 0x3000
      v_readfirstlane_b32 s9, v1
      s_mov_b64 exec, s[10:11]
      v_mov_b32 v101, s9
      v_mov_b32 v102, 0
      v_writelane_b32 v102, s8, 3
      v_mbcnt_lo_u32_b32 v103, -1, 0
      v_mbcnt_hi_u32_b32 v103, -1, v103
      v_mov_b32 v104, v1
      v_mov_b32 v105, v0
      v_swap_b32 v104, v105
    """
    result = run(text, a, outputs=6)
    assert (result[0] == a[5]).all() and (result[1] == a[12]).all()
    np.testing.assert_array_equal(result[2], np.where(LANES == 3, a[5], 0))
    np.testing.assert_array_equal(result[3], LANES)
    np.testing.assert_array_equal(result[4:6], [LANES, a])


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp8", ml_dtypes.float8_e4m3fnuz), ("bf8", ml_dtypes.float8_e5m2fnuz)],
    ids=["fp8", "bf8"],
)
def test_fp8_conversions(run, rng, name, dtype, saturate):
    a, b = random_f32(rng), random_f32(rng)
    a[16:20] = 247.99, 248, -300, 1e6
    text = f"""
      s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), {int(saturate)}
      v_mov_b32 v100, 0
      v_cvt_pk_{name}_f32 v100, v1, v2
      v_cvt_pk_{name}_f32 v100, v2, -v1 op_sel:[0,0,1]
      v_cvt_f32_{name}_sdwa v101, v100 src0_sel:BYTE_1
      v_cvt_pk_f32_{name}_sdwa v[102:103], v100 src0_sel:WORD_1
      v_cvt_f32_{name} v104, v100
    """
    result = run(text, a, b, outputs=5)
    largest = float(ml_dtypes.finfo(dtype).max)

    def encode(x):
        with np.errstate(invalid="ignore"):
            return (np.clip(x, -largest, largest) if saturate else x).astype(dtype)

    codes = [encode(x) for x in (a, b, b, -a)]
    np.testing.assert_array_equal(
        result[0], np.stack([x.view(np.uint8) for x in codes], axis=1).view(U32)[:, 0]
    )
    decoded = [codes[1], codes[2], codes[3], codes[0]]
    np.testing.assert_array_equal(result[1:].view(F32), [x.astype(F32) for x in decoded])


def test_denormal_mode(run):
    x = F32([1e-40, 2**-126, 1, -1e-40])
    text = (
        "v_mul_f32 v100, 2.0, v1\nv_pk_mul_f32 v[102:103], v[2:3], 1.0 op_sel_hi:[1,0]\n"
        "v_mov_b32 v101, v1"
    )
    kept = run(text, *[np.resize(x, 64)] * 3, outputs=4, dtype=F32, denorm_f32=3)
    flushed = run(text, *[np.resize(x, 64)] * 3, outputs=4, dtype=F32, denorm_f32=0)
    np.testing.assert_array_equal(kept[0, :4], x * 2)
    np.testing.assert_array_equal(flushed[0, :4], F32([0, 2**-125, 2, 0]))
    np.testing.assert_array_equal(flushed[2, :4], F32([0, 2**-126, 1, 0]))
    np.testing.assert_array_equal(flushed[1, :4], x)


def test_accvgpr_moves(run, rng):
    a = random_u32(rng)
    result = run(
        "v_accvgpr_write_b32 a7, v1\nv_accvgpr_mov_b32 a9, a7\nv_accvgpr_read_b32 v100, a9", a
    )
    np.testing.assert_array_equal(result, a)
