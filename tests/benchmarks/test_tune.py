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


def test_tune_looks_at_the_table_before_it_runs(tmp_path):
    table = tmp_path / "tuned.json"
    table.write_text('{"gfx942/fp8/192": {"block": 1}}')
    for arguments, message in (
        ((f"--output={table}",), "--output: expected --write beside it"),
        (("--write", f"--output={table}"), f"--output: {table}: gfx942/fp8/192: unknown field"),
        (("--write", f"--output={tmp_path}/no/t.json"), "there is no folder"),
        (("--write", "--output="), "expected the path of a file"),
    ):
        result = run("tune", *arguments)
        assert result.status == 2 and message in result.stderr
        assert result.stderr.count("\n") == 1


def test_tune_writes_only_what_was_measured():
    result = run("tune", "--model", "--write")
    assert result.status == 2 and "--model measures nothing" in result.stderr
