# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The scale artifact, its descales as torch tensors."""

from __future__ import annotations

import os
import threading

import torch

from jaxfp8 import LayerScales
from jaxfp8 import scales as _scales
from jaxfp8.scales import Deployment
from jaxfp8.scales.arguments import integer


class ScaleArtifact:
    """The calibrated descales of a model, from the file that jaxfp8 reads too.

    Attributes:
      artifact: the `jaxfp8.scales.ScaleArtifact`, with identity, layers, and all else.
      device: where the tensors are.
    """

    def __init__(
        self, artifact: _scales.ScaleArtifact, *, device: torch.device | str | None = None
    ) -> None:
        """Wraps an artifact.

        Args:
          artifact: from jaxfp8.
          device: where the tensors go; None is torch's default device.

        Raises:
          TypeError: artifact is of another kind.
        """
        if not isinstance(artifact, _scales.ScaleArtifact):
            raise TypeError(
                f"artifact: expected a jaxfp8.scales.ScaleArtifact, got {type(artifact).__name__}"
            )
        self.artifact = artifact
        self.device = torch.get_default_device() if device is None else torch.device(device)
        self._lock = threading.Lock()
        self._layers: dict[tuple[int, int | None], LayerScales] = {}

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        deployment: Deployment,
        *,
        device: torch.device | str | None = None,
    ) -> ScaleArtifact:
        """Reads an artifact for a deployment.

        Raises:
          ScaleArtifactError: it cannot be read, is not sound, or does not fit; all problems are
            listed.
        """
        return cls(_scales.ScaleArtifact.load(path, deployment), device=device)

    def layer(self, index: int, *, tp_rank: int | None = None) -> LayerScales:
        """The descales of one layer: float32 tensors [H], copied to the device once.

        Args:
          index: the model's 0-based layer index.
          tp_rank: the rank whose local_heads heads are wanted; None gives all heads of the model.

        Raises:
          TypeError: an argument is not an integer.
          ValueError: there is no such layer or rank.
        """
        index = integer("index", index)
        tp_rank = None if tp_rank is None else integer("tp_rank", tp_rank)
        key = (index, tp_rank)
        with self._lock:
            if key not in self._layers:
                arrays = self.artifact.layer(index, tp_rank=tp_rank)
                self._layers[key] = LayerScales(
                    *(torch.tensor(x, dtype=torch.float32, device=self.device) for x in arrays)
                )
            return self._layers[key]
