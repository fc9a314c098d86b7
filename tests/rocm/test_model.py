# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gfx942_model.py, run as its users do: it defines flags, so in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.rocm.tools import needs_rocm_compiler

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "benchmarks" / "gfx942_model.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAM), *arguments],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    file = tmp_path_factory.mktemp("model") / "model.jsonl"
    result = run("--cases=mid,4k", "--precisions=fp8", f"--json={file}")
    assert result.returncode == 0, result.stderr
    assert "model of an MI300X" in result.stdout and "not measured" in result.stdout
    return [json.loads(line) for line in file.read_text().splitlines()]


@needs_rocm_compiler
def test_the_model_keeps_its_own_bounds(results):
    assert [result["case"] for result in results] == ["mid", "4k"]
    for result in results:
        assert result["what"] == "model" and "model" in result["device"]
        for bound in ("mfma_bound_ms", "l2_bound_ms", "memory_bound_ms", "merge_ms"):
            assert 0 <= result[bound] < result["model_ms"]
        assert 0 < result["fraction_of_mfma_bound"] < 1


@needs_rocm_compiler
def test_the_mid_shape(results):
    """12 heads, 4096 x 65536: 2.06 TFLOP, at 304 CUs x 4 SIMDs x 1024 FLOP a clock and 2.1 GHz."""
    mid = results[0]
    flops = 2 * 12 * 4096 * 65536 * (192 + 128)
    assert mid["mfma_bound_ms"] == pytest.approx(1e3 * flops / (304 * 4 * 1024 * 2.1e9), rel=1e-3)
    assert mid["model_tflops"] == pytest.approx(flops / mid["model_ms"] / 1e9, rel=1e-6)
    assert mid["fraction_of_mfma_bound"] > 0.8


def test_mistakes():
    result = run("--cases=large")
    assert result.returncode != 0
    assert "large: expected mid, mid_causal, 4k" in result.stderr + result.stdout
