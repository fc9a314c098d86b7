# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""From a policy to the precision and the scales of a model's passes, before anything is compiled.

served = deployment(config, model=..., revision=..., checkpoint_id=..., tp_size=8, layers=...)
policy = PrefillPolicy.from_env(deployment=served, arch=detect_target().arch)
plan = plan_prefill(policy, served, context_lens, arch=..., tp_rank=rank)
for layer, weights in model.items():
    out, caches[layer] = prefill_layer(
        config, weights, hidden, caches[layer], batch, precision=plan.precision,
        new_tokens_precision=plan.new_tokens_precision, scales=plan.scales.get(layer),
    )
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxfp8.models.config import MlaConfig
from jaxfp8.ops.attention.base import Precision
from jaxfp8.policy import Decision, PrefillPolicy, PrefillRequest
from jaxfp8.scales.identity import Deployment
from jaxfp8.scales.layer_scales import LayerScales


@dataclasses.dataclass(frozen=True)
class PrefillPlan:
    """How a batch is to be prefilled, in all layers.

    Attributes:
      decision: the policy's.
      new_tokens_precision: of the attention of the new tokens to each other.
      scales: the rank's static scales by layer; empty where there are none to use.
    """

    decision: Decision
    new_tokens_precision: Precision
    scales: Mapping[int, LayerScales]

    @property
    def precision(self) -> Precision:
        """Of the attention over the context."""
        return self.decision.path


def deployment(
    config: MlaConfig,
    *,
    model: str,
    revision: str,
    checkpoint_id: str,
    tp_size: int,
    layers: Sequence[int],
    fp8_dtype: str,
    pp_size: int = 1,
) -> Deployment:
    """What is served, for a policy and its artifact to be compared with.

    Args:
      config: the layers'.
      model, revision, checkpoint_id, tp_size, pp_size, fp8_dtype: as in `scales.Deployment`.
      layers: 0-based indices of the MLA layers.

    Raises:
      ValueError: tp_size does not divide the heads; or as `scales.Deployment`.
    """
    return Deployment(
        model=model,
        revision=revision,
        checkpoint_id=checkpoint_id,
        tp_size=tp_size,
        pp_size=pp_size,
        fp8_dtype=fp8_dtype,
        local_heads=config.local_heads(tp_size),
        qk_head_dim=config.qk_head_dim,
        v_head_dim=config.v_head_dim,
        layers=tuple(layers),
    )


def plan_prefill(
    policy: PrefillPolicy,
    served: Deployment,
    context_lens: Sequence[int] | np.ndarray,
    *,
    arch: str,
    tp_rank: int = 0,
    new_tokens_fp8: bool = False,
) -> PrefillPlan:
    """What a policy says of a batch.

    Args:
      policy: the policy.
      served: the model that is served, from `deployment`.
      context_lens: cached tokens of each sequence, on the host.
      arch: the device, as `jaxfp8.detect_target().arch`.
      tp_rank: the rank whose scales are wanted.
      new_tokens_fp8: whether, in an FP8 pass, the new tokens attend to each other in FP8 too.

    Raises:
      ScaleArtifactError: the policy's artifact is of another model, topology or format than the
        one served; all differences are listed.
      ValueError: there is no such rank.
    """
    if policy.enabled and policy.artifact is not None:
        policy.artifact.check(served)
    decision = policy.select(
        PrefillRequest(
            context_tokens=max(map(int, context_lens), default=0),
            num_heads=served.local_heads,
            qk_head_dim=served.qk_head_dim,
            v_head_dim=served.v_head_dim,
            dtype="bfloat16",
            arch=arch,
        )
    )
    fp8 = decision.path == "fp8"
    scales = {}
    if fp8 and policy.artifact is not None:
        scales = {layer: policy.artifact.layer(layer, tp_rank=tp_rank) for layer in served.layers}
    return PrefillPlan(decision, "fp8" if fp8 and new_tokens_fp8 else "bf16", scales)
