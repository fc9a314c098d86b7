# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""FP8 varlen attention prefill for AMD gfx942 and Hopper, in JAX Pallas.

Names are imported on first use (PEP 562): `import jaxfp8.scales` and the policy stay usable in a
process that must not start JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxfp8 import scales as scales
    from jaxfp8.calibration import Calibrator as Calibrator
    from jaxfp8.formats import E4M3FN as E4M3FN
    from jaxfp8.formats import E4M3FNUZ as E4M3FNUZ
    from jaxfp8.formats import Fp8Format as Fp8Format
    from jaxfp8.head_slice import HeadSlice as HeadSlice
    from jaxfp8.ops.attention.base import QuantizedContext as QuantizedContext
    from jaxfp8.ops.attention.base import QuantizedQuery as QuantizedQuery
    from jaxfp8.ops.quantize.assembled_key import AssembledKey as AssembledKey
    from jaxfp8.policy import Decision as Decision
    from jaxfp8.policy import PrefillPolicy as PrefillPolicy
    from jaxfp8.policy import PrefillRequest as PrefillRequest
    from jaxfp8.prefill import attend as attend
    from jaxfp8.prefill import prefill_attention as prefill_attention
    from jaxfp8.prefill import quantize_context as quantize_context
    from jaxfp8.prefill import quantize_query as quantize_query
    from jaxfp8.quantize import descale_from_amax as descale_from_amax
    from jaxfp8.quantize import dynamic_quantize_per_head as dynamic_quantize_per_head
    from jaxfp8.quantize import per_head_amax as per_head_amax
    from jaxfp8.quantize import quantize_per_head as quantize_per_head
    from jaxfp8.scales.layer_scales import LayerScales as LayerScales
    from jaxfp8.segments import PrefillState as PrefillState
    from jaxfp8.segments import attend_new_tokens as attend_new_tokens
    from jaxfp8.segments import attend_segment as attend_segment
    from jaxfp8.segments import start_prefill as start_prefill
    from jaxfp8.states import AttentionState as AttentionState
    from jaxfp8.states import merge_states as merge_states
    from jaxfp8.targets import Target as Target
    from jaxfp8.targets import detect_target as detect_target

_MODULES = {
    "AssembledKey": "ops.quantize.assembled_key",
    "AttentionState": "states",
    "Calibrator": "calibration",
    "Decision": "policy",
    "E4M3FN": "formats",
    "E4M3FNUZ": "formats",
    "Fp8Format": "formats",
    "HeadSlice": "head_slice",
    "LayerScales": "scales.layer_scales",
    "PrefillPolicy": "policy",
    "PrefillRequest": "policy",
    "PrefillState": "segments",
    "QuantizedContext": "ops.attention.base",
    "QuantizedQuery": "ops.attention.base",
    "Target": "targets",
    "attend": "prefill",
    "attend_new_tokens": "segments",
    "attend_segment": "segments",
    "descale_from_amax": "quantize",
    "detect_target": "targets",
    "dynamic_quantize_per_head": "quantize",
    "merge_states": "states",
    "per_head_amax": "quantize",
    "prefill_attention": "prefill",
    "quantize_context": "prefill",
    "quantize_per_head": "quantize",
    "quantize_query": "prefill",
    "start_prefill": "segments",
}

__version__ = "0.1.0"
__all__ = [*_MODULES, "scales"]


def __getattr__(name: str) -> Any:
    if name == "scales":
        return importlib.import_module("jaxfp8.scales")
    if name not in _MODULES:
        raise AttributeError(f"module 'jaxfp8' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"jaxfp8.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
