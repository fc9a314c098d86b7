# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Launching: arguments, initial state, scheduling, faults, statistics and the command line."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from tests.gfx942sim import DataRace, Kernel, SimulationError, UnsupportedInstruction
from tests.gfx942sim.assembly import assemble, load_data_kernel
from tests.gfx942sim.tools import needs_assembler

pytestmark = needs_assembler

U32 = np.uint32

EXCHANGE = """
  s_load_dwordx2 s[4:5], s[0:1], 0x0
  v_lshlrev_b32 v1, 2, v0
  v_xor_b32 v2, 0x100, v1
  ds_write_b32 v1, v0
  {barrier}
  ds_read_b32 v3, v2
  global_store_dword v1, v3, s[4:5]
"""


def exchange_kernel(barrier: str) -> Kernel:
    """Each of two waves reads what the other one wrote to LDS."""
    return Kernel.from_hsaco(assemble(EXCHANGE.format(barrier=barrier), pointers=1, lds=512))


def test_barrier_orders_waves():
    for reverse in (False, True):
        result = np.zeros(128, U32)
        exchange_kernel("s_barrier").launch(
            1, 128, [result], reverse_waves=reverse, detect_races=True
        )
        np.testing.assert_array_equal(result, np.arange(128) ^ 64)


def test_missing_barrier_is_visible():
    kernel = exchange_kernel("s_nop 0")
    forward, backward = np.zeros(128, U32), np.zeros(128, U32)
    kernel.launch(1, 128, [forward])
    kernel.launch(1, 128, [backward], reverse_waves=True)
    assert (forward != backward).any()
    with pytest.raises(
        DataRace, match="LDS byte 256: wave 1 overwrites what wave 0 read with no barrier"
    ):
        kernel.launch(1, 128, [forward], detect_races=True)


def test_poison_exposes_uninitialized_registers_and_lds():
    body = """
      s_load_dwordx2 s[4:5], s[0:1], 0x0
      v_lshlrev_b32 v1, 2, v0
      v_add_f32 v2, 1.0, v9
      ds_read_b32 v3, v1
      global_store_dword v1, v2, s[4:5]
      global_store_dword v1, v3, s[4:5] offset:256
    """
    result = np.zeros((2, 64), np.float32)
    kernel = Kernel.from_hsaco(assemble(body, pointers=1, lds=256))
    kernel.launch(1, 64, [result])
    assert np.isnan(result).all()
    kernel.launch(1, 64, [result], uninitialized=0)
    np.testing.assert_array_equal(result, [[1] * 64, [0] * 64])


def test_ids_and_partial_wave():
    body = """
      s_load_dwordx2 s[4:5], s[0:1], 0x0
      v_and_b32 v1, 0x3ff, v0
      v_bfe_u32 v2, v0, 10, 10
      v_bfe_u32 v3, v0, 20, 10
      v_lshl_add_u32 v4, v2, 3, v1
      v_mul_u32_u24 v5, 40, v3
      v_add_u32 v4, v4, v5
      s_mul_i32 s8, s3, 3
      s_add_u32 s8, s8, s2
      s_mul_i32 s8, s8, 80
      v_add_u32 v4, s8, v4
      v_lshlrev_b32 v6, 2, v4
      global_store_dword v6, v4, s[4:5]
    """
    kernel = Kernel.from_hsaco(assemble(body, pointers=1, workitem_id=2))
    result = np.full(480, 9999, U32)
    stats = kernel.launch((3, 2), (8, 5, 2), [result])
    np.testing.assert_array_equal(result, np.arange(480))
    assert (stats.workgroups, stats.waves) == (6, 12)
    result[:] = 9999
    kernel.launch((3, 2), (8, 5, 2), [result], workgroups=[(1, 1, 0)])
    np.testing.assert_array_equal(np.nonzero(result != 9999)[0], np.arange(320, 400))


def test_unsupported_opcode_raises_only_when_reached():
    kernel = Kernel.from_hsaco(
        assemble("s_branch over\nv_cubeid_f32 v1, v2, v3, v4\nover:", pointers=0)
    )
    assert set(kernel.unsupported) == {"v_cubeid_f32"}
    kernel.launch(1, 64, [])
    kernel = Kernel.from_hsaco(assemble("v_cubeid_f32 v1, v2, v3, v4", pointers=0))
    with pytest.raises(NotImplementedError, match=r"v_cubeid_f32.*pc 0x"):
        kernel.launch(1, 64, [])


