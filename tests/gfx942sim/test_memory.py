# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""LDS, global, buffer, flat and scratch accesses."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.gfx942sim import GlobalMemory, Kernel, MemoryFault
from tests.gfx942sim.assembly import assemble
from tests.gfx942sim.tools import needs_assembler

pytestmark = needs_assembler

U32 = np.uint32
LANES = np.arange(64, dtype=U32)


def random_u32(rng) -> np.ndarray:
    return rng.integers(0, 1 << 32, 64, dtype=U32)


# ---------------------------------------------------------------- LDS


@pytest.mark.parametrize("width", [32, 64, 128])
def test_lds_widths(run, rng, width):
    dwords = width // 32
    data = [random_u32(rng) for _ in range(4)]
    text = f"""
      v_mul_u32_u24 v10, {4 * dwords}, v0
      ds_write_b{width} v10, v[2:{1 + dwords}] offset:64
      ds_read_b{width} v[100:{99 + dwords}], v10 offset:64
    """
    text = text.replace("v[2:2]", "v2").replace("v[100:100]", "v100")
    result = run(text, data[0], *data, outputs=4, lds=2048)
    np.testing.assert_array_equal(result[:dwords], data[:dwords])


def test_lds_two_address_forms(run, rng):
    a, b = random_u32(rng), random_u32(rng)
    text = """
      v_lshlrev_b32 v10, 2, v0
      v_lshlrev_b32 v11, 3, v0
      ds_write2st64_b32 v10, v1, v2 offset0:1 offset1:3
      ds_read2_b32 v[100:101], v10 offset0:64 offset1:192
      ds_read2st64_b64 v[102:105], v11 offset0:0 offset1:1
      ds_write2_b64 v11, v[2:3], v[2:3] offset0:64 offset1:128
      ds_read_b32 v106, v11 offset:512
    """
    result = run(text, a, b, a, outputs=7, lds=4096)
    np.testing.assert_array_equal(result[:2], [a, b])
    # The b64 reads cover bytes 0-511 and 512-1023; the first write filled 256-511 and 768-1023.
    np.testing.assert_array_equal(result[2, 32:], a[0::2])
    np.testing.assert_array_equal(result[5, 32:], b[1::2])
    np.testing.assert_array_equal(result[6], b)


def test_lds_small_accesses(run, rng):
    a = random_u32(rng)
    text = """
      v_lshlrev_b32 v10, 2, v0
      ds_write_b32 v10, v1
      ds_read_u8 v100, v10 offset:1
      ds_read_i8 v101, v10 offset:3
      ds_read_u16 v102, v10 offset:2
      ds_read_i16 v103, v10
      v_mov_b32 v104, -1
      ds_read_u16_d16_hi v104, v10
      ds_write_b8 v10, v0 offset:2
      ds_write_b16_d16_hi v10, v1
      ds_read_b32 v105, v10
    """
    result = run(text, a, outputs=6, lds=256)
    np.testing.assert_array_equal(result[0], a >> 8 & 0xFF)
    np.testing.assert_array_equal(result[1].view(np.int32), a.view(np.int32) >> 24)
    np.testing.assert_array_equal(result[2], a >> 16)
    np.testing.assert_array_equal(
        result[3], (a & 0xFFFF).astype(np.uint16).view(np.int16).astype(np.int32).view(U32)
    )
    np.testing.assert_array_equal(result[4], a << U32(16) | U32(0xFFFF))
    np.testing.assert_array_equal(result[5], a & U32(0xFF000000) | LANES << U32(16) | a >> U32(16))


def test_lds_atomics(run):
    text = """
      v_mov_b32 v10, 0
      v_mov_b32 v11, 0
      v_mov_b32 v12, 1.0
      ds_write_b64 v10, v[10:11]
      ds_add_u32 v10, v0
      ds_add_rtn_u32 v100, v10, v0
      ds_add_f32 v10, v12 offset:4
      ds_max_rtn_i32 v101, v10, v10
      ds_read_b32 v102, v10
      ds_read_b32 v103, v10 offset:4
    """
    result = run(text, outputs=4, lds=8)
    np.testing.assert_array_equal(result[0], 2016 + np.cumsum(LANES) - LANES)
    assert (result[2] == 2 * 2016).all() and (result[3].view(np.float32) == 64).all()


