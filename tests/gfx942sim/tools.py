# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Marks for tests that need LLVM."""

from __future__ import annotations

import pytest

from jaxfp8.rocm.disassembly import find_llvm_tool
from jaxfp8.rocm.errors import MissingToolError


def _missing(*tools: str) -> str:
    """What is missing of the tools, as the reason of a skip; "" where all are there."""
    for tool in tools:
        try:
            find_llvm_tool(tool)
        except MissingToolError as error:
            return str(error)
    return ""


_OBJDUMP = _missing("llvm-objdump")
_ASSEMBLER = _missing("llvm-objdump", "llvm-mc", "ld.lld")

needs_objdump = pytest.mark.skipif(bool(_OBJDUMP), reason=_OBJDUMP)
needs_assembler = pytest.mark.skipif(bool(_ASSEMBLER), reason=_ASSEMBLER)
