# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Lane arithmetic of the vector ALU as pure functions on numpy arrays, and the opcode table.

`VECTOR_OPS` maps an opcode to its typed signature. Type names are u/i/f + bit width; `mask`
is a 64-bit lane mask in SGPRs. Functions get broadcastable arrays (or numpy scalars for
SGPRs and constants) and return the result; they know nothing about registers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.gfx942sim.wave import LANE_IDS

DTYPES: dict[str, np.dtype[Any]] = {
    "u16": np.dtype(np.uint16),
    "i16": np.dtype(np.int16),
    "f16": np.dtype(np.float16),
    "u32": np.dtype(np.uint32),
    "i32": np.dtype(np.int32),
    "f32": np.dtype(np.float32),
    "u64": np.dtype(np.uint64),
    "i64": np.dtype(np.int64),
    "f64": np.dtype(np.float64),
}

_U8, _U16, _U32, _U64 = np.uint8, np.uint16, np.uint32, np.uint64
_I16, _I32, _I64 = np.int16, np.int32, np.int64
_F16, _F32, _F64 = np.float16, np.float32, np.float64
_SMALLEST_NORMAL_F32 = _F32(2.0**-126)


@dataclass(frozen=True)
class VectorOp:
    """Signature and semantics of one VALU opcode.

    `implicit` names one more source that the assembly does not list: "dst" (the old
    destination, passed last) or "vcc" (lane mask, passed last).
    `keeps_other_half` marks 16-bit results that leave the other half of the register alone.
    """

    result: str
    sources: tuple[str, ...]
    compute: Callable[..., np.ndarray]
    implicit: str = ""
    keeps_other_half: bool = False
    saturating: Callable[..., np.ndarray] | None = None


# ---------------------------------------------------------------- floating point


def flush_denormals(x: np.ndarray) -> np.ndarray:
    """Replace f32 denormals by zeros of the same sign."""
    return np.where(np.abs(x) < _SMALLEST_NORMAL_F32, np.copysign(_F32(0), x), x)


def _round_to_odd(total: np.ndarray, error: np.ndarray) -> np.ndarray:
    """f64 `total`, rounded to nearest with residue `error`, re-rounded to odd.

    A round-to-odd f64 rounds to f32 or f16 as if the exact value had been rounded once.
    """
    inexact = (error != 0) & np.isfinite(error)
    if not inexact.any():
        return total
    bits = total.view(_I64)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return (bits + step * (inexact & (bits & 1 == 0))).view(_F64)


def _fma_as(dtype: type) -> Callable[..., np.ndarray]:
    def fma(a, b, c):
        product = np.multiply(a, b, dtype=_F64)  # exact for f32 and f16 inputs
        total = product + c
        tail = total - product
        error = (product - (total - tail)) + (c - tail)
        return _round_to_odd(total, error).astype(dtype)

    return fma


fma_f32 = _fma_as(_F32)
fma_f16 = _fma_as(_F16)

_VELTKAMP = 134217729.0  # 2**27 + 1


def fma_f64(a, b, c):
    """Compensated a*b + c; it can differ from a true FMA in the last bit."""
    product = a * b
    a_high, b_high = a * _VELTKAMP, b * _VELTKAMP
    a_high, b_high = a_high - (a_high - a), b_high - (b_high - b)
    a_low, b_low = a - a_high, b - b_high
    product_error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    total = product + c
    tail = total - product
    error = (product - (total - tail)) + (c - tail) + product_error
    return np.where(np.isfinite(error), total + error, total)


_BITS_OF = {
    np.dtype(_F16): (_U16, 0x0200),
    np.dtype(_F32): (_U32, 0x00400000),
    np.dtype(_F64): (_U64, 1 << 51),
}


def _quiet_signaling(result, *sources):
    """IEEE mode: an instruction with a signaling NaN source returns a quiet NaN."""
    for x in sources:
        nan = np.isnan(x)
        if nan.any():
            unsigned, quiet_bit = _BITS_OF[x.dtype]
            bits = x.view(unsigned)
            signaling = nan & (bits & unsigned(quiet_bit) == 0)
            result = np.where(signaling, (bits | unsigned(quiet_bit)).view(x.dtype), result)
    return result


