# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Scales as the checkpoints of other stacks hold them: NAME.q_scale, .k_scale, .v_scale."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from jaxfp8.formats import Fp8Format
from jaxfp8.scales import safetensors_file
from jaxfp8.scales.arguments import require
from jaxfp8.scales.artifact import ScaleArtifact
from jaxfp8.scales.files import write_atomically


def convention_factor(source: Fp8Format, target: Fp8Format) -> float:
    """What a scale is multiplied with when the same FP8 bits are read in another format.

    A value is its bits, read in a format, times the scale. The same bits read as e4m3fn are twice
    the value that they are as e4m3fnuz, so the scale halves on the way there.
    """
    one = np.array([0x38], np.uint8)
    return float(one.view(source.dtype)[0]) / float(one.view(target.dtype)[0])


def export_tensors(
    artifact: ScaleArtifact,
    *,
    convention: Fp8Format | None = None,
    per_tensor: bool = False,
    name_template: str | None = None,
) -> tuple[dict[str, npt.NDArray[np.float32]], dict[str, str]]:
    """Tensors and metadata of a scales file that vLLM and compressed-tensors read.

    vLLM takes the scales of a checkpoint as those of e4m3fn and doubles them on a device that
    computes in e4m3fnuz, so for it the convention is E4M3FN whatever the device. An artifact
    calibrated for e4m3fnuz (maximum 240), exported so and used on an e4m3fn device (maximum 448),
    holds 448/480 of the calibrated range: with a margin of at least 15/14 nothing observed clips.

    Args:
      artifact: the scales.
      convention: the format in which a reader shall multiply the bits; None keeps that of the
        artifact.
      per_tensor: one scale a layer, the largest of its heads, shape [1]; else one a head, [heads],
        in global head order.
      name_template: what each layer is called, with "{layer}" for its index; None takes the
        runtime names of the artifact.

    Returns:
      float32 tensors by name, and metadata that states the convention.

    Raises:
      TypeError: an argument is of another kind.
      ValueError: the artifact has no runtime names and no template is given, or the template
        gives two layers one name.
    """
    require("artifact", artifact, ScaleArtifact, "a ScaleArtifact")
    require("convention", convention, (Fp8Format, type(None)), "an Fp8Format or None")
    require("per_tensor", per_tensor, bool, "True or False")
    require("name_template", name_template, (str, type(None)), "a string or None")
    target = convention or artifact.fmt
    factor = np.float32(convention_factor(artifact.fmt, target))
    tensors = {}
    for row, name in enumerate(_layer_names(artifact, name_template)):
        for column, qkv in enumerate("qkv"):
            scale = artifact.descale[row, column] * factor
            tensors[f"{name}.{qkv}_scale"] = scale.max(keepdims=True) if per_tensor else scale
    identity = artifact.identity
    metadata = {
        "format": "pt",  # Hugging Face readers refuse a file without it
        "scale_convention": target.name,
        "scale_meaning": f"value = {target.name} number * scale",
        "granularity": "tensor" if per_tensor else "head",
        "calibrated_for": artifact.fmt.name,
        "model": identity.model,
        "revision": identity.revision,
        "checkpoint_id": identity.checkpoint_id,
        "calibration_id": identity.calibration_id,
        "source_content_sha256": artifact.content_sha256,
    }
    return tensors, metadata


def export(
    artifact: ScaleArtifact,
    path: str | os.PathLike[str],
    *,
    convention: Fp8Format | None = None,
    per_tensor: bool = False,
    name_template: str | None = None,
) -> None:
    """Writes what `export_tensors` makes, atomically and durably.

    Raises:
      TypeError, ValueError: as export_tensors.
      OSError: it could not be written; what was there is unchanged.
    """
    tensors, metadata = export_tensors(
        artifact, convention=convention, per_tensor=per_tensor, name_template=name_template
    )
    write_atomically(path, safetensors_file.serialize(tensors, metadata))


def _layer_names(artifact: ScaleArtifact, template: str | None) -> list[str]:
    if template is None:
        if artifact.runtime_names is None:
            raise ValueError(
                "name_template: the artifact has no runtime names; give one such as "
                "'model.layers.{layer}.self_attn'"
            )
        return list(artifact.runtime_names)
    if "{layer}" not in template:
        raise ValueError(f"name_template: expected '{{layer}}' in it, got {template!r}")
    return [template.replace("{layer}", str(index)) for index in artifact.layers]
