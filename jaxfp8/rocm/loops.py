# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The innermost loops of a kernel, and what one pass of one wave through them issues."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from jaxfp8.rocm.disassembly import Instruction
from jaxfp8.rocm.instructions import classify, issue_clocks, load_bytes

LoopKind = Literal["full", "masked", "other"]

_INTEGER_COMPARISON = re.compile(r"v_cmpx?_[a-z]+_[iu]\d+$")


@dataclasses.dataclass(frozen=True)
class LoopReport:
    """What one pass of one wave through a loop issues.

    A loop with branches inside is counted as if all its instructions ran.

    Attributes:
      kind: "full" and "masked" for the loops of attention over key tiles, without and with
        a mask on the scores; "other" for all else.
      mfma: matrix instructions.
      mfma_clocks: their clocks (jaxfp8/rocm/instructions.py).
      mfma_ops: their distinct names, sorted.
      valu: other vector instructions, transcendental ones aside.
      transcendental: exponentials, logarithms, reciprocals, roots.
      vector_clocks: clocks of valu and transcendental.
      lds: instructions on LDS, with those that only move data between lanes.
      memory: loads, stores and atomics on global memory and scratch.
      barrier: workgroup barriers.
      narrowest_load_bytes: bytes a lane loads from memory with the narrowest load; None where the
        loop has no load.
    """

    kind: LoopKind
    mfma: int
    mfma_clocks: int
    mfma_ops: tuple[str, ...]
    valu: int
    transcendental: int
    vector_clocks: int
    lds: int
    memory: int
    barrier: int
    narrowest_load_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Loop:
    """The instructions of a loop, in address order."""

    instructions: tuple[Instruction, ...]

    @property
    def start(self) -> int:
        """Lowest address."""
        return self.instructions[0].address

    @property
    def end(self) -> int:
        """Address of the last instruction."""
        return self.instructions[-1].address

    @property
    def opcodes(self) -> Counter[str]:
        """How many of each opcode."""
        return Counter(instruction.opcode for instruction in self.instructions)

    def report(self) -> LoopReport:
        """The counts of the loop."""
        classes = _class_counts(self.opcodes)
        return count(self.opcodes, _kind(self.opcodes, classes))


def _class_counts(opcodes: Counter[str]) -> Counter[str]:
    classes: Counter[str] = Counter()
    for opcode, number in opcodes.items():
        classes[classify(opcode)] += number
    return classes


def count(opcodes: Counter[str], kind: LoopKind = "other") -> LoopReport:
    """The counts of a piece of code, given how often it has each opcode."""
    classes = _class_counts(opcodes)
    clocks = {name: 0 for name in classes}
    for opcode, number in opcodes.items():
        clocks[classify(opcode)] += number * issue_clocks(opcode)
    loads = [width for opcode in opcodes if (width := load_bytes(opcode)) is not None]
    return LoopReport(
        kind=kind,
        mfma=classes["mfma"],
        mfma_clocks=clocks.get("mfma", 0),
        mfma_ops=tuple(sorted(opcode for opcode in opcodes if classify(opcode) == "mfma")),
        valu=classes["valu"],
        transcendental=classes["transcendental"],
        vector_clocks=clocks.get("valu", 0) + clocks.get("transcendental", 0),
        lds=classes["lds"],
        memory=classes["vmem_load"] + classes["vmem_store"] + classes["vmem_atomic"],
        barrier=classes["barrier"],
        narrowest_load_bytes=min(loads, default=None),
    )


def _kind(opcodes: Counter[str], classes: Counter[str]) -> LoopKind:
    """Attention loops multiply and exponentiate. A mask compares the index of every key with how
    many its row sees: as many integer comparisons as there are exponentials, or nearly. Without
    one there are next to none (selections are no sign: conversion to bfloat16 has them too)."""
    if not classes["mfma"] or not classes["transcendental"]:
        return "other"
    compared = sum(number for name, number in opcodes.items() if _INTEGER_COMPARISON.match(name))
    return "masked" if 2 * compared >= classes["transcendental"] else "full"


def innermost_loops(instructions: Sequence[Instruction]) -> list[Loop]:
    """The loops of one kernel that contain no other loop, in address order.

    Args:
      instructions: the kernel's instructions, in address order, its entry first.
    """
    blocks = _basic_blocks(instructions)
    successors = [_successors(blocks, index) for index in range(len(blocks))]
    bodies = _natural_loops(successors)
    loops = []
    for header, body in bodies.items():
        if any(other != header and other in body for other in bodies):
            continue
        members = [inst for index in sorted(body) for inst in blocks[index]]
        loops.append(Loop(tuple(members)))
    return sorted(loops, key=lambda loop: loop.start)


def _is_branch(instruction: Instruction) -> bool:
    return instruction.opcode.startswith(("s_branch", "s_cbranch"))


def _basic_blocks(instructions: Sequence[Instruction]) -> list[list[Instruction]]:
    targets = {inst.branch_target for inst in instructions if _is_branch(inst)}
    blocks: list[list[Instruction]] = [[]]
    for inst in instructions:
        if inst.address in targets and blocks[-1]:
            blocks.append([])
        blocks[-1].append(inst)
        if _is_branch(inst) or inst.opcode == "s_endpgm":
            blocks.append([])
    return [block for block in blocks if block]


def _successors(blocks: Sequence[Sequence[Instruction]], index: int) -> list[int]:
    last = blocks[index][-1]
    following = [index + 1] if index + 1 < len(blocks) else []
    if last.opcode == "s_endpgm":
        return []
    if not _is_branch(last):
        return following
    starts = {block[0].address: position for position, block in enumerate(blocks)}
    target = [starts[last.branch_target]] if last.branch_target in starts else []
    return target if last.opcode == "s_branch" else target + following


def _natural_loops(successors: Sequence[Sequence[int]]) -> dict[int, set[int]]:
    """Header block to member blocks of every loop, found from block 0 (Aho, Sethi, Ullman 10.4).

    The members are what reaches a back edge without passing the header, so that blocks which the
    compiler placed elsewhere are counted, and what merely lies in between is not.
    """
    predecessors: list[list[int]] = [[] for _ in successors]
    for block, following in enumerate(successors):
        for successor in following:
            predecessors[successor].append(block)
    loops: dict[int, set[int]] = {}
    for latch, header in _back_edges(successors):
        body = loops.setdefault(header, {header})
        pending = [latch]
        while pending:
            block = pending.pop()
            if block not in body:
                body.add(block)
                pending.extend(predecessors[block])
    return loops


def _back_edges(successors: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Edges (from, to) of a depth-first walk that lead to a block of the current path."""
    edges: list[tuple[int, int]] = []
    visited: set[int] = set()
    on_path: set[int] = set()
    stack = [(0, iter(successors[0]))] if successors else []
    visited.add(0)
    on_path.add(0)
    while stack:
        block, remaining = stack[-1]
        successor = next(remaining, None)
        if successor is None:
            on_path.discard(block)
            stack.pop()
        elif successor in on_path:
            edges.append((block, successor))
        elif successor not in visited:
            visited.add(successor)
            on_path.add(successor)
            stack.append((successor, iter(successors[successor])))
    return edges