def fmax(a, b):
    """maxNum, with +0 above -0."""
    unsigned, _ = _BITS_OF[a.dtype]
    equal = (a.view(unsigned) & b.view(unsigned)).view(a.dtype)
    return _quiet_signaling(np.where(a == b, equal, np.fmax(a, b)), a, b)


def fmin(a, b):
    """minNum, with -0 below +0."""
    unsigned, _ = _BITS_OF[a.dtype]
    equal = (a.view(unsigned) | b.view(unsigned)).view(a.dtype)
    return _quiet_signaling(np.where(a == b, equal, np.fmin(a, b)), a, b)


def _fmed3(a, b, c):
    median = fmax(fmin(a, b), fmin(fmax(a, b), c))
    nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    return np.where(nan, fmin(fmin(a, b), c), median) if nan.any() else median


def _med3(a, b, c):
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _mul_legacy(a, b):
    return np.where((a == 0) | (b == 0), _F32(0), a * b)


def _fract(x):
    below_one = np.nextafter(x.dtype.type(1), x.dtype.type(0))
    return np.minimum(x - np.floor(x), below_one)


def _transcendental_f32(function):
    """f32 hardware approximations: here correctly rounded, without denormals in or out."""
    return lambda x: flush_denormals(function(flush_denormals(x).astype(_F64)).astype(_F32))


def _transcendental_f16(function):
    return lambda x: function(x.astype(_F64)).astype(_F16)


def _reciprocal(x):
    return 1.0 / x


def _reciprocal_sqrt(x):
    return 1.0 / np.sqrt(x)


def _sin_turns(x):
    return np.sin(2 * np.pi * x)


def _cos_turns(x):
    return np.cos(2 * np.pi * x)


def _ldexp(x, exponent):
    return np.ldexp(x.astype(_F64), np.clip(exponent, -2000, 2000).astype(_I32)).astype(x.dtype)


def _frexp_exponent(result_type):
    def compute(x):
        return np.where(np.isfinite(x), np.frexp(x)[1], 0).astype(result_type)

    return compute


def _frexp_mantissa(x):
    return np.frexp(x)[0]


def _float_to_int(result_type):
    """Truncate toward zero, saturate, NaN to 0."""
    info = np.iinfo(result_type)

    def compute(x):
        wide = np.trunc(x.astype(_F64))
        return (
            np.where(np.isnan(wide), 0, np.clip(wide, info.min, info.max))
            .astype(_I64)
            .astype(result_type)
        )

    return compute


def _floor_to_int(x):
    return _float_to_int(_I32)(np.floor(x.astype(_F64)))


def _nearest_to_int(x):
    return _float_to_int(_I32)(np.floor(x.astype(_F64) + 0.5))


def _as(dtype):
    return lambda x: x.astype(dtype)


def _f16_toward_zero(x):
    nearest = x.astype(_F16)
    too_far = np.abs(nearest.astype(_F32)) > np.abs(x)
    return np.where(too_far, np.nextafter(nearest, _F16(0)), nearest)


def pack16(low, high):
    """Two 16-bit values as one u32."""
    return low.view(_U16).astype(_U32) | high.view(_U16).astype(_U32) << _U32(16)


def _cvt_pkrtz_f16_f32(a, b):
    return pack16(_f16_toward_zero(a), _f16_toward_zero(b))


def _pk_saturate(result_type):
    info = np.iinfo(result_type)

    def saturate(x):
        return np.clip(x, info.min, info.max).astype(result_type)

    return lambda a, b: pack16(saturate(a), saturate(b))


@dataclass(frozen=True)
class _DivisionScaling:
    """Constants of the division helpers of one precision."""

    unsigned: type
    mantissa_bits: int
    exponent_mask: int
    gap: int
    shift: int
    tiny_numerator: int

    def exponent(self, x):
        """The biased exponent field."""
        return (x.view(self.unsigned) >> self.unsigned(self.mantissa_bits)).astype(
            _I64
        ) & self.exponent_mask


_DIVISION = {
    np.dtype(_F32): _DivisionScaling(_U32, 23, 0xFF, gap=96, shift=64, tiny_numerator=23),
    np.dtype(_F64): _DivisionScaling(_U64, 52, 0x7FF, gap=768, shift=128, tiny_numerator=53),
}


