# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Run a JAX function with its Pallas kernels as gfx942 machine code, in the simulator.

The function is traced as on a gfx942. What is around the kernels (tables of tiles, scales) runs on
the CPU; each kernel is compiled by XLA:ROCm and its code object run on the simulator, which faults
on any access outside the kernel's own buffers and on a store to an input. Registers, LDS and
outputs start as garbage.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np

from jaxfp8.rocm import CompiledKernel, compile_for_gfx942
from jaxfp8.rocm.compile import described_gfx942
from tests.gfx942sim import Kernel, Stats
from tests.rocm import shared

# NaN as float32, bfloat16 and FP8, and a large number as an index.
_OUTPUT_POISON = 0xFF80FF80


@dataclasses.dataclass
class Simulation:
    """What ran: the kernels in order, with the statistics of each."""

    kernels: list[CompiledKernel] = dataclasses.field(default_factory=list)
    stats: list[Stats] = dataclasses.field(default_factory=list)


def simulate(
    function: Callable[..., Any],
    *args: Any,
    only: Collection[str] | None = None,
    reverse_waves: bool = False,
    detect_races: bool = True,
    simulation: Simulation | None = None,
) -> Any:
    """function(*args), its Pallas kernels on the simulator.

    Args:
      function: of arrays and pytrees of arrays.
      *args: NumPy or JAX arrays, or pytrees of them.
      only: names of the kernels to simulate; the others run in interpret mode, which is much
        faster. None simulates all.
      reverse_waves: run the waves of a workgroup last first, between barriers.
      detect_races: fail where two waves touch a byte of LDS with no barrier in between.
      simulation: filled with what ran.
    """
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(args)]
    described = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    with described_gfx942():
        traced = jax.jit(function).trace(*described)
    run = functools.partial(
        _run_kernel,
        only=only,
        simulation=simulation if simulation is not None else Simulation(),
        reverse_waves=reverse_waves,
        detect_races=detect_races,
    )
    closed = traced.jaxpr
    results = _evaluate(closed.jaxpr, closed.consts, leaves, run)
    return jax.tree.unflatten(jax.tree.structure(traced.out_info), results)


def _evaluate(jaxpr: Any, consts: Any, args: Any, run_kernel: Callable[..., Any]) -> list[Any]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else values[atom]

    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        name, params = equation.primitive.name, equation.params
        if name == "pallas_call":
            results = run_kernel(equation, operands)
        elif name in ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"):
            inner = params.get("jaxpr") or params["call_jaxpr"]
            results = _evaluate(inner.jaxpr, inner.consts, operands, run_kernel)
        else:
            results = equation.primitive.bind(*operands, **params)
            if not equation.primitive.multiple_results:
                results = [results]
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _run_kernel(
    equation: Any,
    operands: list[Any],
    *,
    only: Collection[str] | None,
    simulation: Simulation,
    reverse_waves: bool,
    detect_races: bool,
) -> list[np.ndarray]:
    key = str(equation) + str(equation.params["compiler_params"])
    if only is not None and equation.params["name"] not in only:
        return _interpreted(key, equation)(*operands)
    compiled, kernel = _compiled(key, equation)
    inputs = [np.array(operand) for operand in operands]
    outputs = [poison(var.aval.shape, var.aval.dtype) for var in equation.outvars]
    aliases = dict(equation.params["input_output_aliases"])
    for index, array in enumerate(inputs):
        if index in aliases:
            outputs[aliases[index]] = array
        else:
            array.flags.writeable = False
    stats = kernel.launch(
        compiled.grid,
        compiled.block_threads,
        [*inputs, *outputs],
        dynamic_lds_bytes=compiled.dynamic_lds_bytes,
        reverse_waves=reverse_waves,
        detect_races=detect_races,
    )
    simulation.kernels.append(compiled)
    simulation.stats.append(stats)
    return outputs


def poison(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array of garbage, for a kernel to write."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    words = np.full(-(-size // 4), _OUTPUT_POISON, np.uint32)
    return words.view(np.uint8)[:size].view(dtype).reshape(shape)


_CACHE: dict[str, Any] = {}
"""By the text of an equation: its compiled kernel, or the function that interprets it."""


def _compiled(key: str, equation: Any) -> tuple[CompiledKernel, Kernel]:
    def compile_it() -> CompiledKernel:
        function, avals = _as_function(equation, interpret=False)
        (compiled,) = [kernel for kernel in compile_for_gfx942(function, *avals) if kernel.pallas]
        return compiled

    if key not in _CACHE:
        compiled = shared.once(key, compile_it)
        _CACHE[key] = compiled, Kernel.from_hsaco(compiled.code_object, compiled.name)
    return _CACHE[key]


def _interpreted(key: str, equation: Any) -> Callable[..., Any]:
    key = f"interpret {key}"
    if key not in _CACHE:
        function, _ = _as_function(equation, interpret=True)
        _CACHE[key] = jax.jit(function)
    return _CACHE[key]


def _as_function(equation: Any, interpret: bool) -> tuple[Callable[..., Any], list[Any]]:
    params = {**equation.params, "interpret": interpret}

    def function(*operands: Any) -> Any:
        return equation.primitive.bind(*operands, **params)

    return function, [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars]
