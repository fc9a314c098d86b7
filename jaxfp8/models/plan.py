# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""From a policy to the precision and the scales of a model's passes, before anything is compiled.

served = deployment(config, model=..., revision=..., checkpoint_id=..., tp_size=8, layers=...)
policy = PrefillPolicy.from_env(deployment=served, arch=detect_target().arch)
plan = plan_prefill(policy, served, context_lens, arch=..., tp_rank=rank)
for layer, weights in model.items():
    out, caches[layer] = prefill_layer(
        config, weights, hidden, caches[layer], batch, precision=plan.precision,
        new_tokens_precision=plan.new_tokens_precision, scales=plan.layer_scales(layer),
    )
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxfp8 import checks
from jaxfp8.models.arguments import check_config, check_layers, check_tp_rank
from jaxfp8.models.config import MlaConfig
from jaxfp8.ops.attention.base import Precision
from jaxfp8.policy import Decision, PrefillPolicy, PrefillRequest
from jaxfp8.scales.arguments import integer, require
from jaxfp8.scales.errors import listed
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

    def layer_scales(self, layer: int) -> LayerScales | None:
        """The rank's static scales of a layer; None where the plan has none for any layer.

        Raises:
          TypeError: layer is not an integer.
          ValueError: the plan has static scales, and none for this layer.
        """
        layer = integer("layer", layer)
        if not self.scales:
            return None
        if layer not in self.scales:
            raise ValueError(
                f"layer: expected one with static scales, {listed(list(self.scales))}, got {layer}"
            )
        return self.scales[layer]


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
      TypeError: config is no MlaConfig, or layers are no indices.
      ValueError: tp_size does not divide the heads; or as `scales.Deployment`.
    """
    check_config(config)
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
        layers=check_layers(layers),
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
      context_lens: cached tokens of each sequence, on the host; of a context in parts, their sums.
      arch: the device, as `jaxfp8.detect_target().arch`.
      tp_rank: the rank whose scales are wanted.
      new_tokens_fp8: whether, in an FP8 pass, the new tokens attend to each other in FP8 too.

    Raises:
      ScaleArtifactError: the policy's artifact is of another model, topology or format than the
        one served; all differences are listed.
      TypeError: an argument is of the wrong kind.
      ValueError: there is no such rank, whether scales are used or not; or a length is negative.
    """
    require("policy", policy, PrefillPolicy, "a PrefillPolicy")
    require("served", served, Deployment, "a Deployment")
    require("arch", arch, str, "the name of a device")
    tp_rank = check_tp_rank(tp_rank, served.tp_size)
    new_tokens_fp8 = checks.flag("new_tokens_fp8", new_tokens_fp8)
    longest = _longest(context_lens)
    if policy.enabled and policy.artifact is not None:
        policy.artifact.check(served)
    decision = policy.select(
        PrefillRequest(
            context_tokens=longest,
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


def _longest(context_lens: Sequence[int] | np.ndarray) -> int:
    """The longest context, 0 without any sequence."""
    try:
        lens = np.asarray(context_lens)
    except ValueError:
        raise TypeError("context_lens: expected integers [B], got uneven lists") from None
    if lens.ndim == 2:
        raise ValueError(
            f"context_lens: expected shape [B], got {list(lens.shape)}; add up the parts of a "
            "context, context_lens.sum(axis=0)"
        )
    if lens.ndim != 1 or (lens.size and not np.issubdtype(lens.dtype, np.integer)):
        kind = type(context_lens).__name__ if lens.ndim != 1 else f"dtype {lens.dtype}"
        raise TypeError(f"context_lens: expected integers [B], got {kind}")
    if lens.size and lens.min() < 0:
        raise ValueError(f"context_lens: expected lengths >= 0, got {lens.min()}")
    return int(lens.max(initial=0))