def div_scale(s0, denominator, numerator):
    """Scale one operand of a division away from overflow and denormals: (result, VCC).

    `s0` is the operand to scale. VCC asks v_div_fmas to undo the scaling of the quotient.
    When both reciprocal and quotient would be denormal the denominator is scaled down, which
    is the only choice that v_div_fmas can undo.
    """
    s0, denominator, numerator = np.broadcast_arrays(s0, denominator, numerator)
    scaling = _DIVISION[s0.dtype]
    smallest_normal = np.finfo(s0.dtype).tiny
    n, d = numerator.astype(_F64), denominator.astype(_F64)
    zero = (numerator == 0) | (denominator == 0)
    is_denominator = s0.view(scaling.unsigned) == denominator.view(scaling.unsigned)
    is_numerator = s0.view(scaling.unsigned) == numerator.view(scaling.unsigned)
    tiny_reciprocal = np.abs(1.0 / d) < smallest_normal
    tiny_quotient = np.abs(n / d) < smallest_normal
    up, down = scaling.shift, -scaling.shift
    gap = scaling.exponent(numerator) - scaling.exponent(denominator)
    cases = (  # (condition, exponent shift of s0, VCC); the first that holds counts
        (zero, 0, False),
        (gap >= scaling.gap, np.where(is_denominator, up, 0), True),
        (np.abs(denominator) < smallest_normal, up, False),
        (tiny_reciprocal & tiny_quotient, np.where(is_denominator, down, 0), True),
        (tiny_reciprocal, down, False),
        (tiny_quotient, np.where(is_numerator, up, 0), True),
        (scaling.exponent(numerator) <= scaling.tiny_numerator, up, False),
    )
    conditions = [condition for condition, _, _ in cases]
    shift = np.select(conditions, [shift for _, shift, _ in cases], 0)
    vcc = np.select(conditions, [vcc for _, _, vcc in cases], False)
    return np.where(zero, s0.dtype.type(np.nan), _ldexp(s0, shift)), vcc


def _div_fmas(fma):
    """FMA whose result is scaled back in the lanes that VCC marks."""

    def compute(a, b, c, vcc):
        result = fma(a, b, c)
        if not vcc.any():
            return result
        scaling = _DIVISION[c.dtype]
        shift = np.where(
            scaling.exponent(c) > scaling.exponent_mask >> 1, scaling.shift, -scaling.shift
        )
        return np.where(vcc, _ldexp(result, shift), result)

    return compute


def _div_fixup(quotient, denominator, numerator):
    """Final value of a division, with the special cases put right.

    A NaN quotient of ordinary operands comes from an overflow, so it becomes an infinity.
    """
    q, d, n = np.broadcast_arrays(quotient, denominator, numerator)
    one = q.dtype.type(1)
    sign = np.where(np.signbit(d) ^ np.signbit(n), -one, one)
    nan = np.isnan(n) | np.isnan(d) | ((n == 0) & (d == 0)) | (np.isinf(n) & np.isinf(d))
    infinite = (d == 0) | np.isinf(n)
    zero = (n == 0) | np.isinf(d)
    infinite |= np.isnan(q) & ~zero
    special = [q.dtype.type(value) for value in (np.nan, np.inf, 0)]
    return np.select([nan, infinite, zero], special, np.abs(q)) * sign


_CLASS_TESTS = (
    lambda x: np.isnan(x) & (_quiet_bit(x) == 0),
    lambda x: np.isnan(x) & (_quiet_bit(x) != 0),
    lambda x: np.isneginf(x),
    lambda x: _is_normal(x) & (x < 0),
    lambda x: _is_denormal(x) & (x < 0),
    lambda x: (x == 0) & np.signbit(x),
    lambda x: (x == 0) & ~np.signbit(x),
    lambda x: _is_denormal(x) & (x > 0),
    lambda x: _is_normal(x) & (x > 0),
    lambda x: np.isposinf(x),
)


def _quiet_bit(x):
    unsigned, quiet_bit = _BITS_OF[x.dtype]
    return x.view(unsigned) & unsigned(quiet_bit)


