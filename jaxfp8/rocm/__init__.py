# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Compile for gfx942 on a machine without a GPU, and read what came out."""

from jaxfp8.rocm.compile import CompiledKernel, KernelArg, compile_for_gfx942
from jaxfp8.rocm.errors import MissingToolError
from jaxfp8.rocm.loops import LoopReport

__all__ = ["CompiledKernel", "KernelArg", "LoopReport", "MissingToolError", "compile_for_gfx942"]
