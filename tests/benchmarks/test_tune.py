# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""benchmarks/tune.py without a GPU. Apart from the other programs: it wants all optimizations."""

from __future__ import annotations

from tests.benchmarks.programs import run
from tests.rocm.tools import needs_rocm_compiler


@needs_rocm_compiler
def test_tune_ranks_bf16_by_its_code(tmp_path):
    result = run("tune", "--model", "--precision=bf16", "--limit=2", json_file=tmp_path / "t.jsonl")
    assert result.status == 0, result.stderr
    own, other = result.lines
    assert own["case"] == "own" and own["block_k"] == 32 and own["dtype"] == "bf16"
    assert other["what"] == "candidate of the model" and "not run" in other["device"]
    assert own["cost"] > 0 and own["waves"] == 2 and own["vector/mfma"] < 0.8
    assert own["median_ms"] is None  # it measures nothing
    assert result.stdout.splitlines()[-2].startswith("block_q=")


def test_tune_writes_only_what_was_measured():
    result = run("tune", "--model", "--write")
    assert result.status == 2 and "--model measures nothing" in result.stderr
