# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The packing kernels, in interpret mode: their bits are those of the plain quantizer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxfp8
from jaxfp8.head_slice import HeadSlice
from jaxfp8.ops.quantize import pallas_triton as packing
from jaxfp8.ops.quantize.assembled_key import AssembledKey
from tests import oracle
from tests.inputs import cu_seqlens, with_tail
from tests.ops.test_tiling import tiles_by_loop

FORMATS = [jaxfp8.E4M3FNUZ, jaxfp8.E4M3FN]
LENGTHS = [5, 0, 64, 17, 1]


def draw(rng, tokens, heads, size):
    """bfloat16 over many magnitudes."""
    x = rng.standard_normal((tokens, heads, size)) * np.exp2(rng.integers(-9, 9, (tokens, 1, 1)))
    return x.astype(ml_dtypes.bfloat16)


def unpack(packed, lengths, block):
    """Token-major rows of packed [H, tiles * block, D], and the rows that hold no token."""
    rows = np.zeros(packed.shape[1], bool)
    tokens = []
    for tile, (_, _, _, count) in enumerate(tiles_by_loop(lengths, block)):
        rows[tile * block : tile * block + count] = True
        tokens.append(packed[:, tile * block : tile * block + count])
    return np.concatenate(tokens, axis=1).swapaxes(0, 1), packed[:, ~rows]


def bits(x):
    x = np.asarray(x)
    return x.view(np.uint8 if x.dtype.itemsize == 1 else np.uint16)


def pack_rows(x, cu, descale, fmt, block):
    return np.asarray(
        packing.pack_rows(
            jax.tree.map(jnp.asarray, x), jnp.asarray(cu), jnp.asarray(descale), fmt,
            block=block, interpret=True,
        )
    )  # fmt: skip


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("size", [192, 128])
def test_rows_have_the_bits_of_the_plain_quantizer(fmt, size):
    rng = np.random.default_rng(size)
    x = draw(rng, sum(LENGTHS), 3, size)
    # Ties of the format, values that saturate, infinities, NaN.
    x[:40, 0] = (rng.integers(-4096, 4096, (40, size)) / 16).astype(ml_dtypes.bfloat16)
    x[3, 1, :4] = [np.inf, -np.inf, np.nan, 3e38]
    x = with_tail(x, sum(LENGTHS) + 9)
    descale = np.asarray([1.0, 0.37, 1e-3], np.float32)
    packed = pack_rows(x, cu_seqlens(LENGTHS), descale, fmt, 16)
    tokens, padding = unpack(packed, LENGTHS, 16)
    expected = oracle.quantize(x[: sum(LENGTHS)], descale, fmt.name)
    np.testing.assert_array_equal(bits(tokens), bits(expected))
    assert not bits(padding).any()


def test_rows_in_bfloat16_and_in_fp8_are_copied():
    rng = np.random.default_rng(1)
    x = draw(rng, sum(LENGTHS), 2, 128)
    descale = np.asarray([7.0, 9.0], np.float32)
    tokens, _ = unpack(pack_rows(x, cu_seqlens(LENGTHS), descale, None, 16), LENGTHS, 16)
    np.testing.assert_array_equal(bits(tokens), bits(x))

    stored = rng.integers(0, 256, x.shape, np.uint8).view(ml_dtypes.float8_e4m3fnuz)
    packed = pack_rows(stored, cu_seqlens(LENGTHS), descale, jaxfp8.E4M3FNUZ, 16)
    tokens, _ = unpack(packed, LENGTHS, 16)
    np.testing.assert_array_equal(bits(tokens), bits(stored))


def test_head_slices_are_read_in_place():
    rng = np.random.default_rng(2)
    wide = draw(rng, sum(LENGTHS), 2, 256)
    descale = np.asarray([0.5, 2.0], np.float32)
    cu = cu_seqlens(LENGTHS)
    sliced = pack_rows(HeadSlice(wide, 128, 128), cu, descale, jaxfp8.E4M3FNUZ, 16)
    whole = pack_rows(wide[:, :, 128:], cu, descale, jaxfp8.E4M3FNUZ, 16)
    np.testing.assert_array_equal(bits(sliced), bits(whole))


def pack_context(k, v, lengths, k_descale, v_descale, fmt, block=16):
    packed = packing.pack_keys_and_values(
        *(jnp.asarray(x) for x in (k, v, cu_seqlens(lengths), k_descale, v_descale)), fmt,
        block=block, interpret=True,
    )  # fmt: skip
    return tuple(map(np.asarray, packed))


