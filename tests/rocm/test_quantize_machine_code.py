# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The quantizers as compiled for gfx942, run in the simulator: bit for bit what they should be.

Compared with the same kernels in interpret mode, which the tests of the quantizers hold against
NumPy, and once with everything simulated against the float64 attention.
"""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

import jaxfp8
from jaxfp8 import packing
from jaxfp8.rocm import compile_for_gfx942
from tests import oracle
from tests.inputs import cu_seqlens, qkv, with_tail
from tests.rocm.simulate import Simulation, simulate
from tests.rocm.tools import needs_rocm_compiler
from tests.tolerances import assert_attention

pytestmark = needs_rocm_compiler

FNUZ = "float8_e4m3fnuz"
NUM_HEADS = 2
LENGTHS = [1, 0, 65, 127]
CAPACITY = 210
DESCALES = np.float32([0.003, 0.02])
"""The first makes most values saturate, the second few."""


def awkward(rng: np.random.Generator, head_dim: int) -> np.ndarray:
    """bfloat16 [CAPACITY, H, D]: normal, tiny, huge, infinite and NaN; NaN past the end."""
    _, x, _ = qkv(rng, 0, sum(LENGTHS), NUM_HEADS, head_dim)
    x[::7] *= np.asarray(2.0**-12, x.dtype)
    x[3::11] *= np.asarray(2.0**20, x.dtype)
    x[5, 0, 1], x[6, 1, 2], x[70, 0, 3], x[71, 1, 0] = np.inf, -np.inf, np.nan, -0.0
    return with_tail(x, CAPACITY)


def assert_same_bits(actual: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert one.dtype == other.dtype
        # NaN has one bit pattern in FP8 and several in bfloat16, all of which will do.
        np.testing.assert_array_equal(one.astype(np.float64), other.astype(np.float64))
        np.testing.assert_array_equal(np.signbit(one), np.signbit(other))


@pytest.mark.parametrize("reverse_waves", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("precision, dynamic", [("fp8", False), ("fp8", True), ("bf16", False)])
def test_query(precision, dynamic, reverse_waves):
    def function(q: Any, cu: Any, descale: Any) -> Any:
        given = None if dynamic or precision == "bf16" else descale
        packed = packing.pack_query(q, cu, given, precision, None, None, v_head_dim=128)
        return packed.data, packed.descale

    args = (awkward(np.random.default_rng(0), 192), cu_seqlens(LENGTHS), DESCALES)
    simulation = Simulation()
    actual = simulate(function, *args, reverse_waves=reverse_waves, simulation=simulation)
    names = [kernel.name for kernel in simulation.kernels]
    assert ("jaxfp8_amax" in names) == dynamic
    assert_same_bits(actual, simulate(function, *args, only=()))


@pytest.mark.parametrize("reverse_waves", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize("qk_head_dim", [192, 128])
def test_context(precision, qk_head_dim, reverse_waves):
    def function(k: Any, v: Any, cu: Any, descale: Any) -> Any:
        given = None if precision == "bf16" else descale
        return packing.pack_context(k, v, cu, given, given, precision, None, None).data

    rng = np.random.default_rng(1)
    args = (awkward(rng, qk_head_dim), awkward(rng, 128), cu_seqlens(LENGTHS), DESCALES)
    actual = simulate(function, *args, reverse_waves=reverse_waves)
    assert_same_bits(actual, simulate(function, *args, only=()))


def test_context_with_dynamic_scales_from_a_slice():
    """V read in place out of kv_nope [T, H, 256]."""

    def function(k: Any, kv: Any, cu: Any) -> Any:
        v = jaxfp8.HeadSlice(kv, 128, 128)
        packed = packing.pack_context(k, v, cu, None, None, "fp8", None, None)
        return packed.data, packed.k_descale, packed.v_descale

    rng = np.random.default_rng(2)
    args = (awkward(rng, 192), awkward(rng, 256), cu_seqlens(LENGTHS))
    assert_same_bits(simulate(function, *args), simulate(function, *args, only=()))


def test_fp8_context_is_copied():
    """NaN in V too, which goes into the table."""

    def function(k: Any, v: Any, cu: Any, descale: Any) -> Any:
        return packing.pack_context(k, v, cu, descale, descale, "fp8", None, None).data

    rng = np.random.default_rng(5)
    k, v = (
        rng.integers(0, 256, (CAPACITY, NUM_HEADS, size), np.uint8).view(ml_dtypes.float8_e4m3fnuz)
        for size in (192, 128)
    )
    args = (k, v, cu_seqlens(LENGTHS), DESCALES)
    assert_same_bits(simulate(function, *args), simulate(function, *args, only=()))


@pytest.mark.parametrize("static", [False, True])
def test_passes_over_the_data(static):
    """One launch for K and V, two before it for their maxima if they are asked for; K is assembled
    nowhere, and nothing of XLA's own reads or writes anything of the size of the data."""

    def function(kv: Any, rope: Any, cu: Any, descale: Any) -> Any:
        k = jaxfp8.AssembledKey(jaxfp8.HeadSlice(kv, 0, 128), rope)
        v = jaxfp8.HeadSlice(kv, 128, 128)
        given = descale if static else None
        return jaxfp8.quantize_context(k, v, cu, k_descale=given, v_descale=given)

    args = (
        np.ones((CAPACITY, NUM_HEADS, 256), ml_dtypes.bfloat16),
        np.ones((CAPACITY, 64), ml_dtypes.bfloat16),
        cu_seqlens(LENGTHS),
        DESCALES,
    )
    kernels = compile_for_gfx942(function, *args)
    maxima = [] if static else ["jaxfp8_amax", "jaxfp8_amax__1"]
    assert [k.name for k in kernels if k.pallas] == [*maxima, "jaxfp8_pack_context"]
    for kernel in kernels:
        shapes = [arg.shape for arg in kernel.args]
        assert (CAPACITY, NUM_HEADS, 192) not in shapes
        assert kernel.pallas or not any(CAPACITY in shape for shape in shapes)


