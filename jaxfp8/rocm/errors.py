# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The error of a machine that lacks something the compilation for gfx942 needs."""


class MissingToolError(RuntimeError):
    """A tool or package is missing or does not fit; the message says which and how to get it."""
