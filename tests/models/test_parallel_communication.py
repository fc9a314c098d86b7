# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""What devices send each other in a pass, read from the programs."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from jaxfp8.models import KIMI_K3, parallel
from jaxfp8.models.arguments import check_options
from jaxfp8.models.parallel import Communication, communication_bytes
from jaxfp8.models.sharding import MlaSharding
from tests.models.sharded_case import (
    CAPACITY,
    CONFIG,
    SEGMENT,
    TOKENS,
    make_case,
    mesh_of,
    placed,
)  # fmt: skip

# A line of HLO: the result's types, and what communicates.
COLLECTIVE = re.compile(
    r" = (?P<types>.*?) (?P<operation>(all|collective|ragged|reduce-scatter|send|recv)[a-z-]*)\("
)
ARRAY = re.compile(r"(?P<dtype>f32|bf16|s32|pred)\[(?P<dims>[\d,]*)\]")
BYTES = {"f32": 4, "bf16": 2, "s32": 4, "pred": 1}


def lowered(sharding: MlaSharding) -> Any:
    parts = sharding.cp_size
    case = make_case([[1, 2, 3]] * parts, [4, 5, 6], 0)
    weights, cache = placed(case, sharding)
    return parallel._prefill_layer_sharded.lower(
        sharding, CONFIG, weights, case.hidden, cache,
        parallel._check_batch(case.batch, parts, TOKENS, CAPACITY), None,
        options=check_options(SEGMENT, "bf16", "bf16", None, None),
    )  # fmt: skip


def collectives(lines: list[str]) -> list[tuple[str, int]]:
    """Operation and bytes of its result, of everything in some HLO that communicates."""
    found = []
    for line in lines:
        if match := COLLECTIVE.search(line):
            arrays = ARRAY.finditer(match["types"])
            size = sum(
                BYTES[x["dtype"]] * math.prod(map(int, filter(None, x["dims"].split(","))))
                for x in arrays
            )
            found.append((match["operation"], size))
    return found


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (4, 1), (1, 8), (2, 4)])
def test_bytes_are_those_of_the_formula(tp, cp):
    sharding = MlaSharding(mesh_of(tp, cp))
    expected = communication_bytes(CONFIG, sharding, TOKENS)
    assert (expected.cp > 0, expected.tp > 0) == (cp > 1, tp > 1)
    found = collectives(lowered(sharding).as_text("hlo").splitlines())
    assert {operation for operation, _ in found} <= {"all-reduce"}
    assert sum(size for _, size in found) == sum(expected)


def test_compiled_there_is_nothing_else_and_nothing_a_segment():
    """Three all-reduces (a maximum, two sums) in the entry computation, so that each is done once;
    none in what it calls: the loop over segments, the branch of the part that takes new tokens.
    """
    sharding = MlaSharding(mesh_of(2, 4))
    lines = lowered(sharding).compile().as_text().splitlines()
    (entry,) = (i for i, line in enumerate(lines) if line.startswith("ENTRY "))
    end = entry + lines[entry:].index("}")
    inside, outside = lines[entry:end], lines[:entry] + lines[end:]
    assert any(" while(" in line for line in inside)
    assert any(" conditional(" in line for line in inside)
    assert collectives(outside) == []
    heads, rows = CONFIG.num_heads // 2, TOKENS
    assert sorted(collectives(inside)) == sorted(
        [
            ("all-reduce", heads * rows * 4),
            ("all-reduce", heads * rows * 4 * (1 + CONFIG.v_head_dim)),
            ("all-reduce", rows * CONFIG.hidden_size * 4),
        ]
    )
    assert sum(communication_bytes(CONFIG, sharding, TOKENS)) == sum(
        size for _, size in collectives(inside)
    )


def test_figures_of_the_documentation():
    """Kimi-K3 at TP8: from abstract devices, of which there are more than here."""
    sharding = MlaSharding(mesh_of(4, 2))
    found = communication_bytes(KIMI_K3, sharding, 2048)
    # Twice the heads and half the tokens of eight ranks and 4096.
    assert found == Communication(cp=25_559_040, tp=58_720_256)
    assert 2 * found.tp == 117_440_512