def test_lds_permutes(run, rng):
    a = random_u32(rng)
    text = """
      v_xor_b32 v10, 5, v0
      v_lshlrev_b32 v10, 2, v10
      ds_bpermute_b32 v100, v10, v1
      ds_bpermute_b32 v101, v10, v1 offset:4
      ds_permute_b32 v102, v10, v1
      ds_swizzle_b32 v103, v1 offset:swizzle(QUAD_PERM,1,0,3,2)
      ds_swizzle_b32 v104, v1 offset:swizzle(SWAP,16)
      ds_swizzle_b32 v105, v1 offset:swizzle(BROADCAST,8,3)
    """
    result = run(text, a, outputs=6)
    sources = [
        LANES ^ 5,
        ((LANES ^ 5) + 1) % 64,
        LANES ^ 5,
        LANES ^ 1,
        LANES ^ 16,
        LANES // 8 * 8 + 3,
    ]
    np.testing.assert_array_equal(result, [a[source] for source in sources])


def test_lds_out_of_range_faults(run):
    with pytest.raises(MemoryFault, match=r"LDS access of 4 bytes at 252.*ds_read_b32"):
        run("v_lshlrev_b32 v10, 2, v0\nds_read_b32 v100, v10", lds=252)


# ---------------------------------------------------------------- global, buffer, flat


def launch(body: str, *arrays: np.ndarray, **options):
    pointers = "\n".join(
        f"s_load_dwordx2 s[{4 + 2 * i}:{5 + 2 * i}], s[0:1], {8 * i}" for i in range(len(arrays))
    )
    image = assemble(f"{pointers}\ns_waitcnt lgkmcnt(0)\n{body}", pointers=len(arrays), **options)
    return Kernel.from_hsaco(image).launch(1, 64, list(arrays))


def test_global_widths_and_conversions(rng):
    source = rng.integers(0, 256, 4096, dtype=np.uint8)
    result = np.zeros((16, 64), U32)
    body = """
      v_lshlrev_b32 v1, 4, v0
      v_lshlrev_b32 v2, 2, v0
      v_mov_b32 v3, 0
      v_lshl_add_u64 v[4:5], s[4:5], 0, v[2:3]
      global_load_dwordx4 v[10:13], v1, s[4:5] offset:16
      global_load_dwordx3 v[14:16], v1, s[4:5]
      global_load_ubyte v17, v[4:5], off offset:1
      global_load_sbyte v18, v[4:5], off offset:1
      global_load_ushort v19, v[4:5], off offset:3
      v_mov_b32 v20, -1
      global_load_short_d16 v20, v[4:5], off
      global_load_dword v21, v[4:5], off offset:1
      flat_load_dwordx2 v[22:23], v[4:5] offset:8
    """
    stores = "\n".join(
        f"global_store_dword v2, v{10 + i}, s[6:7] offset:{256 * i}" for i in range(14)
    )
    stats = launch(body + stores, source, result)

    def dword(offset, stride):
        return np.array([source[lane * stride + offset :][:4].view(U32)[0] for lane in range(64)])

    np.testing.assert_array_equal(result[:4], [dword(16 + 4 * i, 16) for i in range(4)])
    np.testing.assert_array_equal(result[4:7], [dword(4 * i, 16) for i in range(3)])
    np.testing.assert_array_equal(result[7], dword(1, 4) & 0xFF)
    np.testing.assert_array_equal(
        result[8].view(np.int32), (dword(1, 4) & 0xFF).astype(np.uint8).view(np.int8)
    )
    np.testing.assert_array_equal(result[9], dword(3, 4) & 0xFFFF)
    np.testing.assert_array_equal(result[10], dword(0, 4) | U32(0xFFFF0000))
    np.testing.assert_array_equal(result[11], dword(1, 4))
    np.testing.assert_array_equal(result[12:14], [dword(8, 4), dword(12, 4)])
    assert stats.traffic.global_load_bytes == 64 * (16 + 12 + 1 + 1 + 2 + 2 + 4 + 8)
    assert stats.traffic.global_store_bytes == 64 * 4 * 14


