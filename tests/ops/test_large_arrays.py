# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays past 2**31 elements: the kernels' gfx942 machine code, on the last tiles of such arrays.

A million keys of 12 heads, of which nothing is touched but what the few programs that run read and
write: the arrays take address space, not memory.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jaxfp8
from jaxfp8.ops.attention import pallas_triton_kernel, schedule, tiling
from jaxfp8.ops.attention.heuristics import default_config
from jaxfp8.ops.quantize import pallas_triton as packing
from jaxfp8.rocm import compile_for_gfx942
from tests import oracle
from tests.gfx942sim import Kernel
from tests.rocm.tools import needs_rocm_compiler

pytestmark = needs_rocm_compiler

FNUZ = ml_dtypes.float8_e4m3fnuz
HEADS, HEAD = 12, 11
CONFIG = default_config("gfx942", "fp8")
BLOCK = CONFIG.block_k
# The second sequence is the one looked at, in the last head.
ROWS, KEYS = 20, 100
CU_Q = np.asarray([0, 0, ROWS], np.int32)
CU_K = np.asarray([0, 1_047_000, 1_047_000 + KEYS], np.int32)
FIRST_TILE = -(-1_047_000 // BLOCK)
TILES = tiling.max_tiles(int(CU_K[-1]), 2, BLOCK)


def launch(
    function: Any,
    arguments: dict[str, np.ndarray],
    others: dict[str, np.ndarray],
    outputs: list[np.ndarray],
    programs: Any,
) -> None:
    """Compiles function(*arguments) and runs some programs of its one Pallas kernel.

    Args:
      function: of the arguments, in order.
      arguments: by the name that the kernel gives them.
      others: what the function computes for the kernel, by name.
      outputs: what the kernel writes.
      programs: which programs to run.
    """
    described = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments.values()]
    (compiled,) = [kernel for kernel in compile_for_gfx942(function, *described) if kernel.pallas]
    given = arguments | others
    buffers = [given[arg.name] for arg in compiled.args[: -len(outputs)]]
    Kernel.from_hsaco(compiled.code_object, compiled.name).launch(
        compiled.grid,
        compiled.block_threads,
        [*buffers, *outputs],
        dynamic_lds_bytes=compiled.dynamic_lds_bytes,
        workgroups=programs,
    )


def test_attention():
    rng = np.random.default_rng(0)
    q = np.zeros((HEADS, CONFIG.block_q, 192), FNUZ)
    q[:, :ROWS] = rng.standard_normal((HEADS, ROWS, 192)).astype(FNUZ)
    key, value = (rng.standard_normal((KEYS, size)).astype(FNUZ) for size in (192, 128))
    # np.zeros of FP8 would be written; memory that is never touched is never there.
    k = np.zeros((HEADS, TILES * BLOCK, 192), np.uint8).view(FNUZ)
    v = np.zeros((HEADS, TILES, 128, BLOCK), np.uint8).view(FNUZ)
    assert k.size > 2**31
    k[HEAD, FIRST_TILE * BLOCK :][:KEYS] = key
    padded = np.zeros((2 * BLOCK, 128), FNUZ)
    padded[:KEYS] = value
    v[HEAD, FIRST_TILE : FIRST_TILE + 2] = padded.reshape(2, BLOCK, 128).swapaxes(1, 2)

    work = pallas_triton_kernel.work_table(
        jnp.asarray(CU_Q), jnp.asarray(CU_K), ROWS, causal=True, config=CONFIG
    )
    order = schedule.program_order(HEADS, 1, work.shape[1] - 1, 1, True)
    scales = np.ones((2, HEADS), np.float32)
    scales[0] = 192**-0.5 * np.log2(np.e)
    nonfinite = np.full((1, HEADS, 2, 128), packing.NO_KEY, np.float32)

    def function(*operands):
        return pallas_triton_kernel.attend(
            *operands, num_tokens=ROWS, causal=True,
            fmt=jaxfp8.E4M3FNUZ, config=CONFIG,
        )  # fmt: skip

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
    assert np.linalg.norm(difference) < 0.03 * np.linalg.norm(expected.out)


def test_packing():
    rng = np.random.default_rng(1)
    start = int(CU_K[1])
    k = np.zeros((CU_K[-1], HEADS, 192), np.uint16).view(ml_dtypes.bfloat16)
    v = np.zeros((CU_K[-1], HEADS, 128), np.uint16).view(ml_dtypes.bfloat16)
    for x in (k, v):
        x[start:, HEAD] = rng.standard_normal((KEYS, x.shape[2])).astype(x.dtype)
    descale = np.full(HEADS, 0.02, np.float32)
    table = tiling.tile_table(jnp.asarray(CU_K), BLOCK, TILES)
    nonfinite = np.full((1, HEADS, 2, 128), packing.NO_KEY, np.float32)

    def function(k, v, cu, k_descale, v_descale):
        return packing.pack_keys_and_values(
            k, v, cu, k_descale, v_descale, jaxfp8.E4M3FNUZ, block=BLOCK
        )

    arguments = {
        "k[0]": k, "v": v, "cu_seqlens": CU_K, "k_descale": descale, "v_descale": descale,
    }  # fmt: skip
    others = {
        name: np.asarray(getattr(table, name)) for name in ("sequence", "row", "token", "count")
    } | {"no_key": nonfinite}
    packed_k = np.zeros((HEADS, TILES * BLOCK, 192), np.uint8).view(FNUZ)
    packed_v = np.zeros((HEADS, TILES, 128, BLOCK), np.uint8).view(FNUZ)
    programs = [(HEAD, FIRST_TILE, 0), (HEAD, FIRST_TILE + 1, 0)]
    launch(function, arguments, others, [packed_k, packed_v, nonfinite], programs)
    found = packed_v[HEAD, FIRST_TILE : FIRST_TILE + 2].swapaxes(1, 2).reshape(-1, 128)
    for actual, x in ((packed_k[HEAD, FIRST_TILE * BLOCK :], k), (found, v)):
        expected = oracle.quantize(x[start:, HEAD, None], descale[:1], "float8_e4m3fnuz")[:, 0]
        np.testing.assert_array_equal(actual[:KEYS].view(np.uint8), expected.view(np.uint8))
