# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""FP8 attention kernels that XLA:ROCm compiled: q [H,T,192], k [H,S,192], v [H,S,128] to o, lse."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest

from jaxfp8.rocm.disassembly import disassemble
from jaxfp8.rocm.loops import innermost_loops
from tests.gfx942sim import DataRace, Kernel, MemoryFault
from tests.gfx942sim.assembly import DATA, load_data_kernel
from tests.gfx942sim.tools import needs_objdump

pytestmark = needs_objdump

HEADS, QUERIES, KEYS, QK_SIZE, V_SIZE = 2, 128, 256, 192, 128

S_NOP = (0xBF800000).to_bytes(4, "little")

# name: (waves, layout of v)
KERNELS = {
    "e_plain": (4, "plain"),
    "e_perm": (4, "permuted"),
    "e_perm256": (8, "permuted"),
}


@dataclass
class Problem:
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    output: np.ndarray
    lse: np.ndarray

    def v_in_layout(self, layout: str) -> np.ndarray:
        codes = self.v.view(np.uint8)
        if layout == "plain":
            return codes
        codes = codes.swapaxes(1, 2)
        if layout == "permuted":  # swap the middle bits of each group of 16 keys
            groups = codes.reshape(HEADS, V_SIZE, KEYS // 16, 2, 2, 4)
            codes = groups.transpose(0, 1, 2, 4, 3, 5).reshape(HEADS, V_SIZE, KEYS)
        return np.ascontiguousarray(codes)


@pytest.fixture(scope="module")
def problem() -> Problem:
    rng = np.random.default_rng(0)
    shapes = ((HEADS, QUERIES, QK_SIZE), (HEADS, KEYS, QK_SIZE), (HEADS, KEYS, V_SIZE))
    q, k, v = (rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fnuz) for shape in shapes)
    scores = np.einsum("htd,hsd->hts", q.astype(float), k.astype(float)) / np.sqrt(QK_SIZE)
    peak = scores.max(-1, keepdims=True)
    weights = np.exp(scores - peak)
    total = weights.sum(-1, keepdims=True)
    output = np.einsum("hts,hsd->htd", weights / total, v.astype(float))
    return Problem(q, k, v, output, (peak + np.log(total))[..., 0])


def attention(problem: Problem, name: str, kernel: Kernel | None = None, **options):
    waves, layout = KERNELS[name]
    output = np.zeros((HEADS, QUERIES, V_SIZE), ml_dtypes.bfloat16)
    lse = np.zeros((HEADS, QUERIES), np.float32)
    args = [problem.q, problem.k, problem.v_in_layout(layout), output, lse]
    kernel = kernel or load_data_kernel("xla", name)
    stats = kernel.launch(
        (QUERIES // 128, HEADS), 64 * waves, args, dynamic_lds_bytes=65536, **options
    )
    return output.astype(np.float64), lse, stats


@pytest.mark.parametrize("name", KERNELS)
def test_matches_softmax_attention(problem, name):
    output, lse, _ = attention(problem, name)
    error = np.linalg.norm(output - problem.output) / np.linalg.norm(problem.output)
    assert error < 0.024  # the weights are rounded to fp8
    assert np.abs(lse - problem.lse).max() < 1e-5


@pytest.mark.parametrize(
    "options", [{"reverse_waves": True}, {"uninitialized": 0}, {"detect_races": True}], ids=str
)
def test_is_independent_of_order_and_uninitialized_data(problem, options):
    expected, expected_lse, _ = attention(problem, "e_perm")
    output, lse, _ = attention(problem, "e_perm", **options)
    np.testing.assert_array_equal(output, expected)
    np.testing.assert_array_equal(lse, expected_lse)


def test_statistics(problem):
    _, _, stats = attention(problem, "e_perm")
    assert stats.wave_instructions == 16540
    macs = HEADS * QUERIES * KEYS * (QK_SIZE + V_SIZE)
    assert stats.opcodes["v_mfma_f32_32x32x16_fp8_fp8"] == macs // (32 * 32 * 16)
    assert stats.clocks["mfma"] == 32 * stats.classes["mfma"]
    assert stats.traffic.global_store_bytes == HEADS * QUERIES * (V_SIZE * 2 + 4)


def test_a_short_buffer_is_reported(problem):
    output = np.zeros((HEADS, QUERIES, V_SIZE), ml_dtypes.bfloat16)
    lse = np.zeros((HEADS, QUERIES), np.float32)
    short_k = problem.k[:, : KEYS - 1].copy()
    args = [problem.q, short_k, problem.v_in_layout("permuted"), output, lse]
    with pytest.raises(MemoryFault, match=r"argument 1.*global_load_dwordx4"):
        load_data_kernel("xla", "e_perm").launch((1, HEADS), 256, args, dynamic_lds_bytes=65536)


def test_every_removed_barrier_in_the_main_loop_is_a_race(problem):
    image = (DATA / "xla" / "e_perm.hsaco").read_bytes()
    instructions = disassemble(image)
    (loop,) = innermost_loops(instructions)
    code = image.index(
        b"".join(word.to_bytes(4, "little") for inst in instructions[:4] for word in inst.words)
    )
    barriers = [
        i for i in instructions if i.opcode == "s_barrier" and loop.start <= i.address <= loop.end
    ]
    assert len(barriers) == 6
    for barrier in barriers:
        patched = bytearray(image)
        position = code + barrier.address - instructions[0].address
        patched[position : position + 4] = S_NOP
        with pytest.raises(DataRace):
            attention(problem, "e_perm", Kernel.from_hsaco(bytes(patched)), detect_races=True)
