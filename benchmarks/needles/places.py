# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Where needles lie."""

from __future__ import annotations

from collections.abc import Sequence


def places(context: int, depths: Sequence[int]) -> list[int]:
    """Which token of a context a needle is, for depths in percent of it."""
    return [min(context - 1, context * depth // 100) for depth in depths]
