# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Writes a file and kills itself with SIGKILL at the n-th step of the write.

Usage: python kill_writer.py PATH OLD NEW. For n = 0, 1, ...: puts OLD at PATH, forks a child that
writes NEW and dies at step n (before a system call, or after half of a write), and prints what is
at PATH afterwards: "old", "new", or "broken". Stops at the n that the child survives.
"""

import os
import signal
import sys
from pathlib import Path

from jaxfp8.scales.files import write_atomically

CALLS = ("open", "stat", "write", "fsync", "replace", "close")


def die_at(step: int) -> None:
    """Makes this process kill itself at that step of what it does with files."""
    steps = iter(range(10**6))

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def call(*args, **kwargs):
            if next(steps) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            if name == "write" and next(steps) == step:
                real(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **kwargs)
            if name == "replace" and next(steps) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(os, name, call)

    for name in CALLS:
        wrap(name)


def main(path: Path, old: bytes, new: bytes) -> None:
    for step in range(1000):
        write_atomically(path, old)
        child = os.fork()
        if child == 0:
            die_at(step)
            write_atomically(path, new)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found = path.read_bytes()
        state = {old: "old", new: "new"}.get(found, "broken")
        print(state, "killed" if os.WIFSIGNALED(status) else "finished", flush=True)
        if not os.WIFSIGNALED(status):
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]).read_bytes(), Path(sys.argv[3]).read_bytes())
