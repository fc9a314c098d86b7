# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Several processes of one JAX program, on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_processes(module: str, count: int, folder: Path, **env: str) -> None:
    """Runs `python -m MODULE RANK PORT FOLDER` for every rank; all must end well.

    env is added to their environment. The port is free on the loopback, for
    `jax.distributed.initialize`.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(port), str(folder)],
            env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **env},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
            process.wait()