@pytest.mark.parametrize("dynamic", [False, True])
def test_context_assembled_from_its_parts(dynamic):
    """K out of kv_nope [T, H, 256], where V is too, or of k_nope [T, H, 128], and k_rope [T, 64],
    shared by the heads."""

    def function(kv: Any, rope: Any, cu: Any, descale: Any) -> Any:
        nope = jaxfp8.HeadSlice(kv, 0, 128) if dynamic else kv[..., :128]
        k, v = jaxfp8.AssembledKey(nope, rope), jaxfp8.HeadSlice(kv, 128, 128)
        given = None if dynamic else descale
        packed = jaxfp8.quantize_context(k, v, cu, k_descale=given, v_descale=given)
        return packed.data, packed.k_descale, packed.v_descale

    rng = np.random.default_rng(4)
    rope = awkward(rng, 64)[:, 0]
    args = (awkward(rng, 256), rope, cu_seqlens(LENGTHS), DESCALES)
    actual = simulate(function, *args)
    assert_same_bits(actual, simulate(function, *args, only=()))

    def materialized(kv: Any, rope: Any, cu: Any, descale: Any) -> Any:
        k = np.concatenate([kv[..., :128], np.broadcast_to(rope[:, None], (*kv.shape[:2], 64))], 2)
        given = None if dynamic else descale
        packed = jaxfp8.quantize_context(
            k, kv[..., 128:], cu, k_descale=given, v_descale=given, backend="interpret"
        )
        return packed.k_descale, packed.v_descale

    assert_same_bits(actual[1:], materialized(*args))


def test_every_kernel_of_a_call_simulated():
    lengths_q, lengths_k = [3, 0, 20], [70, 5, 33]
    q, k, v = qkv(np.random.default_rng(3), sum(lengths_q), sum(lengths_k), 1)
    args = (q, k, v, cu_seqlens(lengths_q), cu_seqlens(lengths_k))

    def function(*arrays: Any) -> Any:
        return jaxfp8.prefill_attention(*arrays, causal=True)

    stored = (oracle.through_fp8(x, FNUZ) for x in (q, k, v))
    expected = oracle.attention(*stored, *args[3:], causal=True)
    assert_attention(simulate(function, *args), expected, "fp8")
