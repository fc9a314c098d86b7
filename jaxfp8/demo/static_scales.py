# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Static scales for the demo's layer, by the road that a served model takes.

Every rank of a deployment of 2 tensor-parallel ranks and 2 pipeline stages observes its heads and
writes its shard; the second stage has no attention layer. The shards are merged into an artifact,
the artifact is read back from its file and checked against the deployment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import jaxfp8
from jaxfp8 import scales
from jaxfp8.demo import layer as mla

MARGIN = 1.25
"""Headroom over what the calibration saw: the text to come is another one."""

ARTIFACT_NAME = "scales.safetensors"

_TP_SIZE = _PP_SIZE = 2
_LOCAL_HEADS = mla.NUM_HEADS // _TP_SIZE
# The first layer of Kimi-K3 with gated MLA.
_LAYER = 3


def clipped_part(
    values: Sequence[np.ndarray], scales: jaxfp8.LayerScales, fmt: jaxfp8.Fp8Format
) -> float:
    """The part of the values of Q, K and V, each [T, H, D], that static scales clip."""
    clipped = sum(
        np.count_nonzero(np.abs(x.astype(np.float32)) > fmt.max * np.asarray(descale)[:, None])
        for x, descale in zip(values, scales, strict=True)
    )
    return clipped / sum(x.size for x in values)


def calibrated_scales(
    weights: mla.Weights,
    hidden: np.ndarray,
    fmt: jaxfp8.Fp8Format,
    calibration_id: str,
    folder: Path,
) -> jaxfp8.LayerScales:
    """Calibrates, writes shards and artifact into a folder, and loads the scales from there.

    Args:
      weights: the layer's.
      hidden: float32 [T, HIDDEN], what the calibration observes.
      fmt: the FP8 format.
      calibration_id: names what `hidden` was made of.
      folder: made if it is missing; files of the same names are replaced.

    Raises:
      OSError: the folder cannot be written.
    """
    digest = hashlib.sha256(b"".join(np.asarray(weight).tobytes() for weight in weights))
    identity = scales.Identity(
        model="jaxfp8-demo",
        revision=digest.hexdigest()[:40],
        checkpoint_id=f"sha256:{digest.hexdigest()}",
        calibration_id=calibration_id,
        tp_size=_TP_SIZE,
        pp_size=_PP_SIZE,
        fp8_dtype=fmt.name,
        local_heads=_LOCAL_HEADS,
        qk_head_dim=mla.QK_HEAD_DIM,
        v_head_dim=mla.V_HEAD_DIM,
        margin=MARGIN,
    )
    q = mla.queries(weights, hidden)
    k, v = mla.keys_and_values(weights, mla.latents(weights, hidden))
    for pp_rank, layers in enumerate(({_LAYER: f"model.layers.{_LAYER}.self_attn"}, {})):
        for tp_rank in range(_TP_SIZE):
            heads = slice(tp_rank * _LOCAL_HEADS, (tp_rank + 1) * _LOCAL_HEADS)
            with jaxfp8.Calibrator(
                identity, tp_rank=tp_rank, pp_rank=pp_rank, layers=layers, directory=folder
            ) as calibrator:
                calibrator.arm()
                for layer in layers:
                    calibrator.observe(layer, q[:, heads], k[:, heads], v[:, heads])
    scales.merge_folder(folder).save(folder / ARTIFACT_NAME)

    deployment = scales.Deployment(
        model=identity.model,
        revision=identity.revision,
        checkpoint_id=identity.checkpoint_id,
        tp_size=_TP_SIZE,
        pp_size=_PP_SIZE,
        fp8_dtype=fmt.name,
        local_heads=_LOCAL_HEADS,
        qk_head_dim=mla.QK_HEAD_DIM,
        v_head_dim=mla.V_HEAD_DIM,
        layers=(_LAYER,),
    )
    return scales.ScaleArtifact.load(folder / ARTIFACT_NAME, deployment).layer(_LAYER)
