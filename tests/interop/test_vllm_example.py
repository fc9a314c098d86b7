# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The example runs, and its numbers are right."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

EXAMPLE = Path(__file__).parents[2] / "interop" / "examples" / "vllm_context_chunks.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("vllm_context_chunks", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_chunks_cover_every_context_once(example):
    requests = [
        example.Request(torch.empty(0), context, 1) for context in (150, 37, 0, 3, 64, 0, 129)
    ]
    covered = [[] for _ in requests]
    for chunk in example.chunks(requests, 64):
        assert sum(end - first for first, end in chunk) <= 64
        for rows, (first, end) in zip(covered, chunk, strict=True):
            rows.extend(range(first, end))
    assert covered == [list(range(request.context)) for request in requests]


def test_the_loop_is_right(example):
    """FP8 K, V and P over context that was calibrated; 0.06 is what three roundings to 3 bits and
    scales with a margin may come to.
    """
    error = example.run("cpu", 2, [150, 37, 0, 3], [20, 9, 5, 1], 64)
    assert 0.001 < error < 0.06


def test_without_context_it_is_bf16(example):
    assert example.run("cpu", 2, [0, 0], [20, 9], 64) < 0.008