def test_unsupported_rounding_mode():
    kernel = Kernel.from_hsaco(
        assemble("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 2), 3", pointers=0)
    )
    with pytest.raises(UnsupportedInstruction, match="round"):
        kernel.launch(1, 64, [])


def test_registers_beyond_the_allocation_are_rejected():
    kernel = Kernel.from_hsaco(assemble("v_mov_b32 v9, v3", pointers=0, vgprs=8, accum_offset=8))
    with pytest.raises(SimulationError, match="v9 is beyond"):
        kernel.launch(1, 64, [])


def test_instruction_limit_stops_endless_loops():
    kernel = Kernel.from_hsaco(assemble("again:\ns_branch again", pointers=0))
    with pytest.raises(SimulationError, match="limit"):
        kernel.launch(1, 64, [], max_wave_instructions=1000)


def test_argument_checks():
    kernel = load_data_kernel("triton", "vadd")
    a = np.zeros(1024, np.float32)
    for args in (
        [a, a, a],
        [a, a, 1, 2],
        [a, a, a, np.int64(5)],
        [a, a, a, 5, None, None, 7],
        [a, a, a, a],
    ):
        with pytest.raises(TypeError):
            kernel.launch(1, 256, args)
    with pytest.raises(ValueError, match="contiguous"):
        kernel.launch(1, 256, [np.zeros((64, 64), np.float32)[:, ::2], a, a, 5])
    for count in (1024, np.int32(1024), ctypes.c_int32(1024)):
        kernel.launch(1, 256, [a, a, a, count])


def test_metadata_of_a_real_kernel():
    kernel = load_data_kernel("triton", "fa32big").info
    descriptor = kernel.descriptor
    assert (descriptor.accum_offset, descriptor.total_vgprs) == (256, 376)
    assert descriptor.user_sgprs == [("kernarg_segment_ptr", 2)]
    assert descriptor.kernarg_preload_length == 14
    assert descriptor.workgroup_id_enabled == (True, True, False)
    assert [argument.size for argument in kernel.arguments] == [8, 8, 8, 8, 4, 4, 8, 8]


def test_kernels_are_chosen_by_name():
    store = (
        "s_load_dwordx2 s[4:5], s[0:1], 0x0\nv_mov_b32 v1, {}\nv_mov_b32 v2, 0\n"
        "global_store_dword v2, v1, s[4:5]"
    )
    image = assemble({"one": store.format(1), "two": store.format(2)}, pointers=1)
    for name, expected in (("one", 1), ("two", 2)):
        result = np.zeros(1, U32)
        Kernel.from_hsaco(image, name).launch(1, 64, [result])
        assert result[0] == expected
    with pytest.raises(ValueError, match=r"one.*two"):
        Kernel.from_hsaco(image)
    with pytest.raises(KeyError):
        Kernel.from_hsaco(image, "three")
    with pytest.raises(ValueError, match="ELF"):
        Kernel.from_hsaco(b"\0" * 100)


def test_hidden_arguments():
    kinds = [
        ("hidden_block_count_x", 4),
        ("hidden_block_count_y", 4),
        ("hidden_dynamic_lds_size", 4),
        ("hidden_none", 4),
    ]
    kinds += [("hidden_group_size_x", 2), ("hidden_group_size_y", 2), ("hidden_grid_dims", 2)]
    body = """
      s_load_dwordx2 s[4:5], s[0:1], 0x0
      v_mov_b32 v10, 0
      s_load_dwordx4 s[8:11], s[0:1], 0x8
      s_load_dwordx2 s[12:13], s[0:1], 0x18
    """
    for i, register in enumerate((8, 9, 10, 12, 13)):
        body += f"v_mov_b32 v1, s{register}\nglobal_store_dword v10, v1, s[4:5] offset:{4 * i}\n"
    result = np.zeros(5, U32)
    kernel = Kernel.from_hsaco(assemble(body, pointers=1, hidden=kinds))
    kernel.launch((3, 2), (32, 4), [result], dynamic_lds_bytes=512)
    np.testing.assert_array_equal(result, [3, 2, 512, 4 << 16 | 32, 2])