@pytest.mark.parametrize("fmt", [*FORMATS, None], ids=str)
def test_keys_and_values(fmt):
    rng = np.random.default_rng(3)
    total = sum(LENGTHS)
    k, v = (with_tail(draw(rng, total, 2, size), total + 5) for size in (192, 128))
    descales = np.asarray([[1.0, 0.1], [0.25, 3.0]], np.float32)
    packed_k, packed_v, nonfinite = pack_context(k, v, LENGTHS, *descales, fmt)
    heads, tiles, size, block = packed_v.shape
    assert packed_k.shape == (heads, tiles * block, 192)
    by_row = packed_v.swapaxes(2, 3).reshape(heads, tiles * block, size)
    for packed, x, descale in ((packed_k, k, descales[0]), (by_row, v, descales[1])):
        tokens, padding = unpack(packed, LENGTHS, block)
        expected = oracle.quantize(x[:total], descale, fmt.name) if fmt else x[:total]
        np.testing.assert_array_equal(bits(tokens), bits(expected))
        assert not bits(padding).any()
    assert (nonfinite == packing.NO_KEY).all()


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("fmt", [jaxfp8.E4M3FNUZ, None], ids=str)
def test_assembled_keys(fmt, in_place):
    """kv_nope [T, H, 256] holds K's own part beside V, or k_nope [T, H, 128] it alone; rope is
    shared by the heads."""
    rng = np.random.default_rng(6)
    kv_nope, rope = draw(rng, sum(LENGTHS), 2, 256), draw(rng, sum(LENGTHS), 1, 64)[:, 0]
    k = AssembledKey(HeadSlice(kv_nope, 0, 128) if in_place else kv_nope[:, :, :128], rope)
    v = HeadSlice(kv_nope, 128, 128)
    whole = np.asarray(k.materialize())
    assert k.shape == whole.shape == (sum(LENGTHS), 2, 192)
    np.testing.assert_array_equal(whole[:, 1, 128:], rope)
    descales = np.asarray([[1.0, 0.1], [0.25, 3.0]], np.float32)
    results = [
        packing.pack_keys_and_values(
            *jax.tree.map(jnp.asarray, (k, v, cu_seqlens(LENGTHS), *descales)), fmt,
            block=16, interpret=True,
        )
        for k, v in ((k, v), (whole, kv_nope[:, :, 128:]))
    ]  # fmt: skip
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
    np.testing.assert_array_equal(
        packing.amax(jax.tree.map(jnp.asarray, k), jnp.int32(50), interpret=True),
        oracle.amax(whole[:50]),
    )


def test_what_is_not_finite_is_told_in_a_table():
    rng = np.random.default_rng(4)
    lengths = [20, 0, 40]
    k, v = rng.standard_normal((2, 60, 2, 128)).astype(ml_dtypes.bfloat16)
    v[7, 0, 3] = np.nan
    v[5, 0, 3] = np.inf
    v[20 + 33, 1, 9] = -np.inf
    v[20 + 35, 1, 9] = np.nan
    ones = np.ones(2, np.float32)
    _, packed_v, nonfinite = pack_context(k, v, lengths, ones, ones, None)
    assert np.isfinite(packed_v.astype(np.float32)).all()
    expected = np.full((2, 2, 3, 128), np.inf)
    expected[:, 0, 0, 3] = 5, 7  # +inf at 5; NaN at 7 is the first that counts as -inf
    expected[:, 1, 2, 9] = 35, 33
    np.testing.assert_array_equal(nonfinite, expected)

    for stored in (v, v.astype(ml_dtypes.float8_e4m3fnuz)):
        _, packed_v, nonfinite = pack_context(
            k.astype(stored.dtype), stored, lengths, ones, ones, jaxfp8.E4M3FNUZ
        )
        assert np.isfinite(packed_v.astype(np.float32)).all()
        saturates = stored is v  # where bfloat16 is quantized; a cast makes NaN of infinity
        expected = np.full((1, 2, 3, 128), np.inf)
        expected[:, 0, 0, 3] = 7 if saturates else 5
        expected[:, 1, 2, 9] = 35 if saturates else 33
        np.testing.assert_array_equal(nonfinite, expected)


@pytest.mark.parametrize("num_tokens", [0, 1, 127, 128, 129, 300])
def test_amax(num_tokens):
    rng = np.random.default_rng(5)
    x = draw(rng, num_tokens, 3, 192)
    x[:1, 1, 0], x[:1, 1, 1] = np.nan, -np.inf
    x = with_tail(x, 300)
    found = packing.amax(jnp.asarray(x), jnp.int32(num_tokens), interpret=True)
    np.testing.assert_array_equal(found, oracle.amax(x[:num_tokens]))


def test_nothing_to_pack():
    empty = jnp.zeros((0, 2, 192), jnp.bfloat16)
    ones = jnp.ones(2)
    for cu in (jnp.zeros(1, jnp.int32), jnp.zeros(4, jnp.int32)):
        assert packing.pack_rows(empty, cu, ones, None, block=16).shape == (2, 0, 192)
        k, v, _ = packing.pack_keys_and_values(empty, empty, cu, ones, ones, None, block=16)
        assert k.shape == (2, 0, 192)
        assert v.shape == (2, 0, 192, 16)
    assert not packing.amax(empty, jnp.int32(0)).any()
