# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The same scales for another topology."""

from __future__ import annotations

import dataclasses

from jaxfp8.scales.arguments import plain, require
from jaxfp8.scales.artifact import ScaleArtifact


def retarget(artifact: ScaleArtifact, *, tp_size: int, pp_size: int | None = None) -> ScaleArtifact:
    """The same scales for another number of ranks.

    Scales belong to heads, and a head's values do not depend on which rank computes it, so the
    numbers stand; the artifact records the topology that it was calibrated on.

    Args:
      artifact: the scales.
      tp_size: the tensor-parallel size to serve with; it must divide the heads of the model.
      pp_size: the number of pipeline stages to serve with; None keeps it.

    Raises:
      TypeError: artifact is not a ScaleArtifact.
      ValueError: tp_size does not divide the heads, or a size is not a count.
    """
    require("artifact", artifact, ScaleArtifact, "a ScaleArtifact")
    old = artifact.identity
    tp_size = plain(tp_size)
    if type(tp_size) is not int or tp_size < 1 or artifact.num_heads % tp_size:
        raise ValueError(
            f"tp_size: expected a divisor of the {artifact.num_heads} heads of the model, got "
            f"{tp_size}"
        )
    identity = dataclasses.replace(
        old,
        tp_size=tp_size,
        pp_size=old.pp_size if pp_size is None else pp_size,
        local_heads=artifact.num_heads // tp_size,
    )
    calibrated_on: tuple[int | None, int | None] = (
        artifact.calibration_tp_size or old.tp_size,
        artifact.calibration_pp_size or old.pp_size,
    )
    if calibrated_on == (identity.tp_size, identity.pp_size):
        calibrated_on = (None, None)  # back where it came from
    return dataclasses.replace(
        artifact,
        identity=identity,
        calibration_tp_size=calibrated_on[0],
        calibration_pp_size=calibrated_on[1],
    )
