# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Finds the fastest configuration of the Pallas Triton attention kernel.

    python benchmarks/tune.py --precision=fp8                 # on the GPU that is there
    python benchmarks/tune.py --precision=fp8 --model         # no GPU: ranks gfx942 code
    python benchmarks/tune.py --precision=fp8 --write         # and has the library use the best

On a GPU every candidate is timed in turns with the library's present configuration, and one whose
output differs from the latter's by more than rounding is refused. With --model the candidates are
compiled for gfx942 and ranked by clocks per score: M of the matrix unit and V of the vector unit in
the loop over full tiles, max(M, V, (M + V) / waves) where `waves` share a SIMD. That ranks code; it
measures nothing, and --write refuses it.

--write puts the winner into the table that the library reads (--output; by default the file
tuned.json beside jaxfp8/ops/attention/heuristics.py).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from common import inputs
from common.program import REFCHECK, Recorder, one_line, progress, run, start_device
from common.reference import relative_error
from common.result import Check
from common.timing import Subject, take_turns

from jaxfp8.cli import REFUSED, CommandError, require_place_for
from jaxfp8.formats import Fp8Format
from jaxfp8.ops.attention import pallas_triton_kernel, tiling
from jaxfp8.ops.attention.base import AttentionSpec, Precision, QuantizedContext, QuantizedQuery
from jaxfp8.ops.attention.heuristics import (
    TUNED_FILE,
    KernelConfig,
    configs_to_json,
    default_config,
    load_configs,
)
from jaxfp8.ops.attention.pallas_triton import PallasTritonBackend
from jaxfp8.rocm import compile_for_gfx942
from jaxfp8.rocm.plugin import start_on_cpu
from jaxfp8.scales.files import write_atomically
from jaxfp8.targets import Target, detect_target, target_of_arch

_PRECISION = flags.DEFINE_enum("precision", "fp8", ["fp8", "bf16"], "of the operands")
_QK_HEAD_DIM = flags.DEFINE_enum("qk_head_dim", "192", ["192", "128"], "head dim of Q and K")
_HEADS = flags.DEFINE_integer("heads", 12, "heads", lower_bound=1)
_TOKENS_Q = flags.DEFINE_integer("tokens_q", 4096, "new tokens", lower_bound=1)
_TOKENS_K = flags.DEFINE_integer("tokens_k", 65536, "keys", lower_bound=1)
_CAUSAL = flags.DEFINE_bool("causal", False, "with a causal mask")
_REPETITIONS = flags.DEFINE_integer("repetitions", 9, "bursts of each", lower_bound=1)
_MODEL = flags.DEFINE_bool("model", False, "rank gfx942 code, without a GPU")
_LIMIT = flags.DEFINE_integer("limit", None, "try only this many candidates", lower_bound=1)
_WRITE = flags.DEFINE_bool("write", False, "write the winner to --output")
_OUTPUT = flags.DEFINE_string("output", None, f"table for --write; {TUNED_FILE.name} if not given")

_V_HEAD_DIM = 128
_BURST_SECONDS = 0.02
# Two configurations round P alike and sum in another order.
_MAX_DIFFERENCE = {"fp8": 0.04, "bf16": 0.005}


def main(recorder: Recorder) -> None:
    """Tries the candidates, and prints them from the best."""
    if _MODEL.value and _WRITE.value:
        raise CommandError("--write: expected times of a device, and --model measures nothing")
    if _OUTPUT.value is not None and not _WRITE.value:
        raise CommandError("--output: expected --write beside it")
    _table("the library's table", TUNED_FILE)
    path = TUNED_FILE if _OUTPUT.value is None else Path(_OUTPUT.value)
    if _WRITE.value:
        # Before the work: a table that cannot be written or added to.
        require_place_for("--output", str(path) if _OUTPUT.value is None else _OUTPUT.value)
        _table("--output", path)
    if _MODEL.value:
        start_on_cpu()
        target = target_of_arch("gfx942")
    else:
        start_device()
        target = detect_target()
    spec = _spec(target)
    reason = PallasTritonBackend().unsupported(spec, target)
    if reason is not None:
        raise CommandError(f"the kernel cannot run here: {reason}; --model needs no GPU")
    try_one = _model(spec) if _MODEL.value else _timer(spec, target)

    results = []
    tried = list(itertools.islice(candidates(spec, target), _LIMIT.value))
    with progress(len(tried), "candidates") as bar:
        for config in tried:
            fields, details = _try(try_one, config)
            if "unavailable" not in fields:
                results.append((config, details))
            recorder.add(
                what="candidate of the model" if _MODEL.value else "candidate",
                case="own" if config == tried[0] else "",
                shape={
                    "tokens_q": _TOKENS_Q.value,
                    "tokens_k": _TOKENS_K.value,
                    "heads": spec.num_heads,
                    "qk_head_dim": spec.qk_head_dim,
                    "v_head_dim": _V_HEAD_DIM,
                    "causal": _CAUSAL.value,
                },
                dtype=spec.fmt.name if spec.fmt else "bf16",
                backend="pallas_triton",
                details={**dataclasses.asdict(config), **details},
                **({"device": "gfx942, compiled for and not run"} if _MODEL.value else {}),
                **fields,
            )
            bar.update()
    if not results:
        raise CommandError("no candidate ran", REFUSED)
    ranked = sorted(results, key=_rank)
    print("\nfrom the best:")
    for config, details in ranked[:10]:
        print(_line(config, details))
    if _WRITE.value:
        table = _table("--output", path)
        key = f"{target.arch}/{spec.precision}/{spec.qk_head_dim}"
        try:
            write_atomically(path, configs_to_json(table | {key: ranked[0][0]}).encode())
        except OSError as error:
            raise CommandError(f"--output: {error}", REFUSED) from None
        print(f"\n{key} written to {path}")