def test_global_stores_of_bytes_and_halves(rng):
    source = random_u32(rng)
    result = np.zeros(512, np.uint8)
    body = """
      v_lshlrev_b32 v1, 2, v0
      v_lshlrev_b32 v2, 3, v0
      global_load_dword v3, v1, s[4:5]
      global_store_byte v2, v3, s[6:7]
      global_store_byte_d16_hi v2, v3, s[6:7] offset:1
      global_store_short v2, v3, s[6:7] offset:3
      global_store_short_d16_hi v2, v3, s[6:7] offset:5
    """
    launch(body, source, result)
    expected = np.zeros((64, 8), np.uint8)
    data = source.view(np.uint8).reshape(64, 4)
    expected[:, 0], expected[:, 1], expected[:, 3:5], expected[:, 5:7] = (
        data[:, 0],
        data[:, 2],
        data[:, :2],
        data[:, 2:],
    )
    np.testing.assert_array_equal(result.reshape(64, 8), expected)


def test_access_outside_buffers_names_the_instruction():
    source, result = np.zeros(63, U32), np.zeros(64, U32)
    body = (
        "v_lshlrev_b32 v1, 2, v0\nglobal_load_dword v2, v1, s[4:5]\n"
        "global_store_dword v1, v2, s[6:7]"
    )
    with pytest.raises(
        MemoryFault, match=r"by 1 lanes.*byte 252 of argument 0.*pc 0x.*global_load_dword v2"
    ):
        launch(body, source, result)


def test_inactive_lanes_do_not_access_memory():
    source, result = np.arange(32, dtype=U32), np.zeros(32, U32)
    body = """
      v_lshlrev_b32 v1, 2, v0
      s_mov_b64 exec, 0xffff
      global_load_dword v2, v1, s[4:5]
      global_store_dword v1, v2, s[6:7]
    """
    stats = launch(body, source, result)
    np.testing.assert_array_equal(result, np.where(source < 16, source, 0))
    assert stats.traffic.global_load_bytes == 64


def test_store_to_read_only_array_faults():
    target = np.zeros(64, U32)
    target.flags.writeable = False
    with pytest.raises(MemoryFault, match="read-only argument 0"):
        launch("v_lshlrev_b32 v1, 2, v0\nglobal_store_dword v1, v0, s[4:5]", target)


def test_lanes_in_different_buffers():
    first, second = np.arange(64, dtype=U32), np.arange(64, dtype=U32) + U32(1000)
    memory = GlobalMemory()
    addresses = np.array(
        [memory.register(first if lane % 2 else second) + 4 * lane for lane in range(64)], np.uint64
    )
    result = np.zeros(64, U32)
    body = """
      s_load_dwordx2 s[4:5], s[0:1], 0x0
      s_load_dwordx2 s[6:7], s[0:1], 0x8
      v_lshlrev_b32 v1, 3, v0
      v_lshlrev_b32 v2, 2, v0
      global_load_dwordx2 v[4:5], v1, s[4:5]
      global_load_dword v6, v[4:5], off
      global_store_dword v2, v6, s[6:7]
    """
    Kernel.from_hsaco(assemble(body)).launch(1, 64, [addresses, result], memory=memory)
    np.testing.assert_array_equal(result, np.where(LANES % 2 == 1, first, second))


BUFFER_DESCRIPTOR = """
  s_mov_b32 s8, s4
  s_and_b32 s9, s5, 0xffff
  s_mov_b32 s10, {records}
  s_mov_b32 s11, 0x27000
"""


def test_buffer_range_check_is_per_dword(rng):
    source = rng.integers(0, 1 << 32, 256, dtype=U32)
    result = np.zeros((4, 64), U32)
    body = (
        BUFFER_DESCRIPTOR.format(records=1000)
        + """
      v_lshlrev_b32 v1, 4, v0
      v_lshlrev_b32 v2, 2, v0
      buffer_load_dwordx4 v[4:7], v1, s[8:11], 0 offen
      global_store_dword v2, v4, s[6:7]
      global_store_dword v2, v5, s[6:7] offset:256
      global_store_dword v2, v6, s[6:7] offset:512
      global_store_dword v2, v7, s[6:7] offset:768
    """
    )
    launch(body, source, result)
    np.testing.assert_array_equal(result.T.ravel(), np.where(np.arange(256) < 250, source, 0))


def test_buffer_offsets_index_and_store():
    target = np.zeros(256, U32)
    body = (
        BUFFER_DESCRIPTOR.format(records=1024)
        + """
      s_or_b32 s9, s9, 0x80000
      s_movk_i32 s12, 0x100
      v_add_u32 v1, 1, v0
      buffer_store_dword v1, v0, s[8:11], 0 idxen
      v_lshlrev_b32 v2, 2, v0
      buffer_store_dword v1, v2, s[8:11], s12 offen offset:512
      buffer_store_short v1, off, s[8:11], 0 offset:1020
    """
    )
    launch(body, target)
    expected = np.zeros(256, U32)
    expected[0:128:2] = LANES + 1
    expected[192:256] = LANES + 1  # lanes past the end would be dropped
    expected[255] = 64 & 0xFFFF
    np.testing.assert_array_equal(target, expected)


