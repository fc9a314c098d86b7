# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Where the processes of a test run share what they compile."""

from __future__ import annotations

import os

import pytest

from tests.rocm import shared


@pytest.fixture(autouse=True, scope="session")
def folder_of_the_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    own = tmp_path_factory.getbasetemp()
    # With pytest-xdist each process has a folder within the run's.
    shared.use(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)
