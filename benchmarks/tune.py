# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Finds the fastest configuration of the Pallas Triton attention kernel.

    python benchmarks/tune.py --precision=fp8                 # on the GPU that is there
    python benchmarks/tune.py --precision=fp8 --model         # no GPU: ranks gfx942 code
    python benchmarks/tune.py --precision=fp8 --write         # and has the library use the best

On a GPU every candidate is timed, and one whose output differs from that of the library's present
configuration by more than rounding is refused. With --model the candidates are compiled for gfx942
and ranked by clocks per score: M of the matrix unit and V of the vector unit in the loop over full
tiles, max(M, V, (M + V) / waves) where `waves` share a SIMD. That ranks code; it measures nothing,
and --write refuses it.

--write puts the winner into the table that the library reads (--output; by default the file
tuned.json beside jaxfp8/ops/attention/heuristics.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from jaxfp8.formats import Fp8Format
from jaxfp8.ops.attention import pallas_triton_kernel, tiling
from jaxfp8.ops.attention.base import AttentionSpec, QuantizedContext, QuantizedQuery
from jaxfp8.ops.attention.heuristics import (
    TUNED_FILE,
    KernelConfig,
    default_config,
    load_configs,
    save_configs,
)
from jaxfp8.ops.attention.pallas_triton import PallasTritonBackend
from jaxfp8.rocm import compile_for_gfx942
from jaxfp8.rocm.plugin import start_on_cpu
from jaxfp8.targets import Target, detect_target, target_of_arch

_PRECISION = flags.DEFINE_enum("precision", "fp8", ["fp8", "bf16"], "of the operands")
_QK_HEAD_DIM = flags.DEFINE_enum("qk_head_dim", "192", ["192", "128"], "head dim of Q and K")
_HEADS = flags.DEFINE_integer("heads", 12, "heads", lower_bound=1)
_TOKENS_Q = flags.DEFINE_integer("tokens_q", 4096, "new tokens", lower_bound=1)
_TOKENS_K = flags.DEFINE_integer("tokens_k", 65536, "keys", lower_bound=1)
_CAUSAL = flags.DEFINE_bool("causal", False, "with a causal mask")
_REPETITIONS = flags.DEFINE_integer("repetitions", 20, "timed runs of each", lower_bound=1)
_MODEL = flags.DEFINE_bool("model", False, "rank gfx942 code, without a GPU")
_LIMIT = flags.DEFINE_integer("limit", None, "try only this many candidates", lower_bound=1)
_WRITE = flags.DEFINE_bool("write", False, "write the winner to --output")
_OUTPUT = flags.DEFINE_string("output", str(TUNED_FILE), "the table that the library reads")
_JSON = flags.DEFINE_string("json", None, "file that results are appended to, a JSON line each")

_V_HEAD_DIM = 128
# Two configurations round P alike and sum in another order.
_MAX_DIFFERENCE = {"fp8": 0.04, "bf16": 0.005}


def main(argv: Sequence[str]) -> int:
    """Tries the candidates, prints them from the best, and returns the exit status."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if _MODEL.value and _WRITE.value:
        raise app.UsageError("--write: expected times of a device, and --model measures nothing")
    if _MODEL.value:
        start_on_cpu()
        target = target_of_arch("gfx942")
    else:
        target = detect_target()
    spec = _spec(target)
    reason = PallasTritonBackend().unsupported(spec, target)
    if reason is not None:
        raise app.UsageError(f"the kernel cannot run here: {reason}; --model needs no GPU")
    try_one = _model(spec) if _MODEL.value else _timer(spec, target)

    results = []
    for config in itertools.islice(candidates(spec, target), _LIMIT.value):
        try:
            result = try_one(config)
        except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
            result = {"refused": str(error).splitlines()[0][:120]}
        results.append((config, result))
        print(_line(config, result), flush=True)
        if _JSON.value:
            with open(_JSON.value, "a") as file:
                line = {"what": "tune", "arch": target.arch, "jax": jax.__version__}
                line |= dataclasses.asdict(spec) | {"fmt": str(spec.fmt)}
                file.write(json.dumps(line | dataclasses.asdict(config) | result) + "\n")
    ranked = sorted((r for r in results if "refused" not in r[1]), key=_rank)
    if not ranked:
        print("no candidate ran")
        return 1
    print("\nfrom the best:")
    for config, result in ranked[:10]:
        print(_line(config, result))
    if _WRITE.value:
        path = Path(_OUTPUT.value)
        table = load_configs(path) if path.exists() else {}
        key = f"{target.arch}/{spec.precision}/{spec.qk_head_dim}"
        save_configs(path, table | {key: ranked[0][0]})
        print(f"\n{key} written to {path}")
    return 0


def candidates(spec: AttentionSpec, target: Target) -> Iterator[KernelConfig]:
    """The library's own configuration, then every other that makes sense."""
    own = default_config(target.arch, spec.precision, spec.qk_head_dim)
    yield own
    amd = target.arch.startswith("gfx")
    for block_q, block_k, num_warps, num_stages, permute_keys, scores_first in itertools.product(
        (128, 256), (32, 64, 128), (4, 8), (1, 2) if amd else (2, 3), (True, False), (True, False)
    ):
        config = KernelConfig(block_q, block_k, num_warps, num_stages, permute_keys, scores_first)
        if config != own and block_q // num_warps <= 32 and (amd or not permute_keys):
            yield config


def _spec(target: Target) -> AttentionSpec:
    fmt: Fp8Format | None = target.fp8_format if _PRECISION.value == "fp8" else None
    return AttentionSpec(_PRECISION.value, fmt, _HEADS.value, int(_QK_HEAD_DIM.value), _V_HEAD_DIM)


def _rank(result: tuple[KernelConfig, dict[str, Any]]) -> tuple[float, ...]:
    """By cost; what the matrix unit bounds alike, by what may still get in its way."""
    _, counts = result
    return counts["cost"], counts.get("barriers", 0), counts.get("vector/mfma", 0)


def _line(config: KernelConfig, result: dict[str, Any]) -> str:
    fields = dataclasses.asdict(config) | result
    return "  ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in fields.items()
    )


