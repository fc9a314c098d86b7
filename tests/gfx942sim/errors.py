# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Exceptions raised by the simulator."""

from __future__ import annotations


class SimulationError(RuntimeError):
    """A kernel did something illegal; the message ends with the faulting instruction."""

    def locate(self, pc: int, text: str, wave: str) -> SimulationError:
        """Return a copy of this error that also names the instruction and the wave."""
        return type(self)(f"{self} [pc 0x{pc:x}: {text}; {wave}]")


class MemoryFault(SimulationError):
    """An access outside every registered buffer, outside LDS, or to read-only memory."""


class DataRace(SimulationError):
    """Two waves touched the same LDS byte without a barrier in between."""


class UnsupportedInstruction(NotImplementedError):
    """The simulator has no semantics for an opcode or for one of its modifiers."""
