# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""What an attention backend is, and what passes between it and the public functions.

A backend owns its layouts: `pack_query` and `pack_context` turn token-major arrays into
whatever its kernel wants, `attend` runs the kernel on what they returned. The public functions
(jaxfp8/prefill.py) have checked shapes, dtypes and values before a backend is called, and they
alone choose the backend (jaxfp8/ops/attention/registry.py).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Protocol

import jax

from jaxfp8.formats import Fp8Format
from jaxfp8.head_slice import HeadSlice
from jaxfp8.ops.quantize.assembled_key import AssembledKey
from jaxfp8.states import AttentionState
from jaxfp8.targets import Target

Precision = Literal["fp8", "bf16"]


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """The static part of a request; hashable, so that it can be a static argument of jax.jit.

    Attributes:
      precision: "fp8" (Q, K, V and P in `fmt`) or "bf16".
      fmt: the FP8 format; None for "bf16".
      num_heads: H.
      qk_head_dim: Dqk, the head dim of Q and K.
      v_head_dim: Dv, the head dim of V and of the output; None where a query is packed alone.
    """

    precision: Precision
    fmt: Fp8Format | None
    num_heads: int
    qk_head_dim: int
    v_head_dim: int | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedQuery:
    """Queries in the layout of one backend. Opaque: make it with `quantize_query`.

    Attributes:
      data: the backend's arrays.
      cu_seqlens: int32 [B + 1], made sound (starts at 0, does not decrease, ends within Tq).
      descale: float32 [H]; ones for "bf16".
      backend: name of the backend that packed it and alone can read it.
      spec: what was asked for.
      num_tokens: Tq, the capacity of the array that was packed.
    """

    data: Any
    cu_seqlens: jax.Array
    descale: jax.Array
    backend: str = dataclasses.field(metadata={"static": True})
    spec: AttentionSpec = dataclasses.field(metadata={"static": True})
    num_tokens: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedContext:
    """Keys and values in the layout of one backend. Opaque: make it with `quantize_context`.

    Attributes:
      data: the backend's arrays.
      cu_seqlens: int32 [B + 1], made sound (starts at 0, does not decrease, ends within Tk).
      k_descale: float32 [H]; ones for "bf16".
      v_descale: float32 [H]; ones for "bf16".
      backend: name of the backend that packed it and alone can read it.
      spec: what was asked for.
      num_tokens: Tk, the capacity of the arrays that were packed.
    """

    data: Any
    cu_seqlens: jax.Array
    k_descale: jax.Array
    v_descale: jax.Array
    backend: str = dataclasses.field(metadata={"static": True})
    spec: AttentionSpec = dataclasses.field(metadata={"static": True})
    num_tokens: int = dataclasses.field(metadata={"static": True})


class AttentionBackend(Protocol):
    """One way to compute attention.

    All array methods are traceable and are called under jit. Their arguments are sound:
    cu_seqlens start at 0, do not decrease and end within the arrays.
    """

    name: str

    def unsupported(self, spec: AttentionSpec, target: Target) -> str | None:
        """Why this backend cannot serve the request on this target; None if it can.

        The text is shown to the user after "backend NAME: ", so it says what is missing and what
        to do. It must not start a JAX backend of its own or compile anything.
        """
        ...

    def amax(self, x: jax.Array | HeadSlice | AssembledKey, num_tokens: jax.Array) -> jax.Array:
        """float32 [H]: largest finite |x| of each head over the first `num_tokens` rows, else 0.

        Args:
          x: bfloat16 [T, H, D].
          num_tokens: int32 []; the rows past it are not read, or are read and ignored.
        """
        ...

    def pack_query(
        self,
        q: jax.Array | HeadSlice,
        cu_seqlens: jax.Array,
        descale: jax.Array,
        spec: AttentionSpec,
    ) -> Any:
        """The `data` of a QuantizedQuery.

        Args:
          q: [Tq, H, Dqk] bfloat16, or already in spec.fmt, which is then copied bit for bit.
            Rows past cu_seqlens[-1] may hold anything.
          cu_seqlens: int32 [B + 1].
          descale: float32 [H]; stored value = round(clip(q / descale, -max, max)). Not applied
            for "bf16" and for q that is already FP8.
        """
        ...

    def pack_context(
        self,
        k: jax.Array | HeadSlice | AssembledKey,
        v: jax.Array | HeadSlice,
        cu_seqlens: jax.Array,
        k_descale: jax.Array,
        v_descale: jax.Array,
        spec: AttentionSpec,
    ) -> Any:
        """The `data` of a QuantizedContext: k [Tk, H, Dqk], v [Tk, H, Dv], else as pack_query."""
        ...

    def attend(
        self,
        query: QuantizedQuery,
        context: QuantizedContext,
        *,
        causal: bool,
        softmax_scale: float,
    ) -> AttentionState:
        """Varlen attention, causal aligned bottom right.

        Every row of out [query.num_tokens, H, Dv] and lse [H, query.num_tokens] is written; rows
        of no sequence, and rows that see no key, with zeros and -inf.
        """
        ...
