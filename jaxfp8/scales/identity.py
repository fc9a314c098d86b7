# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""What scales belong to: the identity of a calibration, and the deployment that would use it."""

from __future__ import annotations

import dataclasses

from jaxfp8.formats import FORMATS, Fp8Format
from jaxfp8.scales.arguments import plain
from jaxfp8.scales.fields import BF16_LATENT_CACHE, problems_in


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """What a calibration was made of and for. All ranks of a calibration share it.

    Attributes:
      model: the model's name, as the deployment calls it.
      revision: the commit of the checkpoint, 7 to 64 hex digits. Compared as it is written: an
        abbreviated commit is not the full one.
      checkpoint_id: a digest of the checkpoint (see `checkpoint_id`).
      calibration_id: names the data that the maxima were observed on.
      tp_size: number of tensor-parallel ranks.
      pp_size: number of pipeline stages.
      fp8_dtype: "float8_e4m3fnuz" or "float8_e4m3fn".
      local_heads: attention heads of one rank.
      qk_head_dim: head dim of Q and K.
      v_head_dim: head dim of V.
      margin: factor >= 1 between the largest value observed and the largest that FP8 shall hold.
      cache_mode: what the K/V cache holds.

    Raises:
      ValueError: a value that its field cannot hold; all of them are named.
    """

    model: str
    revision: str
    checkpoint_id: str
    calibration_id: str
    tp_size: int
    pp_size: int
    fp8_dtype: str
    local_heads: int
    qk_head_dim: int
    v_head_dim: int
    margin: float
    cache_mode: str = BF16_LATENT_CACHE

    def __post_init__(self) -> None:
        _require_valid(self)
        object.__setattr__(self, "margin", float(self.margin))

    @property
    def fmt(self) -> Fp8Format:
        """The FP8 format."""
        return FORMATS[self.fp8_dtype]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deployment:
    """What a running model is, to be compared with what an artifact says it was made for.

    Attributes:
      model, revision, checkpoint_id, tp_size, pp_size, fp8_dtype, local_heads, qk_head_dim,
        v_head_dim, cache_mode: as in Identity; here, of the model that is being served.
      layers: 0-based indices of all attention layers of the model that take scales, those of
        every pipeline stage. Any iterable of distinct integers; kept as an ascending tuple.

    Raises:
      ValueError: a value that its field cannot hold; all of them are named.
    """

    model: str
    revision: str
    checkpoint_id: str
    tp_size: int
    pp_size: int
    fp8_dtype: str
    local_heads: int
    qk_head_dim: int
    v_head_dim: int
    layers: tuple[int, ...]
    cache_mode: str = BF16_LATENT_CACHE

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "layers", tuple(sorted(map(plain, self.layers))))
        except (TypeError, ValueError):
            raise TypeError(
                f"layers: expected layer indices, got {type(self.layers).__name__}"
            ) from None
        _require_valid(self)


def values_of(record: Identity | Deployment) -> dict[str, object]:
    """The fields of a record by name."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _require_valid(record: Identity | Deployment) -> None:
    for name, value in values_of(record).items():
        object.__setattr__(record, name, plain(value))
    problems = problems_in(values_of(record))
    if problems:
        raise ValueError("; ".join(problems))
