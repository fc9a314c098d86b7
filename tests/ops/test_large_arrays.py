# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays past 2**31 elements: the kernels' gfx942 machine code, on the last tiles of such arrays.

A million keys of 12 heads, of which nothing is touched but what the few programs that run read and
write: the arrays take address space, not memory.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxfp8
from jaxfp8.ops.attention import pallas_triton_kernel, schedule, tiling
from jaxfp8.ops.attention.heuristics import default_config
from jaxfp8.ops.quantize import pallas_triton as packing
from jaxfp8.rocm import compile_for_gfx942
from jaxfp8.rocm.disassembly import disassemble
from tests import oracle
from tests.gfx942sim import Kernel
from tests.rocm.tools import needs_rocm_compiler

pytestmark = needs_rocm_compiler

FNUZ = ml_dtypes.float8_e4m3fnuz
HEADS, HEAD = 12, 11
FMT = {"fp8": jaxfp8.E4M3FNUZ, "bf16": None}
DTYPE = {"fp8": FNUZ, "bf16": ml_dtypes.bfloat16}
# The second sequence is the one looked at, in the last head.
ROWS, KEYS = 20, 100
CU_Q = np.asarray([0, 0, ROWS], np.int32)
CU_K = np.asarray([0, 1_047_000, 1_047_000 + KEYS], np.int32)


def launch(
    function: Any,
    arguments: dict[str, np.ndarray],
    others: dict[str, np.ndarray],
    outputs: list[np.ndarray],
    programs: Any,
) -> None:
    """Compiles function(*arguments) and runs some programs of its one Pallas kernel.

    No array is so large that it should cost the kernel registers that it does not have.

    Args:
      function: of the arguments, in order.
      arguments: by the name that the kernel gives them.
      others: what the function computes for the kernel, by name.
      outputs: what the kernel writes.
      programs: which programs to run.
    """
    described = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments.values()]
    (compiled,) = [kernel for kernel in compile_for_gfx942(function, *described) if kernel.pallas]
    assert compiled.vgpr + compiled.agpr <= 256
    assert compiled.spills == 0
    given = arguments | others
    buffers = [given[arg.name] for arg in compiled.args[: -len(outputs)]]
    Kernel.from_hsaco(compiled.code_object, compiled.name).launch(
        compiled.grid,
        compiled.block_threads,
        [*buffers, *outputs],
        dynamic_lds_bytes=compiled.dynamic_lds_bytes,
        workgroups=programs,
    )


