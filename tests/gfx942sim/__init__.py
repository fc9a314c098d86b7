# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Functional simulator for AMD gfx942 (CDNA3, MI300X) kernels."""

from tests.gfx942sim.errors import DataRace, MemoryFault, SimulationError, UnsupportedInstruction
from tests.gfx942sim.memory import GlobalMemory
from tests.gfx942sim.simulator import POISON, Kernel
from tests.gfx942sim.stats import Stats

__all__ = [
    "POISON",
    "DataRace",
    "GlobalMemory",
    "Kernel",
    "MemoryFault",
    "SimulationError",
    "Stats",
    "UnsupportedInstruction",
]