def _is_denormal(x):
    return (x != 0) & (np.abs(x) < np.finfo(x.dtype).tiny)


def _is_normal(x):
    return np.isfinite(x) & (np.abs(x) >= np.finfo(x.dtype).tiny)


def _cmp_class(x, classes):
    result = np.zeros(np.broadcast(x, classes).shape, np.bool_)
    for bit, test in enumerate(_CLASS_TESTS):
        selected = classes >> _U32(bit) & _U32(1) != 0
        if np.any(selected):
            result |= selected & test(x)
    return result


# ---------------------------------------------------------------- integers and bits


def _u24(x):
    return x & _U32(0xFFFFFF)


def _i24(x):
    return (x << _I32(8)) >> _I32(8)


def _mul_high(wide):
    def compute(a, b):
        product = a.astype(wide) * b.astype(wide)
        return (product >> wide(32)).astype(_U32).view(a.dtype)

    return compute


def _shift_amount(x, bits):
    return x & x.dtype.type(bits - 1)


def _shift_left(bits):
    return lambda amount, x: x << _shift_amount(amount, bits).astype(x.dtype)


def _shift_right(bits):
    return lambda amount, x: x >> _shift_amount(amount, bits).astype(x.dtype)


def _bfe_u32(x, offset, width):
    mask = (_U32(1) << (width & _U32(31))) - _U32(1)
    return x >> (offset & _U32(31)) & mask


def _bfe_i32(x, offset, width):
    width = (width & _U32(31)).astype(_I64)
    field = x.astype(_I64) >> (offset & _U32(31)).astype(_I64)
    unused = 64 - width
    return np.where(
        width == 0, 0, (field << np.minimum(unused, 63)) >> np.minimum(unused, 63)
    ).astype(_I32)


def _bfi_b32(select, a, b):
    return (select & a) | (~select & b)


def _bfm_b32(width, offset):
    return ((_U32(1) << (width & _U32(31))) - _U32(1)) << (offset & _U32(31))


def join64(low, high):
    """Two u32 halves as one u64."""
    return low.astype(_U64) | high.astype(_U64) << _U64(32)


def _alignbit(high, low, shift):
    return (join64(low, high) >> (shift & _U32(31)).astype(_U64)).astype(_U32)


def _alignbyte(high, low, shift):
    return (join64(low, high) >> ((shift & _U32(3)) * _U32(8)).astype(_U64)).astype(_U32)


def _perm_b32(high, low, selector):
    """Byte permute: selector 0-3 from `low`, 4-7 from `high`, 8-11 signs, 12 zero, 13+ ones."""
    table = np.empty((LANE_IDS.size, 16), _U8)
    dwords = table.view(_U32)
    dwords[:, 0] = low
    dwords[:, 1] = high
    dwords[:, 3] = 0xFFFFFF00
    table[:, 8:12] = (table[:, 1:8:2] >> 7) * _U8(0xFF)
    choice = np.minimum(np.ascontiguousarray(selector).view(_U8).reshape(-1, 4), 13)
    if choice.shape[0] == 1:
        return np.ascontiguousarray(table[:, choice[0]]).view(_U32)[:, 0]
    return np.take_along_axis(table, choice.astype(np.intp), axis=1).view(_U32)[:, 0]


def _reverse_bits(x):
    for shift, mask in (
        (1, 0x55555555),
        (2, 0x33333333),
        (4, 0x0F0F0F0F),
        (8, 0x00FF00FF),
        (16, 0x0000FFFF),
    ):
        x = (x >> _U32(shift) & _U32(mask)) | (x & _U32(mask)) << _U32(shift)
    return x


def _bit_length(x):
    return np.frexp(x.astype(_F64))[1]


def _ffbh_u32(x):
    return np.where(x == 0, -1, 32 - _bit_length(x)).astype(_I32)


def _ffbh_i32(x):
    magnitude = np.where(x < 0, ~x, x)
    return np.where(magnitude == 0, -1, 32 - _bit_length(magnitude)).astype(_I32)


def _ffbl_b32(x):
    return np.where(x == 0, -1, _bit_length(x & (~x + _U32(1))) - 1).astype(_I32)


