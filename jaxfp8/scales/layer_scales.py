# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The scales of one attention layer, as the attention functions take them."""

from __future__ import annotations

from typing import Any, NamedTuple


class LayerScales(NamedTuple):
    """Per-head descales of one attention layer: a value is its stored FP8 number times its descale.

    A NamedTuple, so JAX treats it as a pytree: it passes through jit, scan and shard_map.

    Attributes:
      q: float32 [H], descales of the queries.
      k: float32 [H], descales of the keys.
      v: float32 [H], descales of the values.

    Example:
      >>> import numpy as np, jaxfp8
      >>> scales = jaxfp8.LayerScales(*np.full((3, 12), 0.02, np.float32))
      >>> scales.k.shape
      (12,)
    """

    q: Any
    k: Any
    v: Any
