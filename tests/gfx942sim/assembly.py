# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Helpers that assemble small gfx942 kernels and run them."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxfp8.rocm.disassembly import find_llvm_tool
from tests.gfx942sim import Kernel, Stats

DATA = Path(__file__).parent / "data"

_HEADER = '.amdgcn_target "amdgcn-amd-amdhsa--gfx942"\n.text\n'

_CODE = """
.globl {name}
.p2align 8
.type {name},@function
{name}:
{body}
  s_endpgm
.Lend_{name}:
.size {name}, .Lend_{name}-{name}
"""

_DESCRIPTOR = """
.amdhsa_kernel {name}
  .amdhsa_next_free_vgpr {vgprs}
  .amdhsa_accum_offset {accum_offset}
  .amdhsa_next_free_sgpr 96
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_system_sgpr_workgroup_id_x 1
  .amdhsa_system_sgpr_workgroup_id_y 1
  .amdhsa_system_vgpr_workitem_id {workitem_id}
  .amdhsa_group_segment_fixed_size {lds}
  .amdhsa_private_segment_fixed_size {scratch}
  .amdhsa_float_denorm_mode_32 {denorm_f32}
  .amdhsa_float_denorm_mode_16_64 3
.end_amdhsa_kernel
"""

_METADATA = """
  - .name: {name}
    .symbol: {name}.kd
    .kernarg_segment_size: {kernarg}
    .kernarg_segment_align: 8
    .group_segment_fixed_size: {lds}
    .private_segment_fixed_size: {scratch}
    .wavefront_size: 64
    .sgpr_count: 96
    .vgpr_count: {vgprs}
    .max_flat_workgroup_size: 256
    .args:
{args}
"""


def assemble(
    body: str | dict[str, str],
    pointers: int = 2,
    hidden: Sequence[tuple[str, int]] = (),
    vgprs: int = 512,
    accum_offset: int = 256,
    lds: int = 0,
    scratch: int = 0,
    denorm_f32: int = 3,
    workitem_id: int = 0,
) -> bytes:
    """A HSACO with a kernel `kern`, or with one kernel per entry of a dict of bodies.

    Each takes `pointers` pointers, followed by the `hidden` arguments (value kind, size).
    On entry s[0:1] is the kernarg pointer, s2 and s3 are the workgroup ids and v0 the lane.
    """
    bodies = {"kern": body} if isinstance(body, str) else body
    arguments = [("global_buffer", 8)] * pointers + list(hidden)
    lines, offset = [], 0
    for kind, size in arguments:
        lines.append(f"      - {{.offset: {offset}, .size: {size}, .value_kind: {kind}}}")
        offset += size
    fields = dict(
        vgprs=vgprs, accum_offset=accum_offset, lds=lds, scratch=scratch, denorm_f32=denorm_f32,
        workitem_id=workitem_id, kernarg=offset, args="\n".join(lines),
    )  # fmt: skip
    source = _HEADER
    source += "".join(_CODE.format(name=name, body=text) for name, text in bodies.items())
    source += ".rodata\n.p2align 6\n" + "".join(
        _DESCRIPTOR.format(name=name, **fields) for name in bodies
    )
    source += ".amdgpu_metadata\n---\namdhsa.version: [1, 2]\namdhsa.kernels:"
    source += (
        "".join(_METADATA.format(name=name, **fields) for name in bodies)
        + "...\n.end_amdgpu_metadata\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        text, obj, out = (Path(folder, name) for name in ("k.s", "k.o", "k.hsaco"))
        text.write_text(source)
        mc = [
            find_llvm_tool("llvm-mc"),
            "-triple=amdgcn-amd-amdhsa",
            "-mcpu=gfx942",
            "-filetype=obj",
        ]
        subprocess.run([*mc, str(text), "-o", str(obj)], check=True)
        subprocess.run([find_llvm_tool("ld.lld"), "-shared", str(obj), "-o", str(out)], check=True)
        return out.read_bytes()


class SnippetRunner:
    """Runs instructions on one wave: inputs arrive in v1, v2, ..., results leave from v100, ..."""

    last_stats: Stats

    def __call__(
        self,
        body: str,
        *inputs: np.ndarray,
        outputs: int = 1,
        dtype: type = np.uint32,
        lanes: int = 64,
        **options,
    ) -> np.ndarray:
        """Result of shape [outputs, 64] (or [64] for one output), viewed as `dtype`."""
        rows = [np.broadcast_to(np.asarray(x), (64,)) for x in inputs]
        rows = [np.ascontiguousarray(x).view(np.uint32) for x in rows]
        source = np.stack(rows) if rows else np.zeros((1, 64), np.uint32)
        result = np.full((outputs, 64), 0xDEADBEEF, np.uint32)
        load = "\n".join(
            f"  global_load_dword v{1 + i}, v254, s[4:5]\n  v_add_u32 v254, 0x100, v254"
            for i in range(len(rows))
        )
        store = "\n".join(
            f"  global_store_dword v255, v{100 + i}, s[6:7]\n  v_add_u32 v255, 0x100, v255"
            for i in range(outputs)
        )
        prologue = (
            "  s_load_dwordx2 s[4:5], s[0:1], 0x0\n  s_load_dwordx2 s[6:7], s[0:1], 0x8\n"
            "  v_lshlrev_b32 v254, 2, v0\n  v_mov_b32 v255, v254\n  s_waitcnt lgkmcnt(0)\n"
        )
        image = assemble(f"{prologue}{load}\n  s_waitcnt vmcnt(0)\n{body}\n{store}", **options)
        kernel = Kernel.from_hsaco(image)
        assert not kernel.unsupported, kernel.unsupported
        self.last_stats = kernel.launch(1, lanes, [source, result])
        values = result.view(dtype)
        return values[0] if outputs == 1 else values


def load_data_kernel(folder: str, name: str) -> Kernel:
    return Kernel.from_hsaco(DATA / folder / f"{name}.hsaco")
