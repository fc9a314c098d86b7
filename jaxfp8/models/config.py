# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The dimensions of a gated MLA layer."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

_SIZES = (
    "hidden_size",
    "num_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "max_position_embeddings",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlaConfig:
    """Multi-head latent attention (MLA) as Kimi-K3 and DeepSeek-V3 have it.

    Hashable: it is a static argument of what is compiled.

    Attributes:
      hidden_size: width of the hidden states.
      num_heads: attention heads of the whole model, those of all tensor-parallel ranks.
      q_lora_rank: width of the latent that queries are projected from.
      kv_lora_rank: width of the latent that keys and values are projected from.
      qk_nope_head_dim: columns of Q and K that a head has for itself.
      qk_rope_head_dim: columns of K that all heads share, and those of Q that meet them; even.
      v_head_dim: columns of V.
      rms_norm_eps: added to the mean square in RMSNorm.
      max_position_embeddings: the longest sequence that the model is made for. Not enforced: a pass
        that goes past it is the caller's to refuse.
      rope_theta: base of the rotary embedding of the shared columns; None leaves them unrotated
        (NoPE), which is what Kimi-K3 does.
      output_gate: whether the attention output is multiplied by sigmoid(g_proj(hidden)).

    Raises:
      ValueError: a value that makes no sense; all of them are named.
    """

    hidden_size: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float | None = None
    output_gate: bool = True

    def __post_init__(self) -> None:
        problems = [
            f"{name}: expected an integer >= 1, got {getattr(self, name)!r}"
            for name in _SIZES
            if type(getattr(self, name)) is not int or getattr(self, name) < 1
        ]
        if not problems and self.qk_rope_head_dim % 2:
            problems.append(
                f"qk_rope_head_dim: expected an even number, got {self.qk_rope_head_dim}"
            )
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if name == "rope_theta" and value is None:
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not (math.isfinite(value) and value > 0):
                problems.append(f"{name}: expected a finite number > 0, got {value!r}")
        if not isinstance(self.output_gate, bool):
            problems.append(f"output_gate: expected True or False, got {self.output_gate!r}")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def qk_head_dim(self) -> int:
        """Columns of Q and K: the head's own, then the shared ones."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """What multiplies the scores: qk_head_dim ** -0.5."""
        return float(self.qk_head_dim**-0.5)

    @property
    def latent_dim(self) -> int:
        """Columns of the cache: the latent of keys and values, then the shared columns of K."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def local_heads(self, tp_size: int) -> int:
        """Heads of one of tp_size tensor-parallel ranks.

        Raises:
          ValueError: tp_size is not a number of ranks that divides the heads.
        """
        number = isinstance(tp_size, int | np.integer) and not isinstance(tp_size, bool)
        if not number or tp_size < 1:
            raise ValueError(f"tp_size: expected an integer >= 1, got {tp_size!r}")
        if self.num_heads % tp_size:
            raise ValueError(
                f"tp_size: expected a divisor of the {self.num_heads} heads (num_heads), got "
                f"{tp_size}"
            )
        return int(self.num_heads // tp_size)


KIMI_K3 = MlaConfig(
    hidden_size=7168,
    num_heads=96,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    rms_norm_eps=1e-5,
    max_position_embeddings=1_048_576,
)
"""The MLA layers of Kimi-K3."""

KIMI_K3_MLA_LAYERS = (*range(3, 92, 4), 92)
"""0-based indices of the 24 layers of Kimi-K3's 93 that are MLA: 3, 7, ..., 91, 92."""

SMALL = dataclasses.replace(
    KIMI_K3, hidden_size=256, num_heads=8, q_lora_rank=128, kv_lora_rank=128
)
"""The same with head dims as they are, and everything around them small: for tests."""