def _mbcnt(first_lane):
    below = np.clip(LANE_IDS.astype(_I64) - first_lane, 0, 32)
    mask = ((np.int64(1) << below) - 1).astype(_U32)
    return lambda bits, addend: np.bitwise_count(bits & mask).astype(_U32) + addend


def _select(when_clear, when_set, mask):
    return np.where(mask, when_set, when_clear)


def _saturated(operation):
    """Integer `operation` with the result clamped to the type's range (the clamp modifier)."""

    def compute(a, b):
        info = np.iinfo(a.dtype)
        return np.clip(operation(a.astype(_I64), b.astype(_I64)), info.min, info.max).astype(
            a.dtype
        )

    return compute


def _ubyte(index):
    return lambda x: (x >> _U32(8 * index) & _U32(0xFF)).astype(_F32)


def _dot(dtype, lanes_per_dword):
    """Dot product of the packed parts of two dwords, plus an accumulator."""

    def compute(a, b, c):
        a, b = (
            np.ascontiguousarray(np.broadcast_to(x, LANE_IDS.shape)).view(dtype) for x in (a, b)
        )
        wide = _F64 if np.issubdtype(dtype, np.floating) else _I64
        products = a.astype(wide) * b.astype(wide)
        return (products.reshape(-1, lanes_per_dword).sum(axis=1) + c).astype(c.dtype)

    return compute


# ---------------------------------------------------------------- opcode table

VECTOR_OPS: dict[str, VectorOp] = {}


def _define(opcode: str, result: str, sources: str, compute, **options) -> None:
    VECTOR_OPS[opcode] = VectorOp(result, tuple(sources.split()), compute, **options)


def _reversed(function):
    return lambda a, b: function(b, a)


def _define_moves_and_conversions() -> None:
    _define("v_mov_b32", "u32", "u32", np.copy)
    _define("v_mov_b64", "u64", "u64", np.copy)
    _define("v_cndmask_b32", "u32", "u32 u32 mask", _select)
    for name, result, source in (
        ("f64_i32", "f64", "i32"),
        ("f32_i32", "f32", "i32"),
        ("f32_u32", "f32", "u32"),
        ("f64_u32", "f64", "u32"),
        ("f32_f16", "f32", "f16"),
        ("f16_f32", "f16", "f32"),
        ("f32_f64", "f32", "f64"),
        ("f64_f32", "f64", "f32"),
        ("f16_u16", "f16", "u16"),
        ("f16_i16", "f16", "i16"),
    ):
        _define(f"v_cvt_{name}", result, source, _as(DTYPES[result]))
    for name, result, source in (
        ("u32_f32", "u32", "f32"),
        ("i32_f32", "i32", "f32"),
        ("i32_f64", "i32", "f64"),
        ("u32_f64", "u32", "f64"),
        ("u16_f16", "u16", "f16"),
        ("i16_f16", "i16", "f16"),
    ):
        _define(f"v_cvt_{name}", result, source, _float_to_int(DTYPES[result]))
    _define("v_cvt_flr_i32_f32", "i32", "f32", _floor_to_int)
    _define("v_cvt_rpi_i32_f32", "i32", "f32", _nearest_to_int)
    for index in range(4):
        _define(f"v_cvt_f32_ubyte{index}", "f32", "u32", _ubyte(index))
    _define("v_cvt_pkrtz_f16_f32", "u32", "f32 f32", _cvt_pkrtz_f16_f32)
    _define("v_cvt_pk_u16_u32", "u32", "u32 u32", _pk_saturate(_U16))
    _define("v_cvt_pk_i16_i32", "u32", "i32 i32", _pk_saturate(_I16))
    _define("v_pack_b32_f16", "u32", "f16 f16", pack16)


