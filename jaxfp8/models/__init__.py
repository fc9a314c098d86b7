# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Gated multi-head latent attention (Kimi-K3, DeepSeek-V3) in plain JAX, on top of jaxfp8.

Pytrees of arrays and pure functions, to be copied into a model or used as they are. `import jaxfp8`
does not import this package.
"""

from jaxfp8.models.batch import PrefillBatch as PrefillBatch
from jaxfp8.models.calibration import calibrate_layer as calibrate_layer
from jaxfp8.models.checkpoint import CheckpointError as CheckpointError
from jaxfp8.models.checkpoint import load_layers as load_layers
from jaxfp8.models.config import KIMI_K3 as KIMI_K3
from jaxfp8.models.config import KIMI_K3_MLA_LAYERS as KIMI_K3_MLA_LAYERS
from jaxfp8.models.config import SMALL as SMALL
from jaxfp8.models.config import MlaConfig as MlaConfig
from jaxfp8.models.mla import attend_latents as attend_latents
from jaxfp8.models.mla import gated_output as gated_output
from jaxfp8.models.mla import latents as latents
from jaxfp8.models.mla import queries as queries
from jaxfp8.models.mla import rms_norm as rms_norm
from jaxfp8.models.mla import up_project as up_project
from jaxfp8.models.parallel import Communication as Communication
from jaxfp8.models.parallel import ShardedBatch as ShardedBatch
from jaxfp8.models.parallel import communication_bytes as communication_bytes
from jaxfp8.models.parallel import merge_over_axis as merge_over_axis
from jaxfp8.models.parallel import prefill_layer_sharded as prefill_layer_sharded
from jaxfp8.models.plan import PrefillPlan as PrefillPlan
from jaxfp8.models.plan import deployment as deployment
from jaxfp8.models.plan import plan_prefill as plan_prefill
from jaxfp8.models.prefill import PrefilledLayer as PrefilledLayer
from jaxfp8.models.prefill import attend_context as attend_context
from jaxfp8.models.prefill import empty_cache as empty_cache
from jaxfp8.models.prefill import prefill_layer as prefill_layer
from jaxfp8.models.prefill import segment_bytes as segment_bytes
from jaxfp8.models.sharding import MlaSharding as MlaSharding
from jaxfp8.models.sharding import empty_sharded_cache as empty_sharded_cache
from jaxfp8.models.sharding import load_sharded_layers as load_sharded_layers
from jaxfp8.models.sharding import shard_scales as shard_scales
from jaxfp8.models.weights import MlaWeights as MlaWeights
from jaxfp8.models.weights import random_weights as random_weights
from jaxfp8.models.weights import rank_weights as rank_weights