def _table(what: str, path: Path) -> dict[str, KernelConfig]:
    """What a table says; nothing where there is none."""
    try:
        return load_configs(path) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise CommandError(f"{what}: {one_line(error)}") from None


_Outcome = tuple[dict[str, Any], dict[str, Any]]  # fields of a Result, details with "cost"


def _try(try_one: Callable[[KernelConfig], _Outcome], config: KernelConfig) -> _Outcome:
    try:
        return try_one(config)
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
        return {"unavailable": one_line(error)}, {}


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
    precision: Precision = "fp8" if _PRECISION.value == "fp8" else "bf16"
    fmt: Fp8Format | None = target.fp8_format if precision == "fp8" else None
    return AttentionSpec(precision, fmt, _HEADS.value, int(_QK_HEAD_DIM.value), _V_HEAD_DIM)


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


def _timer(spec: AttentionSpec, target: Target) -> Callable[[KernelConfig], _Outcome]:
    """Times a configuration on the device; cost in milliseconds."""
    heads, tokens_q, tokens_k = spec.num_heads, _TOKENS_Q.value, _TOKENS_K.value
    q = inputs.normal(0, tokens_q, heads, spec.qk_head_dim)
    k = inputs.normal(1, tokens_k, heads, spec.qk_head_dim)
    v = inputs.normal(2, tokens_k, heads, _V_HEAD_DIM)
    cu_q, cu_k = (inputs.cu_seqlens([tokens]) for tokens in (tokens_q, tokens_k))
    descale = jnp.full(heads, 5 / spec.fmt.max if spec.fmt else 1.0, jnp.float32)

    def subject(config: KernelConfig) -> Subject:
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
        return Subject(
            lambda i: attend(*operands), output=lambda state: np.asarray(state.out, np.float64)
        )

    own = subject(default_config(target.arch, spec.precision, spec.qk_head_dim))
    expected = own.run()

    def try_one(config: KernelConfig) -> _Outcome:
        candidate = subject(config)
        errors: tuple[Check, ...] = ()
        if REFCHECK.value:
            difference = relative_error(candidate.run(), expected)
            if not difference <= _MAX_DIFFERENCE[spec.precision]:
                reason = f"its output differs from the library's by {difference:.3g}"
                return {"unavailable": reason}, {}
            limit = _MAX_DIFFERENCE[spec.precision]
            errors = (Check("difference to the library's", difference, limit),)
        times = take_turns(
            {"own": own, "candidate": candidate},
            turns=_REPETITIONS.value,
            least_seconds=_BURST_SECONDS,
        )
        timing = times["candidate"]
        details = {
            "cost": timing.median_ms,
            "unit": "ms",
            "time_of_own": timing.median_ms / times["own"].median_ms,
        }
        return {"errors": errors, **timing.fields}, details

    return try_one


def _model(spec: AttentionSpec) -> Callable[[KernelConfig], _Outcome]:
    """Ranks a configuration by its gfx942 code; cost in clocks per 1000 scores of a head."""
    heads, tokens_q, tokens_k = spec.num_heads, _TOKENS_Q.value, _TOKENS_K.value
    dtype = spec.fmt.dtype if spec.fmt else jnp.bfloat16

    def try_one(config: KernelConfig) -> _Outcome:
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
            return {"unavailable": f"{kernel.spills} registers spilled"}, {}
        loop = max(kernel.loops, key=lambda loop: (loop.kind == "full", loop.mfma))
        m, v = loop.mfma_clocks, loop.vector_clocks
        scores = config.block_q // config.num_warps * config.block_k
        clocks = max(m, v, (m + v) / kernel.waves_per_simd)
        return {}, {
            "cost": 1e3 * clocks / scores,
            "unit": "clocks/1000 scores",
            "registers": kernel.vgpr + kernel.agpr,
            "waves": kernel.waves_per_simd,
            "vector/mfma": v / m,
            "barriers": loop.barrier,
        }

    return try_one


if __name__ == "__main__":
    run("tune", main)
