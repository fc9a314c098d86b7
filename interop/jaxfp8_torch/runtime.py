# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Two frameworks in one process: JAX's GPU memory, forks, the cache of compiled programs."""

from __future__ import annotations

import os
import sys
import threading
import warnings

_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_lock = threading.Lock()
_compilations = 0
_used = False
_forked = False


def share_the_gpu() -> None:
    """Keeps JAX from reserving most of the GPU's memory at its start, which torch wants too.

    A setting of the user's own stands. If JAX is running already and has reserved the memory,
    that is said once, as a RuntimeWarning: it cannot be undone.
    """
    if not jax_is_running():
        os.environ.setdefault(_PREALLOCATE, "false")
        return
    import jax

    preallocates = os.environ.get(_PREALLOCATE, "true").lower() not in ("false", "0")
    if preallocates and jax.default_backend() == "gpu":
        warnings.warn(
            "JAX was started before jaxfp8_torch was imported and has reserved most of the GPU's "
            f"memory; import jaxfp8_torch first, or set {_PREALLOCATE}=false",
            RuntimeWarning,
            stacklevel=3,
        )


def jax_is_running() -> bool:
    """Whether JAX has started its backends in this process: until then its settings can be changed,
    and the process can be forked. Asking starts nothing, and imports JAX no more than it was.
    """
    if "jax" not in sys.modules:
        return False
    import jax

    # JAX lets this be changed until its backends are up, and says in no other public way whether
    # they are.
    name = "jax_num_cpu_devices"
    devices = getattr(jax.config, name)
    try:
        jax.config.update(name, devices + 1)
    except RuntimeError:
        return True
    jax.config.update(name, devices)
    return False


def enter() -> None:
    """To be called before JAX is used.

    Raises:
      RuntimeError: this process was forked from one in which JAX was running: its threads and
        its device context did not come along, and a call would hang.
    """
    global _used
    if _forked:
        raise RuntimeError(
            "jaxfp8_torch was used before this process was forked, and JAX does not survive a "
            "fork; start worker processes with the 'spawn' or 'forkserver' method, or fork before "
            "the first call"
        )
    _used = True


def _after_fork_in_child() -> None:
    global _forked
    _forked = _used


os.register_at_fork(after_in_child=_after_fork_in_child)


def count_compilation() -> None:
    """To be called from traced code: once for every program that is compiled."""
    global _compilations
    with _lock:
        _compilations += 1


def compilation_count() -> int:
    """Number of programs compiled through this package since it was imported.

    A server that has warmed up (`warmup`) can watch it stand still.
    """
    return _compilations


def use_compilation_cache(directory: str | os.PathLike[str]) -> None:
    """Keeps compiled programs in a folder, for this process and the next.

    JAX's persistent compilation cache, for programs of any size and compile time.

    Raises:
      TypeError: directory is not a path.
    """
    # Not above: JAX is imported after share_the_gpu.
    import jax

    from jaxfp8.scales.arguments import require_path

    require_path("directory", directory)

    jax.config.update("jax_compilation_cache_dir", os.fspath(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
