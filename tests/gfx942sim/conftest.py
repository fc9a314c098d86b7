# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the simulator's own tests."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gfx942sim.assembly import SnippetRunner


@pytest.fixture
def run() -> SnippetRunner:
    return SnippetRunner()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
