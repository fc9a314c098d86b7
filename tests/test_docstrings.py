# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The examples in docstrings run and print what they say."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Iterator

import jax
import pytest

MODULES = (
    "jaxfp8.calibration",
    "jaxfp8.head_slice",
    "jaxfp8.policy",
    "jaxfp8.prefill",
    "jaxfp8.quantize",
    "jaxfp8.scales.artifact",
    "jaxfp8.scales.layer_scales",
    "jaxfp8.segments",
    "jaxfp8.states",
    "jaxfp8.targets",
)

# What a newcomer calls; each has an example.
SHOWN = {
    "jaxfp8.calibration.Calibrator",
    "jaxfp8.head_slice.HeadSlice",
    "jaxfp8.policy.PrefillPolicy",
    "jaxfp8.prefill.attend",
    "jaxfp8.prefill.prefill_attention",
    "jaxfp8.prefill.quantize_context",
    "jaxfp8.quantize.descale_from_amax",
    "jaxfp8.quantize.dynamic_quantize_per_head",
    "jaxfp8.quantize.per_head_amax",
    "jaxfp8.quantize.quantize_per_head",
    "jaxfp8.scales.artifact.ScaleArtifact",
    "jaxfp8.scales.layer_scales.LayerScales",
    "jaxfp8.segments.attend_new_tokens",
    "jaxfp8.segments.attend_segment",
    "jaxfp8.segments.start_prefill",
    "jaxfp8.states.merge_states",
    "jaxfp8.targets.detect_target",
}


def examples_of(module: str) -> list[doctest.DocTest]:
    found = doctest.DocTestFinder().find(importlib.import_module(module))
    return [test for test in found if test.examples]


@pytest.fixture
def compiled_fast() -> Iterator[None]:
    """The examples are a few numbers each: compiling them is what takes time."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.usefixtures("compiled_fast")
@pytest.mark.parametrize("module", MODULES)
def test_examples(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tests = examples_of(module)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    for test in tests:
        runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)


def test_the_main_functions_have_examples():
    have = {test.name for module in MODULES for test in examples_of(module)}
    assert have >= SHOWN
