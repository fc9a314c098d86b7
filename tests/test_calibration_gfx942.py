# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""What Calibrator.observe compiles to on a gfx942, read off without one."""

import math

import jax
import jax.numpy as jnp

from jaxfp8 import calibration, rocm
from tests.rocm.tools import needs_rocm_compiler


@needs_rocm_compiler
def test_observing_is_one_pass():
    """Q, K and V are read by one kernel each, which writes little, and by nothing else."""
    tokens, heads = 8192, 12
    arrays = [jax.ShapeDtypeStruct((tokens, heads, dim), jnp.bfloat16) for dim in (192, 192, 128)]
    seen = jax.ShapeDtypeStruct((3, heads), jnp.float32)
    kernels = rocm.compile_for_gfx942(calibration._max_with_values, seen, *arrays, None)
    readers = []
    for kernel in kernels:
        sizes = [math.prod(arg.shape) for arg in kernel.args]
        large = [size for size in sizes if size >= tokens * heads * 128]
        assert all(size <= tokens * heads for size in sizes if size not in large), kernel.name
        if large:
            assert kernel.args[0].shape in [x.shape for x in arrays] and len(large) == 1
            readers.append(kernel.args[0].shape)
    # A kernel that is launched twice, for Q and for K, is listed once.
    assert sorted(readers) == [(tokens, heads, 128), (tokens, heads, 192)]
