# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The mark of tests that compile with XLA:ROCm."""

from __future__ import annotations

import shutil

import pytest

from jaxfp8.rocm.disassembly import find_llvm_tool
from jaxfp8.rocm.errors import MissingToolError
from jaxfp8.rocm.plugin import find_plugin


def _missing() -> str:
    """What is missing, as the reason of a skip; "" where nothing is."""
    try:
        find_plugin()
        find_llvm_tool("llvm-objdump")
    except MissingToolError as error:
        return str(error)
    return "" if shutil.which("gcc") else "gcc is missing"


_MISSING = _missing()

needs_rocm_compiler = pytest.mark.skipif(bool(_MISSING), reason=_MISSING)
