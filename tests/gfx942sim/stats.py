# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The statistics of a launch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from jaxfp8.rocm.instructions import CLASSES, classify, issue_clocks
from tests.gfx942sim.wave import TrafficCounters


@dataclass
class Stats:
    """Dynamic statistics of a launch. Counts are wave-instructions, summed over all waves."""

    opcodes: Counter[str]
    waves: int
    workgroups: int
    traffic: TrafficCounters
    seconds: float

    @property
    def wave_instructions(self) -> int:
        return self.opcodes.total()

    @property
    def classes(self) -> Counter[str]:
        """How many instructions of each class."""
        counts: Counter[str] = Counter()
        for opcode, number in self.opcodes.items():
            counts[classify(opcode)] += number
        return counts

    @property
    def clocks(self) -> dict[str, int]:
        """Modelled issue clocks (jaxfp8/rocm/instructions.py) of the matrix and vector units."""
        clocks = {"mfma": 0, "vector": 0}
        for opcode, number in self.opcodes.items():
            clocks["mfma" if classify(opcode) == "mfma" else "vector"] += number * issue_clocks(
                opcode
            )
        return clocks

    def summary(self) -> str:
        classes = self.classes
        counts = ", ".join(f"{name} {classes[name]}" for name in CLASSES if classes[name])
        rate = self.wave_instructions / max(self.seconds, 1e-9)
        clocks = {unit: total / max(self.waves, 1) for unit, total in self.clocks.items()}
        traffic = self.traffic
        return "\n".join(
            (
                f"{self.wave_instructions} wave-instructions, {self.waves} waves, "
                f"{self.workgroups} workgroups, {self.seconds:.2f} s ({rate:.0f}/s)",
                f"classes: {counts}",
                f"modelled clocks per wave: MFMA {clocks['mfma']:.0f}, "
                f"vector {clocks['vector']:.0f}",
                f"global memory: {traffic.global_load_bytes} bytes loaded, "
                f"{traffic.global_store_bytes} bytes stored",
                f"LDS: {traffic.lds_load_bytes} bytes loaded, "
                f"{traffic.lds_store_bytes} bytes stored",
            )
        )
