# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Classes of gfx942 instructions, and the clocks for which they hold a SIMD's execution units.

The clocks are a model of issue, not a measurement. They follow from AMD's published peak rates
(MI300X data sheet: 1307 TFLOP/s BF16 and 2615 FP8 at 2.1 GHz, 304 CUs of 4 SIMDs) and ignore
latency, dependences, register bank conflicts and the sharing of LDS and caches.
"""

from __future__ import annotations

import re

CLASSES = (
    "mfma",
    "valu",
    "transcendental",
    "salu",
    "smem",
    "lds",
    "vmem_load",
    "vmem_store",
    "vmem_atomic",
    "barrier",
    "waitcnt",
    "branch",
    "other",
)

VECTOR_CLOCKS = 4
"""64 lanes on a SIMD of 16. Packed float32 instructions do twice the work in the same time."""

TRANSCENDENTAL_CLOCKS = 16
"""Exponentials, logarithms, reciprocals, roots, sines: a quarter of the rate."""

# 16-bit shapes run at 512 FLOP a clock and SIMD, 8-bit at 1024, float32 at 64.
_MFMA_CLOCKS = {
    ("32x32x16", 8): 32,
    ("16x16x32", 8): 16,
    ("32x32x8", 16): 32,
    ("16x16x16", 16): 16,
    ("32x32x2", 32): 64,
    ("16x16x4", 32): 32,
}
_ELEMENT_BITS = {"fp8": 8, "bf8": 8, "i8": 8, "bf16": 16, "f16": 16, "f32": 32}
_MFMA = re.compile(r"v_mfma_[a-z0-9]+_(\d+x\d+x\d+)_?(fp8|bf8|bf16|f16|f32|i8)")
_TRANSCENDENTAL = re.compile(r"v_(exp|log|rcp|rcp_iflag|rsq|sqrt|sin|cos)_(f16|f32|f64)$")
_LOAD_BYTES = re.compile(
    r"(?:global|flat|buffer|scratch)_load_(?:lds_)?"
    r"(?:(dword)(?:x(\d))?|[us]?(byte|short)(?:_d16(?:_hi)?)?)"
)


def classify(opcode: str) -> str:
    """The class (one of CLASSES) of an opcode, a mnemonic without its encoding suffix."""
    if opcode.startswith("v_mfma_"):
        return "mfma"
    if opcode.startswith("v_"):
        return "transcendental" if _TRANSCENDENTAL.match(opcode) else "valu"
    if opcode.startswith("ds_"):
        return "lds"
    if match := re.match(r"(?:global|flat|buffer|scratch)_(load|store|atomic)_", opcode):
        return f"vmem_{match[1]}"
    if opcode == "s_barrier":
        return "barrier"
    if opcode.startswith("s_waitcnt"):
        return "waitcnt"
    if opcode.startswith(("s_branch", "s_cbranch", "s_setpc", "s_swappc", "s_call", "s_endpgm")):
        return "branch"
    if opcode.startswith(("s_load", "s_buffer_load")):
        return "smem"
    if opcode.startswith(("s_nop", "s_setprio", "s_sleep", "buffer_", "s_dcache", "s_icache")):
        return "other"
    return "salu"


def issue_clocks(opcode: str) -> int:
    """Clocks of one wave's instruction on the matrix or vector unit; 0 for all other classes.

    Raises:
      NotImplementedError: a matrix instruction whose rate is not in the table.
    """
    kind = classify(opcode)
    if kind == "mfma":
        match = _MFMA.match(opcode)
        clocks = _MFMA_CLOCKS.get((match[1], _ELEMENT_BITS[match[2]])) if match else None
        if clocks is None:
            raise NotImplementedError(
                f"the rate of {opcode} is not known: add it to jaxfp8/rocm/instructions.py"
            )
        return clocks
    return {"valu": VECTOR_CLOCKS, "transcendental": TRANSCENDENTAL_CLOCKS}.get(kind, 0)


def load_bytes(opcode: str) -> int | None:
    """Bytes that one lane loads from global memory with this opcode; None if it does not load."""
    match = _LOAD_BYTES.match(opcode)
    if match is None:
        return None
    if match[1]:
        return 4 * int(match[2] or 1)
    return {"byte": 1, "short": 2}[match[3]]
