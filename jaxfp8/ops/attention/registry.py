# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The one place where a backend is chosen.

What is chosen where none is named is fast on the device, and its numbers have been compared there:
on an H200 for sm90; in a simulator for gfx942. Any other device gets "xla". The Triton kernels
accept NVIDIA devices from sm89 on, but no sm89, sm100 or later one has been compared, and on sm90
they are slow: there a caller has them by naming them, backend="pallas_triton". `why_by_name_only`
is what `jaxfp8 doctor` says of it.
"""

from __future__ import annotations

import importlib

from jaxfp8.ops.attention.base import AttentionBackend, AttentionSpec
from jaxfp8.targets import Target

# Where each backend lives: a module with a BACKEND object. Imported on first use, so that a
# program that never runs a Pallas kernel never imports Pallas. To add a backend, write the module
# (ops/attention/base.py says what it provides), name it here, and place it in _PREFERENCE.
_MODULES = {
    "xla": "jaxfp8.ops.attention.reference",
    "pallas_triton": "jaxfp8.ops.attention.pallas_triton",
    "pallas_mosaic_gpu": "jaxfp8.ops.attention.pallas_mosaic_gpu",
    "interpret": "jaxfp8.ops.attention.interpret",
}

# Tried in this order when the caller names none; "interpret" is for tests and never chosen.
_PREFERENCE = {
    "gfx942": ("pallas_triton", "xla"),
    "sm90": ("pallas_mosaic_gpu", "xla"),
}

BACKENDS = tuple(_MODULES)


def get_backend(name: str) -> AttentionBackend:
    """The backend of a name.

    Raises:
      TypeError: the name is not a string.
      ValueError: there is no backend of that name.
    """
    if not isinstance(name, str):
        raise TypeError(f"backend: expected a name or None, got {type(name).__name__}")
    if name not in _MODULES:
        raise ValueError(f"backend: expected None or one of {', '.join(BACKENDS)}; got {name!r}")
    backend: AttentionBackend = importlib.import_module(_MODULES[name]).BACKEND
    return backend


def why_by_name_only(name: str, target: Target) -> str | None:
    """Why a backend is never chosen on a target unless it is named; None where it may be."""
    if name in _preference(target):
        return None
    if name == "interpret":
        return "it is for tests"
    if (name, target.arch) == ("pallas_triton", "sm90"):
        return "pallas_mosaic_gpu is several times as fast there (benchmarks/results)"
    return f"its numbers have not been compared on {target.arch}"


def what_it_lacks(name: str) -> str | None:
    """What a backend does without under the installed JAX, at the cost of speed; None: nothing."""
    if name != "pallas_mosaic_gpu":
        return None
    from jaxfp8.ops.attention.pallas_mosaic_gpu_kernel import UPDATES_OPERANDS

    if UPDATES_OPERANDS:
        return None
    return (
        "before JAX 0.11 a kernel updates no array that it is given, so XLA packs keys and values, "
        "and the blocks' tasks are dealt out beforehand: results are the same, and slower"
    )


def _preference(target: Target) -> tuple[str, ...]:
    return _PREFERENCE.get(target.arch, ("xla",))


def choose_backend(name: str | None, spec: AttentionSpec, target: Target) -> AttentionBackend:
    """The backend that serves a request: the named one, or the first that can.

    Raises:
      TypeError: the name is not a string.
      ValueError: there is no backend of that name.
      NotImplementedError: the named backend cannot serve the request, or none can.
    """
    if name is not None:
        backend = get_backend(name)
        reason = backend.unsupported(spec, target)
        if reason is not None:
            raise NotImplementedError(f"backend {name}: {reason}")
        return backend
    refusals = []
    for candidate in _preference(target):
        backend = get_backend(candidate)
        reason = backend.unsupported(spec, target)
        if reason is None:
            return backend
        refusals.append(f"{candidate}: {reason}")
    raise NotImplementedError("no backend serves this request; " + "; ".join(refusals))
