# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""compile_for_gfx942 on functions of a user's own, and what it says where something is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

import jaxfp8
from jaxfp8.rocm import MissingToolError, compile_for_gfx942, disassembly, plugin, stand_ins
from jaxfp8.rocm.compile import CompiledKernel, KernelArg, described_gfx942
from tests.gfx942sim import Kernel
from tests.rocm.tools import needs_rocm_compiler

ROOT = Path(__file__).parents[2]


def scale_kernel(x_ref, factor_ref, out_ref):
    block = pl.ds(pl.program_id(0) * 64, 64)
    out_ref[block] = x_ref[block] * factor_ref[0]


def scaled_sine(x, factor):
    """A Pallas kernel and one that XLA makes."""
    scaled = pl.pallas_call(
        scale_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // 64,),
        compiler_params=plgpu.CompilerParams(num_warps=1),
        name="scale",
    )(x, factor)
    return jnp.sin(scaled.astype(jnp.float32))


ARGS = (jax.ShapeDtypeStruct((256,), np.float32), jax.ShapeDtypeStruct((1,), np.float32))


@needs_rocm_compiler
def test_kernels_of_a_function():
    for function in (scaled_sine, jax.jit(scaled_sine)):
        scale, sine = compile_for_gfx942(function, *ARGS)
        assert (scale.name, scale.pallas, sine.pallas) == ("scale", True, False)
        assert (scale.grid, scale.block_threads) == ((4, 1, 1), 64)
        assert scale.args == (
            KernelArg("x", (256,), np.dtype(np.float32), None),
            KernelArg("factor", (1,), np.dtype(np.float32), None),
            KernelArg("out", (256,), np.dtype(np.float32), None),
        )
        assert sine.args[1].same_as in (None, sine.args[0].name)
        assert scale.spills == scale.scratch_bytes == scale.lds_bytes == 0
        assert scale.waves_per_simd == 8
        assert scale.loops == []
        assert scale.total.memory > 0 and scale.total.mfma == 0
        assert "s_endpgm" in scale.disassembly()


@needs_rocm_compiler
def test_kernels_of_one_name():
    def twice(x, factor):
        return scaled_sine(x, factor), scaled_sine(x[:64], factor)

    kernels = [kernel for kernel in compile_for_gfx942(twice, *ARGS) if kernel.pallas]
    assert sorted(kernel.name for kernel in kernels) == ["scale", "scale__1"]
    for kernel in kernels:
        assert [arg.name for arg in kernel.args] == ["x", "factor", "out"]
    assert sorted(kernel.args[0].shape for kernel in kernels) == [(64,), (256,)]


@needs_rocm_compiler
def test_the_code_computes_what_the_function_does():
    x = np.random.default_rng(0).standard_normal(256).astype(np.float32)
    scale, sine = compile_for_gfx942(scaled_sine, x, np.float32([3]))
    (scaled,) = launch(scale, x, np.float32([3]))
    np.testing.assert_array_equal(scaled, x * np.float32(3))
    (out,) = launch(sine, scaled)
    np.testing.assert_allclose(out, np.sin(scaled.astype(np.float64)), rtol=1e-5, atol=1e-6)


def launch(kernel: CompiledKernel, *inputs: np.ndarray) -> list[np.ndarray]:
    """The outputs of a kernel in the simulator."""
    buffers: dict[str, np.ndarray] = {}
    for index, arg in enumerate(kernel.args):
        if arg.same_as is not None:
            buffers[arg.name] = buffers[arg.same_as]
        elif index < len(inputs):
            buffers[arg.name] = inputs[index].copy()
        else:
            buffers[arg.name] = np.full(arg.shape, np.nan, arg.dtype)
    arrays = list(buffers.values())
    Kernel.from_hsaco(kernel.code_object, kernel.name).launch(
        kernel.grid, kernel.block_threads, arrays, kernel.dynamic_lds_bytes
    )
    return arrays[len(inputs) :]


@needs_rocm_compiler
def test_pytrees_and_other_devices():
    """Arguments may be pytrees, and JAX's own devices stay what they were."""
    before = jax.devices()
    (kernel,) = compile_for_gfx942(lambda pair: pair["a"] + pair["b"], {"a": ARGS[0], "b": ARGS[0]})
    assert len(kernel.args) == 3
    assert jax.devices() == before
    assert float(jax.jit(jnp.sin)(1.0)) == pytest.approx(np.sin(1.0))
    with described_gfx942():
        assert jaxfp8.detect_target().arch == "gfx942"
    assert jaxfp8.detect_target().arch == "cpu"


