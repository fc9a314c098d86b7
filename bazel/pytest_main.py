# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The main program of a pytest_test target: pytest on the files named in its arguments."""

import sys

import pytest

if __name__ == "__main__":
    status = pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]])
    # A file whose tests are all left out by `-m` has passed.
    sys.exit(0 if status == pytest.ExitCode.NO_TESTS_COLLECTED and "-m" in sys.argv else status)
