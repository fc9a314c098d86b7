# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The one place where a backend is chosen."""

from __future__ import annotations

import functools
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
    "sm90": ("pallas_mosaic_gpu", "pallas_triton", "xla"),
}

BACKENDS = tuple(_MODULES)


@functools.cache
def get_backend(name: str) -> AttentionBackend:
    """The backend of a name.

    Raises:
      ValueError: there is no backend of that name.
    """
    if name not in _MODULES:
        raise ValueError(f"backend: expected None or one of {', '.join(BACKENDS)}; got {name!r}")
    backend: AttentionBackend = importlib.import_module(_MODULES[name]).BACKEND
    return backend


def choose_backend(name: str | None, spec: AttentionSpec, target: Target) -> AttentionBackend:
    """The backend that serves a request: the named one, or the first that can.

    Raises:
      TypeError: the name is not a string.
      ValueError: there is no backend of that name.
      NotImplementedError: the named backend cannot serve the request, or none can.
    """
    if name is not None:
        if not isinstance(name, str):
            raise TypeError(f"backend: expected a name or None, got {type(name).__name__}")
        backend = get_backend(name)
        reason = backend.unsupported(spec, target)
        if reason is not None:
            raise NotImplementedError(f"backend {name}: {reason}")
        return backend
    refusals = []
    for candidate in _PREFERENCE.get(target.arch, ("xla",)):
        backend = get_backend(candidate)
        reason = backend.unsupported(spec, target)
        if reason is None:
            return backend
        refusals.append(f"{candidate}: {reason}")
    raise NotImplementedError("no backend serves this request; " + "; ".join(refusals))