@needs_rocm_compiler
def test_a_function_without_a_kernel_is_refused():
    with pytest.raises(ValueError, match="no GPU kernel"):
        compile_for_gfx942(lambda x: x, ARGS[0])


def occupancy(vgpr: int, agpr: int, threads: int, lds: int) -> int:
    kernel = CompiledKernel(
        "k", b"", (1, 1, 1), threads, lds, (), True, vgpr, agpr, 50, 0, 0, 0
    )  # fmt: skip
    return kernel.waves_per_simd


@pytest.mark.parametrize(
    ("vgpr", "agpr", "threads", "lds", "waves"),
    [
        (256, 0, 256, 32768, 2),
        (252, 8, 256, 24576, 1),
        (128, 0, 256, 0, 4),
        (129, 0, 256, 0, 3),
        (32, 0, 256, 0, 8),
        (64, 0, 256, 32768, 2),
        (64, 0, 256, 32769, 1),
        (128, 0, 512, 32768, 4),
        (256, 0, 512, 65536, 2),
    ],
)
def test_waves_per_simd(vgpr, agpr, threads, lds, waves):
    assert occupancy(vgpr, agpr, threads, lds) == waves


def test_a_missing_plugin_is_named(monkeypatch):
    monkeypatch.setattr(plugin.pkgutil, "iter_modules", lambda path: [])
    with pytest.raises(MissingToolError, match=r"pip install jax-rocm7-pjrt==\d+\.\d+\.\d+ jax-ro"):
        plugin.find_plugin()


@needs_rocm_compiler
def test_a_plugin_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(plugin.jaxlib, "__version__", "0.99.1")
    with pytest.raises(MissingToolError, match=r"does not fit jaxlib 0\.99\.1.*pip install"):
        plugin.find_plugin()


@needs_rocm_compiler
@pytest.mark.parametrize(
    ("tool", "message"), [("gcc", "apt-get install gcc"), ("readelf", "apt-get install binutils")]
)
def test_a_missing_builder_of_stand_ins_is_named(monkeypatch, tmp_path, tool, message):
    def which(name: str) -> str | None:
        return None if name == tool else f"/bin/{name}"

    monkeypatch.setattr(stand_ins.shutil, "which", which)
    monkeypatch.setattr(stand_ins, "_load", lambda name: None)
    with pytest.raises(MissingToolError, match=message):
        stand_ins.build_stand_ins(plugin.find_plugin(), tmp_path)


def test_a_missing_llvm_is_named(monkeypatch):
    monkeypatch.setattr(disassembly.shutil, "which", lambda name: None)
    monkeypatch.setattr(disassembly.glob, "glob", lambda pattern: [])
    with pytest.raises(MissingToolError, match="llvm-objdump is missing.*apt-get install llvm-19"):
        disassembly.disassemble(b"")


def test_an_llvm_that_knows_no_gfx942_is_named(monkeypatch, tmp_path):
    tool = tmp_path / "llvm-objdump"
    tool.write_text("#!/bin/sh\necho 'error: no target amdgcn' >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setattr(disassembly, "find_llvm_tool", lambda name: str(tool))
    with pytest.raises(MissingToolError, match="no target amdgcn.*AMDGPU target"):
        disassembly.disassemble(b"\x7fELF")


@needs_rocm_compiler
@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is missing")
@pytest.mark.parametrize("present", ["all", "one"])
def test_libraries_that_the_machine_has_are_used(tmp_path, present):
    """A machine with ROCm, imitated: its libraries are on the loader's path. No gcc is needed if
    all are there; if one is missing it alone is stood in for."""
    libraries = stand_ins.build_stand_ins(plugin.find_plugin(), tmp_path)
    if not libraries:
        return  # a machine with ROCm: the other tests have used its libraries
    if present == "one":
        libraries[0].unlink()
    program = (
        "import pathlib, tempfile, numpy, jax\n"
        "from jaxfp8.rocm import compile_for_gfx942, plugin, stand_ins\n"
        "folder = pathlib.Path(tempfile.mkdtemp())\n"
        "built = stand_ins.build_stand_ins(plugin.find_plugin(), folder)\n"
        "kernels = compile_for_gfx942(lambda x: x + 1, numpy.ones(64, numpy.float32))\n"
        "print(len(built), len(kernels), jax.devices())\n"
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment["JAX_PLATFORMS"] = "cpu"
    if present == "all":
        tools = tmp_path / "bin"
        tools.mkdir()
        for name in ("nm", "readelf", "llvm-objdump-19", "llvm-objdump"):
            if path := shutil.which(name):
                (tools / name).symlink_to(path)
        environment["PATH"] = str(tools)
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("0 1" if present == "all" else "1 1")
