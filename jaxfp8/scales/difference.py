# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""How far the scales of two calibrations lie apart."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxfp8.scales.arguments import require
from jaxfp8.scales.artifact import ScaleArtifact
from jaxfp8.scales.errors import shown
from jaxfp8.scales.identity import values_of


@dataclasses.dataclass(frozen=True)
class LayerDifference:
    """The largest change in one layer.

    Attributes:
      layer: its index.
      q, k, v: the ratio b / a that lies farthest from 1, up or down, of all heads.
      q_head, k_head, v_head: the head, in global order, that it is of.
    """

    layer: int
    q: float
    k: float
    v: float
    q_head: int
    k_head: int
    v_head: int

    @property
    def largest(self) -> float:
        """The largest of the three changes as a factor >= 1, whichever its direction."""
        return max(max(ratio, 1 / ratio) for ratio in (self.q, self.k, self.v))


@dataclasses.dataclass(frozen=True)
class ArtifactDifference:
    """What differs between artifacts a and b.

    Attributes:
      fields: one line for each field of the identity that differs.
      only_a, only_b: layers that one of them alone has.
      layers: the change in each layer that both have. Compared is the largest value that FP8
        holds, descale * maximum of the format, so that formats can differ.
    """

    fields: tuple[str, ...]
    only_a: tuple[int, ...]
    only_b: tuple[int, ...]
    layers: tuple[LayerDifference, ...]

    @property
    def largest(self) -> float:
        """The largest change of any layer as a factor >= 1; 1 where no layer is shared."""
        return max((layer.largest for layer in self.layers), default=1.0)


def diff(a: ScaleArtifact, b: ScaleArtifact) -> ArtifactDifference:
    """Compares two artifacts of models with the same number of heads.

    Raises:
      TypeError: they are not ScaleArtifacts.
      ValueError: their numbers of heads differ, so that no head is the other's.
    """
    require("a", a, ScaleArtifact, "a ScaleArtifact")
    require("b", b, ScaleArtifact, "a ScaleArtifact")
    if a.num_heads != b.num_heads:
        raise ValueError(f"heads: expected as many in both, got {a.num_heads} and {b.num_heads}")
    values_a, values_b = values_of(a.identity), values_of(b.identity)
    fields = tuple(
        f"{name}: {shown(value)} and {shown(values_b[name])}"
        for name, value in values_a.items()
        if value != values_b[name]
    )
    layers = []
    for row, index in enumerate(a.layers):
        if index not in b.layers:
            continue
        # In float64: a ratio of float32 numbers can pass the range of float32.
        range_a = a.descale[row].astype(np.float64) * a.fmt.max
        range_b = b.descale[b.layers.index(index)].astype(np.float64) * b.fmt.max
        ratios = range_b / range_a
        heads = np.abs(np.log(ratios)).argmax(axis=1)
        worst = ratios[np.arange(3), heads]
        layers.append(LayerDifference(index, *worst.tolist(), *heads.tolist()))
    return ArtifactDifference(
        fields=fields,
        only_a=tuple(index for index in a.layers if index not in b.layers),
        only_b=tuple(index for index in b.layers if index not in a.layers),
        layers=tuple(layers),
    )
