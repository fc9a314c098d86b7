# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""What the processes of one test run compute once among them: above all, compiled kernels."""

from __future__ import annotations

import fcntl
import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Value = TypeVar("Value")

_folder: Path | None = None


def use(folder: Path) -> None:
    """Has `once` keep what it computes in a folder, which is this test run's alone."""
    global _folder
    _folder = folder


def once(key: str, compute: Callable[[], Value]) -> Value:
    """compute(), or what a process of this test run has computed for the key; it is pickled."""
    if _folder is None:
        return compute()
    path = _folder / hashlib.sha256(key.encode()).hexdigest()
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_bytes(pickle.dumps(compute()))
        value: Value = pickle.loads(path.read_bytes())
        return value
