# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Differentiation is refused, with a sentence instead of a wrong or missing gradient."""

from __future__ import annotations

from typing import Any, NoReturn

import jax


@jax.custom_jvp
def inference_only(tree: Any) -> Any:
    """Its argument, unchanged; differentiating through it raises NotImplementedError."""
    return tree


@inference_only.defjvp
def _refuse(primals: Any, tangents: Any) -> NoReturn:
    raise NotImplementedError(
        "jaxfp8 is for inference: its attention and quantizers cannot be differentiated. Wrap the "
        "call's inputs in jax.lax.stop_gradient to treat its result as a constant."
    )