def _define_floats() -> None:
    for kind in ("f16", "f32", "f64"):
        two, three = f"{kind} {kind}", f"{kind} {kind} {kind}"
        _define(f"v_add_{kind}", kind, two, np.add)
        _define(f"v_sub_{kind}", kind, two, np.subtract)
        _define(f"v_subrev_{kind}", kind, two, _reversed(np.subtract))
        _define(f"v_mul_{kind}", kind, two, np.multiply)
        _define(f"v_max_{kind}", kind, two, fmax)
        _define(f"v_min_{kind}", kind, two, fmin)
        _define(f"v_max3_{kind}", kind, three, lambda a, b, c: fmax(fmax(a, b), c))
        _define(f"v_min3_{kind}", kind, three, lambda a, b, c: fmin(fmin(a, b), c))
        _define(f"v_med3_{kind}", kind, three, _fmed3)
        _define(f"v_trunc_{kind}", kind, kind, np.trunc)
        _define(f"v_ceil_{kind}", kind, kind, np.ceil)
        _define(f"v_floor_{kind}", kind, kind, np.floor)
        _define(f"v_rndne_{kind}", kind, kind, np.rint)
        _define(f"v_fract_{kind}", kind, kind, _fract)
        _define(f"v_frexp_mant_{kind}", kind, kind, _frexp_mantissa)
        _define(f"v_ldexp_{kind}", kind, f"{kind} {'i16' if kind == 'f16' else 'i32'}", _ldexp)
        _define(f"v_div_fixup_{kind}", kind, three, _div_fixup, keeps_other_half=kind == "f16")
    for kind, fma in (("f16", fma_f16), ("f32", fma_f32), ("f64", fma_f64)):
        _define(f"v_fma_{kind}", kind, f"{kind} {kind} {kind}", fma, keeps_other_half=kind == "f16")
        _define(f"v_fmac_{kind}", kind, f"{kind} {kind}", fma, implicit="dst")
    _define("v_fmamk_f32", "f32", "f32 f32 f32", fma_f32)
    _define("v_fmaak_f32", "f32", "f32 f32 f32", fma_f32)
    _define("v_mul_legacy_f32", "f32", "f32 f32", _mul_legacy)
    _define("v_div_fmas_f32", "f32", "f32 f32 f32", _div_fmas(fma_f32), implicit="vcc")
    _define("v_div_fmas_f64", "f64", "f64 f64 f64", _div_fmas(fma_f64), implicit="vcc")
    _define("v_frexp_exp_i32_f32", "i32", "f32", _frexp_exponent(_I32))
    _define("v_frexp_exp_i32_f64", "i32", "f64", _frexp_exponent(_I32))
    _define("v_frexp_exp_i16_f16", "i16", "f16", _frexp_exponent(_I16))
    transcendentals = {
        "exp": np.exp2,
        "log": np.log2,
        "rcp": _reciprocal,
        "rsq": _reciprocal_sqrt,
        "sqrt": np.sqrt,
        "sin": _sin_turns,
        "cos": _cos_turns,
    }
    for name, function in transcendentals.items():
        _define(f"v_{name}_f32", "f32", "f32", _transcendental_f32(function))
        _define(f"v_{name}_f16", "f16", "f16", _transcendental_f16(function))
    _define("v_rcp_iflag_f32", "f32", "f32", _transcendental_f32(_reciprocal))
    for name in ("rcp", "rsq", "sqrt"):
        _define(f"v_{name}_f64", "f64", "f64", transcendentals[name])
    _define("v_dot2_f32_f16", "f32", "u32 u32 f32", _dot(_F16, 2))


