# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxfp8`."""

import sys

from jaxfp8.cli import main

if __name__ == "__main__":
    sys.exit(main())