def _timer(spec: AttentionSpec, target: Target) -> Callable[[KernelConfig], dict[str, Any]]:
    """Times a configuration on the device; cost in milliseconds."""
    heads, tokens_q, tokens_k = spec.num_heads, _TOKENS_Q.value, _TOKENS_K.value
    rng = np.random.default_rng(0)

    def draw(tokens: int, size: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((tokens, heads, size), np.float32), jnp.bfloat16)

    q, k = draw(tokens_q, spec.qk_head_dim), draw(tokens_k, spec.qk_head_dim)
    v = draw(tokens_k, _V_HEAD_DIM)
    cu_q, cu_k = (jnp.asarray([0, tokens], jnp.int32) for tokens in (tokens_q, tokens_k))
    descale = jnp.full(heads, 5 / spec.fmt.max if spec.fmt else 1.0, jnp.float32)

    def run(config: KernelConfig) -> tuple[np.ndarray, float]:
        backend = PallasTritonBackend(config=config)
        name = backend.name

        @jax.jit
        def pack(q: Any, k: Any, v: Any) -> tuple[QuantizedQuery, QuantizedContext]:
            queries = backend.pack_query(q, cu_q, descale, spec)
            context = backend.pack_context(k, v, cu_k, descale, descale, spec)
            return (
                QuantizedQuery(queries, cu_q, descale, name, spec, tokens_q),
                QuantizedContext(context, cu_k, descale, descale, name, spec, tokens_k),
            )

        @jax.jit
        def attend(query: QuantizedQuery, context: QuantizedContext) -> Any:
            scale = spec.qk_head_dim**-0.5
            return backend.attend(query, context, causal=_CAUSAL.value, softmax_scale=scale)

        operands = pack(q, k, v)
        out = np.asarray(attend(*operands).out, np.float32)
        times = []
        for _ in range(_REPETITIONS.value):
            start = time.perf_counter()
            jax.block_until_ready(attend(*operands))
            times.append(time.perf_counter() - start)
        return out, 1e3 * statistics.median(times)

    expected, _ = run(default_config(target.arch, spec.precision, spec.qk_head_dim))

    def try_one(config: KernelConfig) -> dict[str, Any]:
        out, milliseconds = run(config)
        difference = float(np.linalg.norm(out - expected) / np.linalg.norm(expected))
        if not difference <= _MAX_DIFFERENCE[spec.precision]:
            return {"refused": f"its output differs from the library's by {difference:.3g}"}
        return {"cost": milliseconds, "unit": "ms", "difference": difference}

    return try_one


def _model(spec: AttentionSpec) -> Callable[[KernelConfig], dict[str, Any]]:
    """Ranks a configuration by its gfx942 code; cost in clocks per 1000 scores of a head."""
    heads, tokens_q, tokens_k = spec.num_heads, _TOKENS_Q.value, _TOKENS_K.value
    dtype = spec.fmt.dtype if spec.fmt else jnp.bfloat16

    def try_one(config: KernelConfig) -> dict[str, Any]:
        q_tiles = tiling.max_tiles(tokens_q, 1, config.block_q)
        k_tiles = tiling.max_tiles(tokens_k, 1, config.block_k)

        def function(q: Any, k: Any, v: Any, nonfinite: Any, cu: Any, scales: Any) -> Any:
            work = pallas_triton_kernel.work_table(
                cu, cu, tokens_q, causal=_CAUSAL.value, config=config
            )
            return pallas_triton_kernel.attend(
                q, k, v, nonfinite, work, scales, num_tokens=tokens_q, causal=_CAUSAL.value,
                fmt=spec.fmt, config=config,
            )  # fmt: skip

        shapes = (
            ((heads, q_tiles * config.block_q, spec.qk_head_dim), dtype),
            ((heads, k_tiles * config.block_k, spec.qk_head_dim), dtype),
            ((heads, k_tiles, _V_HEAD_DIM, config.block_k), dtype),
            ((1 if spec.fmt else 2, heads, 1, _V_HEAD_DIM), jnp.float32),
            ((2,), jnp.int32),
            ((2, heads), jnp.float32),
        )
        arguments = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
        (kernel,) = [k for k in compile_for_gfx942(function, *arguments) if k.pallas]
        if kernel.spills:
            return {"refused": f"{kernel.spills} registers spilled"}
        loop = max(kernel.loops, key=lambda loop: (loop.kind == "full", loop.mfma))
        m, v = loop.mfma_clocks, loop.vector_clocks
        scores = config.block_q // config.num_warps * config.block_k
        clocks = max(m, v, (m + v) / kernel.waves_per_simd)
        return {
            "cost": 1e3 * clocks / scores,
            "unit": "clocks/1000 scores",
            "registers": kernel.vgpr + kernel.agpr,
            "waves": kernel.waves_per_simd,
            "vector/mfma": v / m,
            "barriers": loop.barrier,
        }

    return try_one


if __name__ == "__main__":
    app.run(main)