def _define_integers() -> None:
    add, subtract = np.add, np.subtract
    for kind, suffix in (("u32", "u32"), ("i32", "i32"), ("u16", "u16"), ("i16", "i16")):
        pair = f"{kind} {kind}"
        _define(f"v_add_{suffix}", kind, pair, add, saturating=_saturated(add))
        _define(f"v_sub_{suffix}", kind, pair, subtract, saturating=_saturated(subtract))
        _define(
            f"v_subrev_{suffix}",
            kind,
            pair,
            _reversed(subtract),
            saturating=_saturated(_reversed(subtract)),
        )
        _define(f"v_max_{suffix}", kind, pair, np.maximum)
        _define(f"v_min_{suffix}", kind, pair, np.minimum)
        three = f"{kind} {kind} {kind}"
        _define(f"v_max3_{suffix}", kind, three, lambda a, b, c: np.maximum(np.maximum(a, b), c))
        _define(f"v_min3_{suffix}", kind, three, lambda a, b, c: np.minimum(np.minimum(a, b), c))
        _define(f"v_med3_{suffix}", kind, three, _med3)
    _define("v_mul_lo_u32", "u32", "u32 u32", np.multiply)
    _define("v_mul_lo_u16", "u16", "u16 u16", np.multiply)
    _define("v_mul_hi_u32", "u32", "u32 u32", _mul_high(_U64))
    _define("v_mul_hi_i32", "i32", "i32 i32", _mul_high(_I64))
    _define("v_mul_u32_u24", "u32", "u32 u32", lambda a, b: _u24(a) * _u24(b))
    _define("v_mul_i32_i24", "i32", "i32 i32", lambda a, b: _i24(a) * _i24(b))
    _define("v_mul_hi_u32_u24", "u32", "u32 u32", lambda a, b: _mul_high(_U64)(_u24(a), _u24(b)))
    _define("v_mul_hi_i32_i24", "i32", "i32 i32", lambda a, b: _mul_high(_I64)(_i24(a), _i24(b)))
    _define("v_mad_u32_u24", "u32", "u32 u32 u32", lambda a, b, c: _u24(a) * _u24(b) + c)
    _define("v_mad_i32_i24", "i32", "i32 i32 i32", lambda a, b, c: _i24(a) * _i24(b) + c)
    _define("v_mad_u16", "u16", "u16 u16 u16", lambda a, b, c: a * b + c, keeps_other_half=True)
    _define("v_mad_i16", "i16", "i16 i16 i16", lambda a, b, c: a * b + c, keeps_other_half=True)
    _define(
        "v_mad_u32_u16", "u32", "u16 u16 u32", lambda a, b, c: a.astype(_U32) * b.astype(_U32) + c
    )
    _define(
        "v_mad_i32_i16", "i32", "i16 i16 i32", lambda a, b, c: a.astype(_I32) * b.astype(_I32) + c
    )
    _define("v_add3_u32", "u32", "u32 u32 u32", lambda a, b, c: a + b + c)
    _define("v_lshl_add_u32", "u32", "u32 u32 u32", lambda a, s, c: (a << (s & _U32(31))) + c)
    _define("v_add_lshl_u32", "u32", "u32 u32 u32", lambda a, b, s: (a + b) << (s & _U32(31)))
    _define("v_xad_u32", "u32", "u32 u32 u32", lambda a, b, c: (a ^ b) + c)
    _define(
        "v_lshl_add_u64",
        "u64",
        "u64 u32 u64",
        lambda a, s, c: (a << (s & _U32(7)).astype(_U64)) + c,
    )
    _define("v_dot4_i32_i8", "i32", "u32 u32 i32", _dot(np.int8, 4))
    _define("v_dot4_u32_u8", "u32", "u32 u32 u32", _dot(_U8, 4))


def _define_bits() -> None:
    _define("v_and_b32", "u32", "u32 u32", np.bitwise_and)
    _define("v_or_b32", "u32", "u32 u32", np.bitwise_or)
    _define("v_xor_b32", "u32", "u32 u32", np.bitwise_xor)
    _define("v_xnor_b32", "u32", "u32 u32", lambda a, b: ~(a ^ b))
    _define("v_not_b32", "u32", "u32", np.invert)
    _define("v_and_or_b32", "u32", "u32 u32 u32", lambda a, b, c: (a & b) | c)
    _define("v_or3_b32", "u32", "u32 u32 u32", lambda a, b, c: a | b | c)
    _define("v_lshl_or_b32", "u32", "u32 u32 u32", lambda a, s, c: (a << (s & _U32(31))) | c)
    for bits in (16, 32, 64):
        unsigned, signed, amount = f"u{bits}", f"i{bits}", "u16" if bits == 16 else "u32"
        signed_suffix = "i16" if bits == 16 else f"i{bits}"
        _define(f"v_lshlrev_b{bits}", unsigned, f"{amount} {unsigned}", _shift_left(bits))
        _define(f"v_lshrrev_b{bits}", unsigned, f"{amount} {unsigned}", _shift_right(bits))
        _define(f"v_ashrrev_{signed_suffix}", signed, f"{amount} {signed}", _shift_right(bits))
    _define("v_bfe_u32", "u32", "u32 u32 u32", _bfe_u32)
    _define("v_bfe_i32", "i32", "i32 u32 u32", _bfe_i32)
    _define("v_bfi_b32", "u32", "u32 u32 u32", _bfi_b32)
    _define("v_bfm_b32", "u32", "u32 u32", _bfm_b32)
    _define("v_bfrev_b32", "u32", "u32", _reverse_bits)
    _define("v_alignbit_b32", "u32", "u32 u32 u32", _alignbit)
    _define("v_alignbyte_b32", "u32", "u32 u32 u32", _alignbyte)
    _define("v_perm_b32", "u32", "u32 u32 u32", _perm_b32)
    _define("v_ffbh_u32", "i32", "u32", _ffbh_u32)
    _define("v_ffbh_i32", "i32", "i32", _ffbh_i32)
    _define("v_ffbl_b32", "i32", "u32", _ffbl_b32)
    _define("v_bcnt_u32_b32", "u32", "u32 u32", lambda a, b: np.bitwise_count(a).astype(_U32) + b)
    _define("v_mbcnt_lo_u32_b32", "u32", "u32 u32", _mbcnt(0))
    _define("v_mbcnt_hi_u32_b32", "u32", "u32 u32", _mbcnt(32))


