# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""jaxfp8 on torch tensors: FP8 varlen attention prefill for a PyTorch serving stack.

The functions of `jaxfp8`, with its names, semantics and errors, on tensors that cross to JAX and
back through DLPack without a copy. `torch.ops.jaxfp8` holds the operators beneath them.

Import it before JAX starts: it keeps JAX from reserving the GPU's memory, which torch wants too.
"""

from jaxfp8_torch.runtime import share_the_gpu

share_the_gpu()

# Whatever starts JAX comes after share_the_gpu.
from jaxfp8 import E4M3FN, E4M3FNUZ, Fp8Format, LayerScales  # noqa: E402
from jaxfp8.scales import Deployment, Identity, ScaleArtifactError  # noqa: E402
from jaxfp8_torch.buckets import Buckets, get_buckets, set_buckets  # noqa: E402
from jaxfp8_torch.calibration import Calibrator  # noqa: E402
from jaxfp8_torch.dlpack import from_torch, to_torch  # noqa: E402
from jaxfp8_torch.prefill import prefill_attention  # noqa: E402
from jaxfp8_torch.quantize import (  # noqa: E402
    dynamic_quantize_per_head,
    per_head_amax,
    quantize_per_head,
)
from jaxfp8_torch.runtime import (  # noqa: E402
    compilation_count,
    jax_is_running,
    use_compilation_cache,
)
from jaxfp8_torch.scales import ScaleArtifact  # noqa: E402
from jaxfp8_torch.segments import (  # noqa: E402
    PrefillState,
    attend_new_tokens,
    attend_segment,
    start_prefill,
)
from jaxfp8_torch.states import AttentionState, merge_states  # noqa: E402
from jaxfp8_torch.warm_up import warmup  # noqa: E402

__all__ = [
    "E4M3FN",
    "E4M3FNUZ",
    "AttentionState",
    "Buckets",
    "Calibrator",
    "Deployment",
    "Fp8Format",
    "Identity",
    "LayerScales",
    "PrefillState",
    "ScaleArtifact",
    "ScaleArtifactError",
    "attend_new_tokens",
    "attend_segment",
    "compilation_count",
    "dynamic_quantize_per_head",
    "from_torch",
    "get_buckets",
    "jax_is_running",
    "merge_states",
    "per_head_amax",
    "prefill_attention",
    "quantize_per_head",
    "set_buckets",
    "start_prefill",
    "to_torch",
    "use_compilation_cache",
    "warmup",
]
