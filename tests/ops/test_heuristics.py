# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The table of configurations, and the file that overrides it."""

from __future__ import annotations

import json

import pytest

from jaxfp8.ops.attention import heuristics
from jaxfp8.ops.attention.heuristics import KernelConfig, default_config


@pytest.fixture
def tuned_file(tmp_path, monkeypatch):
    monkeypatch.setattr(heuristics, "TUNED_FILE", tmp_path / "tuned.json")
    heuristics._tuned.cache_clear()
    yield tmp_path / "tuned.json"
    heuristics._tuned.cache_clear()


def test_the_table(tuned_file):
    for head_dim in (192, 128):
        assert default_config("gfx942", "fp8", head_dim).permute_keys
        assert default_config("gfx942", "bf16", head_dim).block_k == 32
    assert default_config("cpu", "fp8") == KernelConfig()


def test_a_tuned_file_overrides_it(tuned_file):
    tuned = KernelConfig(block_k=128, num_warps=8, splits=2)
    tuned_file.write_text(heuristics.configs_to_json({"gfx942/fp8/192": tuned}))
    assert default_config("gfx942", "fp8", 192) == tuned
    assert default_config("gfx942", "fp8", 128) != tuned
    assert default_config("gfx942", "bf16", 192) != tuned


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "expected JSON"),
        ("[]", "expected an object, got list"),
        ({"gfx942/fp8/192": 3}, "gfx942/fp8/192: expected an object, got int"),
        ({"a/fp8/192": {"warps": 4}}, "unknown field 'warps'"),
        ({"a/fp8/192": {"block_k": 48}}, "block_k: expected an integer of at least 1 that is a"),
        ({"a/fp8/192": {"num_stages": True}}, "num_stages: expected an integer"),
        ({"a/fp8/192": {"splits": 0}}, "splits: expected an integer of at least 1, or null"),
        ({"a/fp8/192": {"permute_keys": 1}}, "permute_keys: expected true or false, got 1"),
        ({"a/fp8/192": {"permute_keys": True, "block_k": 8}}, "multiple of 16"),
    ],
)
def test_an_unsound_file_is_refused(tuned_file, content, message):
    tuned_file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=message) as raised:
        default_config("gfx942", "fp8")
    assert str(tuned_file) in str(raised.value)
