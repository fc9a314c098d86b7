# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The quantizing kernel's gfx942 machine code against true division, where rounding is hardest."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import jaxfp8
from jaxfp8.ops.quantize import pallas_triton as packing
from tests import oracle
from tests.inputs import cu_seqlens
from tests.rocm.simulate import simulate
from tests.rocm.tools import needs_rocm_compiler

pytestmark = needs_rocm_compiler

TOKENS, HEADS = 64, 4
SPECIAL = [np.inf, -np.inf, np.nan, 0.0, -0.0, 3e38, -1e-38]


def assert_bits(x, descale):
    x = x.astype(ml_dtypes.bfloat16)
    x[0, :, : len(SPECIAL)] = SPECIAL
    packed = simulate(
        lambda *operands: packing.pack_rows(*operands, jaxfp8.E4M3FNUZ, block=128),
        x, cu_seqlens([TOKENS]), descale, detect_races=False,
    )  # fmt: skip
    found = np.asarray(packed)[:, :TOKENS].swapaxes(0, 1).view(np.uint8)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = oracle.quantize(x, descale, "float8_e4m3fnuz").view(np.uint8)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("exponents", [(-14, 6), (-126, -40), (20, 100)], ids=str)
def test_descales_of_all_sizes(exponents):
    rng = np.random.default_rng(1)
    descale = np.exp2(rng.uniform(*exponents, HEADS)).astype(np.float32)
    scaled = rng.standard_normal((TOKENS, HEADS, 192)) * np.exp2(
        rng.integers(-12, 9, (TOKENS, 1, 1))
    )
    assert_bits(scaled * descale[:, None].astype(np.float64), descale)


def test_quotients_that_are_ties_or_next_to_one():
    """The descale is a bfloat16 value over a number midway between two FP8 values, rounded."""
    rng = np.random.default_rng(2)
    value = rng.integers(128, 256, HEADS)
    tie = (rng.integers(8, 16, HEADS) + 0.5) * np.exp2(rng.integers(-9, 4, HEADS))
    descale = (value / tie).astype(np.float32)
    x = value[:, None] * rng.choice([-1, 1], (TOKENS, HEADS, 192))
    x = x * np.exp2(rng.integers(-3, 4, x.shape))
    x[::2] = rng.integers(128, 256, x[::2].shape)
    assert_bits(x, descale)
