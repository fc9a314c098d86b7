# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""What the device sustains at best, measured in the same run as what is compared with it.

Bytes: a copy of more than any cache holds. FLOPs: a large square matrix product. Each by XLA and,
where torch shares the GPU, by torch; the better one is the ceiling.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp

from common import bursts, inputs, torch_on_gpu
from common.program import one_line
from common.result import Ceiling
from common.timing import Subject, take_turns
from jaxfp8.formats import Fp8Format

_TURNS, _SECONDS = 5, 0.02


def copy_ceiling(megabytes: int) -> Ceiling | None:
    """Bytes a second, read and written, of a copy of so many megabytes; None if none runs."""
    count = megabytes * 10**6 // 4
    source = jax.random.bits(jax.random.key(0), (count,), jnp.uint32)
    copy = jax.jit(lambda x: x ^ jnp.uint32(1))
    subjects = {"xla": Subject(lambda i: copy(source))}
    if torch_on_gpu.usable():
        subjects["torch"] = torch_on_gpu.copy(source)
    return _best("copy", 2 * 4 * count, subjects)


def matmul_ceiling(precision: str, fmt: Fp8Format | None, size: int) -> Ceiling | None:
    """FLOPs a second of [size, size] x [size, size]; None if none runs.

    In FP8 of the format given, or in bfloat16. On a CPU both are emulated in float32, and the
    ceiling is a product in that.
    """
    dtype: Any = fmt.dtype if precision == "fp8" and fmt is not None else jnp.bfloat16
    name, out_dtype = f"{precision} matmul", jnp.bfloat16
    if jax.default_backend() == "cpu":
        dtype, name, out_dtype = jnp.float32, "float32 matmul", jnp.float32
    count = inputs.sets_past_the_cache(2 * size**2)
    pairs = [
        tuple(inputs.normal(2 * i + j, size, size).astype(dtype) for j in range(2))
        for i in range(count)
    ]
    product = jax.jit(
        lambda a, b: jax.lax.dot_general(
            a, b, (((1,), (1,)), ((), ())), preferred_element_type=out_dtype
        ),
        # The vendor's library alone: to try XLA's own kernels takes half a minute in FP8.
        compiler_options={"xla_gpu_enable_triton_gemm": False},
    )
    subjects = {"xla": Subject(lambda i: product(*inputs.pick(pairs, i)))}
    if torch_on_gpu.usable():
        subjects["torch"] = torch_on_gpu.matmul(pairs, precision)
    return _best(name, 2 * size**3, subjects)


def _best(name: str, amount: int, subjects: dict[str, Subject]) -> Ceiling | None:
    runs = {}
    for by, subject in subjects.items():
        try:
            subject.run()
            runs[by] = subject
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            # A library that lacks this product on this device; another may have it.
            print(f"ceiling of {name} by {by}: {one_line(error)}", file=sys.stderr)
    if not runs:
        return None
    # With the rests of what is compared with it: a chip that has rested is faster.
    times = take_turns(runs, turns=_TURNS, least_seconds=_SECONDS, pause=bursts.PAUSE.value)
    by = min(times, key=lambda by: times[by].median_ms)
    return Ceiling(name, amount / (1e-3 * times[by].median_ms), by)