def test_buffer_masked_lanes_with_large_offset():
    source, result = np.arange(64, dtype=U32), np.zeros(64, U32)
    body = (
        BUFFER_DESCRIPTOR.format(records="0x7ffffffe")
        + """
      v_lshlrev_b32 v2, 2, v0
      v_mov_b32 v3, 0x80000000
      v_cmp_gt_u32 vcc, 32, v0
      v_cndmask_b32 v3, v3, v2, vcc
      buffer_load_dword v4, v3, s[8:11], 0 offen
      global_store_dword v2, v4, s[6:7]
    """
    )
    launch(body, source, result)
    np.testing.assert_array_equal(result, np.where(LANES < 32, source, 0))


def test_buffer_load_to_lds():
    source, result = np.arange(64, dtype=U32) * U32(3), np.zeros(64, U32)
    body = (
        BUFFER_DESCRIPTOR.format(records=256)
        + """
      s_mov_b32 m0, 128
      v_lshlrev_b32 v1, 2, v0
      buffer_load_dword v1, s[8:11], 0 offen lds
      ds_read_b32 v2, v1 offset:128
      global_store_dword v1, v2, s[6:7]
    """
    )
    launch(body, source, result, lds=512)
    np.testing.assert_array_equal(result, source)


def test_global_atomics():
    target = np.zeros(8, U32)
    floats = np.zeros(4, np.float32)
    result = np.zeros(64, U32)
    body = """
      v_mov_b32 v1, 0
      v_mov_b32 v2, 1
      v_mov_b32 v3, 0.5
      v_lshlrev_b32 v4, 2, v0
      global_atomic_add v5, v1, v2, s[4:5] sc0
      global_atomic_umax v1, v0, s[4:5] offset:4
      global_atomic_or v1, v0, s[4:5] offset:8
      global_atomic_add_f32 v1, v3, s[6:7]
      v_mov_b32 v6, 7
      v_mov_b32 v7, 0
      global_atomic_cmpswap v1, v[6:7], s[4:5] offset:12
      v_mov_b32 v9, 0
      global_atomic_add_x2 v1, v[6:7], s[4:5] offset:16
      v_mov_b32 v8, 0x3f803f80
      global_atomic_pk_add_bf16 v1, v8, s[6:7] offset:8
      global_store_dword v4, v5, s[8:9]
    """
    launch(body, target, floats, result)
    np.testing.assert_array_equal(result, LANES)
    np.testing.assert_array_equal(target[:6], [64, 63, 63, 7, 7 * 64, 0])
    assert floats[0] == 32
    np.testing.assert_array_equal(floats[2:3].view(ml_dtypes.bfloat16).astype(float), [64, 64])


def test_flat_to_lds_and_scratch():
    result = np.zeros((3, 64), U32)
    body = """
      s_mov_b64 s[8:9], src_shared_base
      s_mov_b64 s[10:11], src_private_base
      v_lshlrev_b32 v2, 2, v0
      v_mov_b32 v3, s9
      v_add_u32 v6, 3, v0
      flat_store_dword v[2:3], v6
      ds_read_b32 v7, v2
      v_mov_b32 v4, 8
      v_mov_b32 v5, s11
      flat_store_dword v[4:5], v0
      scratch_load_dword v8, off, off offset:8
      s_movk_i32 s12, 0x4
      scratch_store_dword v4, v6, off offset:4
      scratch_load_dword v9, v4, s12
      global_store_dword v2, v7, s[4:5]
      global_store_dword v2, v8, s[4:5] offset:256
      global_store_dword v2, v9, s[4:5] offset:512
    """
    launch(body, result, lds=256, scratch=16)
    np.testing.assert_array_equal(result, [LANES + 3, LANES, LANES + 3])


def test_scratch_out_of_range_faults():
    with pytest.raises(MemoryFault, match="scratch access of 4 bytes at 16"):
        launch("scratch_load_dword v1, off, off offset:16", np.zeros(1, U32), scratch=16)