_INTEGER_TESTS = {
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "ne": np.not_equal,
    "ge": np.greater_equal,
    "f": lambda a, b: np.bool_(False),
    "t": lambda a, b: np.bool_(True),
}


def _unordered(a, b):
    return np.isnan(a) | np.isnan(b)


_FLOAT_TESTS = {
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lg": lambda a, b: (a < b) | (a > b),
    "o": lambda a, b: ~_unordered(a, b),
    "u": _unordered,
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": np.not_equal,
    "nlt": lambda a, b: ~(a < b),
    "f": lambda a, b: np.bool_(False),
    "tru": lambda a, b: np.bool_(True),
}


def _define_comparisons() -> None:
    for prefix in ("v_cmp", "v_cmpx"):
        for kind in DTYPES:
            tests = _FLOAT_TESTS if kind.startswith("f") else _INTEGER_TESTS
            for name, test in tests.items():
                _define(f"{prefix}_{name}_{kind}", "mask", f"{kind} {kind}", test)
        for kind in ("f16", "f32", "f64"):
            _define(f"{prefix}_class_{kind}", "mask", f"{kind} u32", _cmp_class)


_define_moves_and_conversions()
_define_floats()
_define_integers()
_define_bits()
_define_comparisons()


PACKED_F32_OPS: dict[str, Callable[..., np.ndarray]] = {
    "v_pk_fma_f32": fma_f32,
    "v_pk_mul_f32": np.multiply,
    "v_pk_add_f32": np.add,
}

PACKED_16_OPS: dict[str, VectorOp] = {
    opcode: VectorOp(kind, (kind,) * arity, compute)
    for opcode, kind, arity, compute in (
        ("v_pk_fma_f16", "f16", 3, fma_f16),
        ("v_pk_mul_f16", "f16", 2, np.multiply),
        ("v_pk_add_f16", "f16", 2, np.add),
        ("v_pk_max_f16", "f16", 2, fmax),
        ("v_pk_min_f16", "f16", 2, fmin),
        ("v_pk_add_u16", "u16", 2, np.add),
        ("v_pk_add_i16", "i16", 2, np.add),
        ("v_pk_sub_u16", "u16", 2, np.subtract),
        ("v_pk_sub_i16", "i16", 2, np.subtract),
        ("v_pk_mul_lo_u16", "u16", 2, np.multiply),
        ("v_pk_mad_u16", "u16", 3, lambda a, b, c: a * b + c),
        ("v_pk_mad_i16", "i16", 3, lambda a, b, c: a * b + c),
        ("v_pk_max_u16", "u16", 2, np.maximum),
        ("v_pk_max_i16", "i16", 2, np.maximum),
        ("v_pk_min_u16", "u16", 2, np.minimum),
        ("v_pk_min_i16", "i16", 2, np.minimum),
        ("v_pk_lshlrev_b16", "u16", 2, _shift_left(16)),
        ("v_pk_lshrrev_b16", "u16", 2, _shift_right(16)),
        ("v_pk_ashrrev_i16", "i16", 2, _shift_right(16)),
    )
}
