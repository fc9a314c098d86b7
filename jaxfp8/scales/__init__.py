# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Static scales: shards of a calibration, the artifact they merge into, and what it fits.

Needs NumPy alone; imports no JAX. `LayerScales` is nevertheless a JAX pytree.
"""

from jaxfp8.scales.artifact import ScaleArtifact
from jaxfp8.scales.checkpoint import checkpoint_id, snapshot_revision
from jaxfp8.scales.difference import ArtifactDifference, LayerDifference, diff
from jaxfp8.scales.errors import ScaleArtifactError
from jaxfp8.scales.exporting import convention_factor, export, export_tensors
from jaxfp8.scales.fields import BF16_LATENT_CACHE
from jaxfp8.scales.identity import Deployment, Identity
from jaxfp8.scales.layer_scales import LayerScales
from jaxfp8.scales.merge import merge_folder, merge_shards
from jaxfp8.scales.retargeting import retarget
from jaxfp8.scales.shard import LayerAmax, RankShard

__all__ = [
    "BF16_LATENT_CACHE",
    "ArtifactDifference",
    "Deployment",
    "Identity",
    "LayerAmax",
    "LayerDifference",
    "LayerScales",
    "RankShard",
    "ScaleArtifact",
    "ScaleArtifactError",
    "checkpoint_id",
    "convention_factor",
    "diff",
    "export",
    "export_tensors",
    "merge_folder",
    "merge_shards",
    "retarget",
    "snapshot_revision",
]
