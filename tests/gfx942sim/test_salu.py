# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Scalar ALU instructions, scalar loads and control flow."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gfx942sim.tools import needs_assembler

pytestmark = needs_assembler

MASK32 = (1 << 32) - 1

# (instruction, expected s8, expected SCC or None) with s10 = A, s11 = B, s[12:13] = C.
A, B, C = 0xDEADBEEF, 0x00000013, 0xFFFF0000_12345678

CASES = [
    ("s_add_u32 s8, s10, s10", 2 * A & MASK32, 1),
    ("s_sub_u32 s8, s11, s10", B - A & MASK32, 1),
    ("s_add_i32 s8, 0x7fffffff, s11", 0x7FFFFFFF + B & MASK32, 1),
    ("s_mul_i32 s8, s10, s11", A * B & MASK32, None),
    ("s_mul_hi_u32 s8, s10, s11", A * B >> 32, None),
    ("s_mul_hi_i32 s8, s10, s11", (A - 2**32) * B >> 32 & MASK32, None),
    ("s_and_b32 s8, s10, 0xff", 0xEF, 1),
    ("s_andn2_b32 s8, s10, s10", 0, 0),
    ("s_lshl_b32 s8, s10, s11", A << 0x13 & MASK32, 1),
    ("s_ashr_i32 s8, s10, 4", 0xFDEADBEE, 1),
    ("s_lshl2_add_u32 s8, s11, s10", 4 * B + A, 0),
    ("s_bfe_u32 s8, s10, 0x80008", 0xBE, 1),
    ("s_bfe_i32 s8, s10, 0x80008", 0xFFFFFFBE, 1),
    ("s_min_i32 s8, s10, s11", A, 1),
    ("s_max_u32 s8, s10, s11", A, 1),
    ("s_not_b32 s8, s10", ~A & MASK32, 1),
    ("s_brev_b32 s8, s11", 0xC8000000, None),
    ("s_bcnt1_i32_b64 s8, s[12:13]", C.bit_count(), 1),
    ("s_ff1_i32_b32 s8, 0x100", 8, None),
    ("s_flbit_i32_b32 s8, s11", 27, None),
    ("s_sext_i32_i8 s8, s10", 0xFFFFFFEF, None),
    ("s_sext_i32_i16 s8, s10", 0xFFFFBEEF, None),
    ("s_abs_i32 s8, s10", 2**32 - A, 1),
    ("s_pack_lh_b32_b16 s8, s10, s10", 0xDEADBEEF, None),
    ("s_movk_i32 s8, 0x8000", 0xFFFF8000, None),
    ("s_mov_b32 s8, s11\ns_addk_i32 s8, 0xfff0", 3, 0),
    ("s_mov_b32 s8, s11\ns_mulk_i32 s8, 0xffff", -B & MASK32, None),
    ("s_cmp_lt_i32 s10, s11\ns_cselect_b32 s8, 1, 2", 1, 1),
    ("s_cmp_lt_u32 s10, s11\ns_cselect_b32 s8, 1, 2", 2, 0),
    ("s_cmpk_lg_u32 s11, 0x13\ns_cselect_b32 s8, 1, 2", 2, 0),
    ("s_cmpk_gt_i32 s10, 0x8000\ns_cselect_b32 s8, 1, 2", 2, 0),
    ("s_bitcmp1_b32 s11, 1\ns_cselect_b32 s8, 1, 2", 1, 1),
    ("s_mov_b32 s8, 0\ns_bitset1_b32 s8, 5", 32, None),
    ("s_lshr_b64 s[8:9], s[12:13], 16", C >> 16 & MASK32, 1),
    ("s_ashr_i64 s[8:9], s[12:13], 48\ns_mov_b32 s8, s9", MASK32, 1),
    ("s_mov_b64 s[8:9], 1.0\ns_mov_b32 s8, s9", 0x3FF00000, None),
    ("s_add_u32 s8, s10, s10\ns_addc_u32 s8, s11, 0", B + 1, 0),
    ("s_sub_u32 s8, s11, s10\ns_subb_u32 s8, s11, 0", B - 1, 0),
]


@pytest.mark.parametrize(
    ("text", "value", "scc"), CASES, ids=[case[0].replace("\n", "; ") for case in CASES]
)
def test_scalar(run, text, value, scc):
    body = f"""
      s_mov_b32 s10, 0x{A:x}
      s_mov_b32 s11, 0x{B:x}
      s_mov_b32 s12, 0x{C & MASK32:x}
      s_mov_b32 s13, 0x{C >> 32:x}
      {text}
      s_cselect_b32 s9, 1, 0
      v_mov_b32 v100, s8
      v_mov_b32 v101, s9
    """
    result = run(body, outputs=2)
    assert (result[0] == value).all()
    if scc is not None:
        assert (result[1] == scc).all()


def test_saveexec_and_branches(run):
    body = """
      v_mov_b32 v100, 0
      v_cmp_gt_u32 vcc, 10, v0
      s_and_saveexec_b64 s[8:9], vcc
      s_cbranch_execz skip
      v_mov_b32 v100, 1
    skip:
      s_xor_b64 exec, exec, s[8:9]
      v_mov_b32 v100, 2
      s_or_b64 exec, exec, s[8:9]
      s_mov_b32 s10, 0
      v_mov_b32 v101, 0
    loop:
      v_add_u32 v101, v101, v0
      s_add_i32 s10, s10, 1
      s_cmp_lt_i32 s10, 5
      s_cbranch_scc1 loop
    """
    result = run(body, outputs=2)
    lanes = np.arange(64)
    np.testing.assert_array_equal(result[0], np.where(lanes < 10, 1, 2))
    np.testing.assert_array_equal(result[1], 5 * lanes)
    assert run.last_stats.opcodes["s_cbranch_scc1"] == 5


def test_call_and_scalar_load_of_a_code_constant(run):
    body = """
      s_getpc_b64 s[8:9]
    here:
      s_add_u32 s10, s8, function-here
      s_addc_u32 s11, s9, 0
      s_swappc_b64 s[12:13], s[10:11]
      s_add_u32 s8, s8, constant-here
      s_addc_u32 s9, s9, 0
      s_load_dword s14, s[8:9], 0x0
      s_waitcnt lgkmcnt(0)
      v_mov_b32 v101, s14
      s_branch done
    function:
      v_mov_b32 v100, 42
      s_setpc_b64 s[12:13]
    constant:
      .long 0xbf800000
    done:
    """
    result = run(body, outputs=2)
    assert (result[0] == 42).all() and (result[1] == 0xBF800000).all()


def test_getreg_reads_mode(run):
    body = """
      s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1
      s_getreg_b32 s8, hwreg(HW_REG_MODE, 22, 3)
      v_mov_b32 v100, s8
    """
    assert (run(body) == 2).all()