def untouched(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Zeros that take no memory until they are touched; np.zeros would write those of FP8."""
    return np.zeros(shape, f"uint{8 * np.dtype(dtype).itemsize}").view(dtype)


def tiles_of_keys(block: int) -> tuple[int, int]:
    """The second sequence's first tile, and the number of all."""
    return -(-int(CU_K[1]) // block), tiling.max_tiles(int(CU_K[-1]), 2, block)


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_attention(precision):
    rng = np.random.default_rng(0)
    config, dtype = default_config("gfx942", precision), DTYPE[precision]
    block = config.block_k
    first_tile, tiles = tiles_of_keys(block)
    q = np.zeros((HEADS, config.block_q, 192), dtype)
    q[:, :ROWS] = rng.standard_normal((HEADS, ROWS, 192)).astype(dtype)
    key, value = (rng.standard_normal((KEYS, size)).astype(dtype) for size in (192, 128))
    k = untouched((HEADS, tiles * block, 192), dtype)
    v = untouched((HEADS, tiles, 128, block), dtype)
    assert k.size > 2**31
    k[HEAD, first_tile * block :][:KEYS] = key
    padded = np.zeros((-(-KEYS // block) * block, 128), dtype)
    padded[:KEYS] = value
    padded = padded.reshape(-1, block, 128).swapaxes(1, 2)
    v[HEAD, first_tile : first_tile + len(padded)] = padded

    work = pallas_triton_kernel.work_table(
        jnp.asarray(CU_Q), jnp.asarray(CU_K), ROWS, causal=True, config=config
    )
    order = schedule.program_order(HEADS, 1, work.shape[1] - 1, 1, True)
    scales = np.ones((2, HEADS), np.float32)
    scales[0] = 192**-0.5 * np.log2(np.e)
    nonfinite = no_key(precision)

    def function(*operands):
        return pallas_triton_kernel.attend(
            *operands, num_tokens=ROWS, causal=True, fmt=FMT[precision], config=config
        )

    out = np.full((ROWS, HEADS, 128), np.nan, ml_dtypes.bfloat16)
    lse = np.full((HEADS, ROWS), np.nan, np.float32)
    program = int(np.flatnonzero(order == HEAD * work.shape[1])[0])
    arguments = {
        "q": q, "k": k, "v": v, "nonfinite": nonfinite, "work": np.asarray(work), "scales": scales,
    }  # fmt: skip
    launch(function, arguments, {"order": order}, [out, lse], [(program, 0, 0)])

    expected = oracle.attention(
        q[HEAD, :ROWS, None], key[:, None], value[:, None], [0, ROWS], [0, KEYS], causal=True
    )
    np.testing.assert_allclose(lse[HEAD], expected.lse[0], atol=1e-5)
    difference = out[:, HEAD].astype(np.float64) - expected.out[:, 0]
    bound = {"fp8": 0.03, "bf16": 0.005}[precision]
    assert np.linalg.norm(difference) < bound * np.linalg.norm(expected.out)


def no_key(precision: str) -> np.ndarray:
    """The table of values that are not finite, of which there are none."""
    return np.full((1 if FMT[precision] else 2, HEADS, 2, 128), packing.NO_KEY, np.float32)


def inputs(rng: np.random.Generator, size: int) -> np.ndarray:
    """bfloat16 [CU_K[-1], HEADS, size] with values in the second sequence, HEAD."""
    x = untouched((int(CU_K[-1]), HEADS, size), ml_dtypes.bfloat16)
    x[CU_K[1] :, HEAD] = rng.standard_normal((KEYS, size)).astype(x.dtype)
    return x


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_packing(precision):
    rng = np.random.default_rng(1)
    fmt, dtype = FMT[precision], DTYPE[precision]
    block = default_config("gfx942", precision).block_k
    first_tile, tiles = tiles_of_keys(block)
    start = int(CU_K[1])
    k, v = inputs(rng, 192), inputs(rng, 128)
    assert k.size > 2**31
    descale = np.full(HEADS, 0.02, np.float32)
    table = tiling.tile_table(jnp.asarray(CU_K), block, tiles)
    nonfinite = no_key(precision)

    def function(k, v, cu, k_descale, v_descale):
        return packing.pack_keys_and_values(k, v, cu, k_descale, v_descale, fmt, block=block)

    arguments = {
        "k[0]": k, "v": v, "cu_seqlens": CU_K, "k_descale": descale, "v_descale": descale,
    }  # fmt: skip
    others = {
        name: np.asarray(getattr(table, name)) for name in ("sequence", "row", "token", "count")
    } | {"no_key": nonfinite}
    packed_k = untouched((HEADS, tiles * block, 192), dtype)
    packed_v = untouched((HEADS, tiles, 128, block), dtype)
    used = range(first_tile, first_tile + -(-KEYS // block))
    programs = [(HEAD, tile, 0) for tile in used]
    launch(function, arguments, others, [packed_k, packed_v, nonfinite], programs)
    found = packed_v[HEAD, used].swapaxes(1, 2).reshape(-1, 128)
    for actual, x in ((packed_k[HEAD, first_tile * block :], k), (found, v)):
        expected = x[start:, HEAD]
        if fmt:
            expected = oracle.quantize(expected[:, None], descale[:1], fmt.name)[:, 0]
        np.testing.assert_array_equal(actual[:KEYS].astype(np.float32), expected.astype(np.float32))


def test_maxima():
    """Of the last block of rows, which a program of its own computes."""
    x = inputs(np.random.default_rng(2), 192)
    last = (len(x) - 1) // 128
    out = np.zeros((HEADS, last + 1), np.float32)
    arguments = {"x[0]": x, "num_tokens": np.int32(len(x))}
    others = {"num_tokens": np.full(1, len(x), np.int32)}
    launch(packing.amax, arguments, others, [out], [(HEAD, last, 0)])
    expected = np.abs(x[last * 128 :, HEAD].astype(np.float32)).max()
    assert out[HEAD, last] == expected


@pytest.mark.parametrize("tokens_more", [0, 1])
def test_buffer_loads_as_long_as_an_array_is_under_2_gb(tokens_more):
    """Exactly so long: past that 32 bits of a byte offset would not do."""
    tokens = (2**31 - 1) // (HEADS * 192 * 2) + tokens_more
    x = jax.ShapeDtypeStruct((tokens, HEADS, 192), ml_dtypes.bfloat16)
    cu, descale = (jax.ShapeDtypeStruct(*a) for a in (((3,), np.int32), ((HEADS,), np.float32)))

    def query(x, cu, descale):
        return packing.pack_rows(x, cu, descale, jaxfp8.E4M3FNUZ, block=128)

    def context(x, cu, descale):
        return packing.pack_keys_and_values(x, x, cu, descale, descale, jaxfp8.E4M3FNUZ, block=64)

    def maxima(x, cu, descale):
        return packing.amax(x, cu[-1])

    for function in (query, context, maxima):
        kernels = compile_for_gfx942(function, x, cu, descale)
        (kernel,) = [kernel for kernel in kernels if kernel.pallas]
        opcodes = {instruction.opcode for instruction in disassemble(kernel.code_object)}
        loads = {x for x in opcodes if re.match("(global|buffer|flat|scratch)_load", x)}
        assert loads == {f"{'global' if tokens_more else 'buffer'}_load_dwordx4"}
