# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""These tests take as long as their programs take to compile, which are run once or twice each."""

import jax
import pytest


@pytest.fixture(scope="package", autouse=True)
def compile_quickly():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
