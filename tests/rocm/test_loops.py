# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Instruction classes and clocks, and the loops found in listings."""

from __future__ import annotations

import pytest

from jaxfp8.rocm.disassembly import disassemble, parse_listing
from jaxfp8.rocm.instructions import classify, issue_clocks, load_bytes
from jaxfp8.rocm.loops import innermost_loops
from tests.gfx942sim.assembly import DATA
from tests.gfx942sim.tools import needs_objdump


@pytest.mark.parametrize(
    ("opcode", "kind", "clocks"),
    [
        ("v_mfma_f32_32x32x16_fp8_fp8", "mfma", 32),
        ("v_mfma_f32_16x16x32_bf8_fp8", "mfma", 16),
        ("v_mfma_f32_32x32x8_bf16", "mfma", 32),
        ("v_mfma_f32_32x32x8_bf16_1k", "mfma", 32),
        ("v_mfma_f32_16x16x16_f16", "mfma", 16),
        ("v_pk_fma_f32", "valu", 4),
        ("v_exp_f32", "transcendental", 16),
        ("v_rcp_iflag_f32", "transcendental", 16),
        ("v_exp_legacy", "valu", 4),
        ("v_mov_b32", "valu", 4),
        ("ds_read_b128", "lds", 0),
        ("global_load_dwordx4", "vmem_load", 0),
        ("buffer_store_short", "vmem_store", 0),
        ("global_atomic_add_f32", "vmem_atomic", 0),
        ("buffer_wbl2", "other", 0),
        ("s_load_dwordx8", "smem", 0),
        ("s_barrier", "barrier", 0),
        ("s_waitcnt", "waitcnt", 0),
        ("s_cbranch_scc1", "branch", 0),
        ("s_add_u32", "salu", 0),
        ("s_nop", "other", 0),
    ],
)
def test_classes_and_clocks(opcode, kind, clocks):
    assert (classify(opcode), issue_clocks(opcode)) == (kind, clocks)


def test_a_matrix_instruction_of_unknown_rate_is_refused():
    with pytest.raises(NotImplementedError, match="rate of v_mfma_f32_4x4x4_16b_f16"):
        issue_clocks("v_mfma_f32_4x4x4_16b_f16")


@pytest.mark.parametrize(
    ("opcode", "width"),
    [
        ("global_load_dwordx4", 16),
        ("buffer_load_dwordx3", 12),
        ("global_load_dwordx2", 8),
        ("buffer_load_dword", 4),
        ("global_load_lds_dword", 4),
        ("global_load_ushort", 2),
        ("global_load_short_d16_hi", 2),
        ("buffer_load_ubyte_d16", 1),
        ("global_load_sbyte", 1),
        ("global_store_dwordx4", None),
        ("s_load_dwordx4", None),
        ("ds_read_b128", None),
    ],
)
def test_width_of_loads(opcode, width):
    assert load_bytes(opcode) == width


def listing(*lines: str) -> list:
    """Instructions of 4 bytes each; `name -> n` branches to the n-th."""
    text = []
    for index, line in enumerate(lines):
        word = 0
        if "->" in line:
            line, _, target = line.partition("->")
            word = (int(target) - index - 1) & 0xFFFF
            line = f"{line.strip()} {word}"
        text.append(f"\t{line} // {4 * index:012X}: {word:08X}")
    return parse_listing("\n".join(text))


MFMA = "v_mfma_f32_32x32x16_fp8_fp8 a[0:15], v[0:1], v[2:3], a[0:15]"
EXP = "v_exp_f32_e32 v1, v1"


def test_only_innermost_loops_are_found():
    loops = innermost_loops(
        listing(
            "s_nop 0",
            "v_mov_b32_e32 v0, v1",  # outer loop
            MFMA,  # inner loop
            "s_cbranch_scc1 -> 2",
            "s_cbranch_scc1 -> 1",
            "s_endpgm",
        )
    )
    assert [(loop.start, loop.end) for loop in loops] == [(8, 12)]
    assert loops[0].report().mfma == 1


def test_a_block_that_was_moved_out_of_the_loop_counts_and_what_lies_within_it_does_not():
    loops = innermost_loops(
        listing(
            "s_branch -> 3",
            "ds_read_b32 v1, v2",  # an exit that lies inside the loop's addresses
            "s_endpgm",
            MFMA,
            "s_cbranch_scc0 -> 7",  # to the moved block
            "s_cbranch_scc1 -> 1",
            "s_branch -> 3",
            EXP,  # the moved block
            "s_branch -> 3",
        )
    )
    # Entered at 3; both back edges lead there.
    (loop,) = loops
    report = loop.report()
    assert (report.mfma, report.transcendental, report.lds) == (1, 1, 0)


@pytest.mark.parametrize(
    ("extra", "kind"),
    [
        ((), "full"),
        (("v_cmp_u_f32_e32 vcc, v1, v1", "v_cndmask_b32_e32 v1, v2, v3, vcc"), "full"),
        (("v_cmp_gt_i32_e32 vcc, v1, v2", "v_cndmask_b32_e32 v1, v2, v3, vcc"), "masked"),
        (("v_cmp_le_u32_e64 s[0:1], v1, v2",), "masked"),
    ],
)
def test_kinds(extra, kind):
    (loop,) = innermost_loops(listing(MFMA, EXP, *extra, "s_cbranch_scc1 -> 0", "s_endpgm"))
    assert loop.report().kind == kind


def test_a_loop_without_matrix_or_exponential_is_of_another_kind():
    for line in (MFMA, EXP):
        (loop,) = innermost_loops(listing(line, "s_cbranch_scc1 -> 0", "s_endpgm"))
        assert loop.report().kind == "other"


def test_code_without_loops():
    assert innermost_loops(listing(MFMA, "s_cbranch_scc1 -> 3", EXP, "s_endpgm")) == []
    assert innermost_loops([]) == []


@needs_objdump
def test_a_real_attention_kernel():
    (loop,) = innermost_loops(disassemble((DATA / "xla" / "e_perm.hsaco").read_bytes()))
    report = loop.report()
    assert report.kind == "full"
    assert (report.mfma, report.mfma_clocks) == (40, 1280)
    assert report.mfma_ops == ("v_mfma_f32_32x32x16_fp8_fp8",)
    assert report.vector_clocks == 4 * report.valu + 16 * report.transcendental
    assert (report.barrier, report.narrowest_load_bytes) == (6, 16)
