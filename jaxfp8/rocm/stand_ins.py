# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the ROCm libraries that XLA:ROCm is linked against.

Compiling for a described device calls none of their functions, but the dynamic loader wants every
library that the plugin names. Where one is missing, a shared library of that name is built whose
functions return an error code. Libraries that the machine has are used as they are.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

from jaxfp8.rocm.errors import MissingToolError

# Symbols with these prefixes belong to the libraries of ROCm; _ZN is the C++ interface of some.
_ROCM_SYMBOL = re.compile(r"(__hip|hip|amdsmi|rsmi|roc|miopen|nccl|hsa|_ZN)")
_SYSTEM_VERSION = re.compile(r"@(GLIBC|CXXABI|GCC_)")

_HIP_ERROR_NO_DEVICE = 100
_HIP_VERSION = 70051830  # of ROCm 7.0; the plugin refuses runtimes that are too old

# The few functions that the plugin calls while it is loaded.
_SPECIAL = {
    "hipGetDeviceCount": (
        f"int hipGetDeviceCount(int* n) {{ *n = 0; return {_HIP_ERROR_NO_DEVICE}; }}"
    ),
    "hipInit": "int hipInit(unsigned flags) { return 0; }",
    "hipGetErrorString": ('const char* hipGetErrorString(int error) { return "no ROCm runtime"; }'),
    "hipGetErrorName": 'const char* hipGetErrorName(int error) { return "noRocmRuntime"; }',
    "hipRuntimeGetVersion": (
        f"int hipRuntimeGetVersion(int* version) {{ *version = {_HIP_VERSION}; return 0; }}"
    ),
    "hipDriverGetVersion": (
        f"int hipDriverGetVersion(int* version) {{ *version = {_HIP_VERSION}; return 0; }}"
    ),
}


def build_stand_ins(plugin: Path, folder: Path) -> list[Path]:
    """Builds a stand-in for every library that the plugin needs and the machine lacks.

    Args:
      plugin: the shared library of the ROCm plugin.
      folder: where the stand-ins are written.

    Returns:
      The libraries built; empty where the machine has all of them.

    Raises:
      MissingToolError: a library is missing, and so is gcc or binutils to build its stand-in.
    """
    needed = _needed_libraries(plugin)
    present = {name: library for name in needed if (library := _load(name)) is not None}
    missing = [name for name in needed if name not in present]
    if not missing:
        return []
    if shutil.which("gcc") is None:
        raise MissingToolError(
            f"gcc is missing: it builds stand-ins for {', '.join(missing)}, which XLA:ROCm is "
            "linked against and this machine lacks. Install gcc (Debian: apt-get install gcc), "
            "or ROCm"
        )
    symbols = [
        symbol
        for symbol in _undefined_symbols(plugin)
        if not any(hasattr(library, symbol) for library in present.values())
    ]
    source = folder / "stand_ins.c"
    source.write_text(
        "\n".join(
            _SPECIAL.get(symbol, f"int {symbol}(void) {{ return {_HIP_ERROR_NO_DEVICE}; }}")
            for symbol in symbols
        )
    )
    libraries = []
    for name in missing:
        path = folder / name
        _run("gcc", "-w", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(path), str(source))
        libraries.append(path)
    return libraries


def _needed_libraries(plugin: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.+)\]", _run("readelf", "-d", str(plugin)))


def _undefined_symbols(plugin: Path) -> list[str]:
    lines = _run("nm", "-D", "--undefined-only", str(plugin)).splitlines()
    symbols = {line.split()[-1].split("@")[0] for line in lines if not _SYSTEM_VERSION.search(line)}
    return sorted(symbol for symbol in symbols if _ROCM_SYMBOL.match(symbol))


def _load(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _run(*command: str) -> str:
    if shutil.which(command[0]) is None:
        raise MissingToolError(
            f"{command[0]} is missing: it reads which libraries XLA:ROCm needs. Install binutils "
            "(Debian: apt-get install binutils)"
        )
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
