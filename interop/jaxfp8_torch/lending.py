# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Tensors that JAX holds, and the end of the process.

Where a program is the last to use a tensor's memory, a thread of XLA's lets go of the tensor, and
torch takes Python's lock for that. A thread that asks for the lock while the interpreter goes down
is ended by Python, inside of C++ that does not survive it: "terminate called without an active
exception". So the process waits, before anything else goes down, for what XLA still has to let go.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref

import jax
import torch

_SECONDS = 30.0
_Reference = weakref.ref[torch.Tensor]
_lent: dict[_Reference, weakref.ref[jax.Array]] = {}


def lend(x: torch.Tensor) -> torch.Tensor:
    """A tensor on x's memory for JAX alone to hold."""
    return x.detach()


def lent(x: torch.Tensor, array: jax.Array) -> None:
    """Notes that the array holds the lent tensor."""
    _lent[weakref.ref(x, _forget)] = weakref.ref(array)


def _forget(reference: _Reference) -> None:
    _lent.pop(reference, None)


def dropped() -> int:
    """Number of tensors whose arrays are gone, and that a program of XLA's still holds."""
    return sum(array() is None for array in _lent.copy().values())


def wait_for_dropped() -> None:
    """Waits until there are none, for half a minute at most. Arrays that are alive are not waited
    for: they are let go by whoever drops them.
    """
    end = time.monotonic() + _SECONDS
    while dropped() and time.monotonic() < end:
        time.sleep(0.001)


# The last registered runs first: before JAX's own, which ends its backends.
atexit.register(wait_for_dropped)
os.register_at_fork(after_in_child=_lent.clear)  # XLA's threads are not there to let go
