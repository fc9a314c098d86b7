# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""What the XLA backend costs on a CPU, beside what one would write by hand.

    python benchmarks/xla_backend.py

- bf16: prefill_attention in BF16 against einsum, softmax, einsum in float32 under jit.
- causal: its causal time against its own non-causal time.
- memory: peak resident memory of few new tokens over many keys, above the inputs.
- import: importing jaxfp8 and reaching for prefill_attention, against importing jax.

Times are medians of runs that alternate. Exit status 1 where a ratio or the memory passes its
bound, or an output differs from the plain one by more than BF16 rounding.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl import app, flags

import jaxfp8

_TOKENS = flags.DEFINE_integer("tokens", 2048, "queries and keys of `bf16`", lower_bound=1)
_CAUSAL_TOKENS = flags.DEFINE_integer("causal_tokens", 4096, "of `causal`", lower_bound=1)
_HEADS = flags.DEFINE_integer("heads", 12, "heads", lower_bound=1)
_NEW_TOKENS = flags.DEFINE_integer("new_tokens", 256, "queries of `memory`", lower_bound=1)
_KEYS = flags.DEFINE_integer("keys", 65536, "keys of `memory`", lower_bound=1)
_REPETITIONS = flags.DEFINE_integer("repetitions", 5, "runs of each", lower_bound=1)
_MAX_RATIO = flags.DEFINE_float("max_ratio", 1.1, "bound of `bf16`")
_MAX_CAUSAL_RATIO = flags.DEFINE_float("max_causal_ratio", 0.65, "bound of `causal`")
_MAX_MEMORY_GB = flags.DEFINE_float("max_memory_gb", 1.5, "bound of `memory`")
_MAX_IMPORT_RATIO = flags.DEFINE_float("max_import_ratio", 1.5, "bound of `import`")
_JSON = flags.DEFINE_string("json", None, "file that results are appended to, a JSON line each")
_CHILD = flags.DEFINE_bool("measure_memory_in_this_process", False, "used by `memory` itself")

_QK_HEAD_DIM, _V_HEAD_DIM = 192, 128


def main(argv: Sequence[str]) -> int:
    """Measures, prints, and returns the exit status."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if _CHILD.value:
        print(json.dumps(_extra_memory()))
        return 0
    results = [bench_bf16(), bench_causal(), bench_memory(), bench_import()]
    for result in results:
        print("  ".join(f"{key}={value}" for key, value in result.items()), flush=True)
    if _JSON.value:
        with open(_JSON.value, "a") as file:
            file.writelines(json.dumps(result) + "\n" for result in results)
    return 0 if all(result["ok"] for result in results) else 1


def bench_bf16() -> dict[str, Any]:
    """prefill_attention against the three lines that it stands for."""
    q, k, v, cu_seqlens = _inputs(_TOKENS.value, _TOKENS.value)

    @jax.jit
    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, k) * _QK_HEAD_DIM**-0.5
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, axis=-1), v)

    def ours() -> jax.Array:
        return _attention(q, k, v, cu_seqlens, cu_seqlens, causal=False)

    seconds, plain_seconds = _alternate(ours, lambda: plain(q, k, v))
    error = float(jnp.max(jnp.abs(ours().astype(jnp.float32) - plain(q, k, v))))
    ratio = seconds / plain_seconds
    return {
        "what": "bf16",
        "tokens": _TOKENS.value,
        "seconds": round(seconds, 4),
        "plain_seconds": round(plain_seconds, 4),
        "ratio": round(ratio, 3),
        "max_ratio": _MAX_RATIO.value,
        "largest_difference": error,
        "ok": ratio <= _MAX_RATIO.value and error < 2**-7,
    }


def bench_causal() -> dict[str, Any]:
    """Causal against non-causal: tiles that no row sees are skipped."""
    q, k, v, cu_seqlens = _inputs(_CAUSAL_TOKENS.value, _CAUSAL_TOKENS.value)
    causal, full = _alternate(
        *(
            lambda causal=causal: _attention(q, k, v, cu_seqlens, cu_seqlens, causal=causal)
            for causal in (True, False)
        )
    )
    return {
        "what": "causal",
        "tokens": _CAUSAL_TOKENS.value,
        "seconds": round(causal, 4),
        "non_causal_seconds": round(full, 4),
        "ratio": round(causal / full, 3),
        "max_ratio": _MAX_CAUSAL_RATIO.value,
        "ok": causal / full <= _MAX_CAUSAL_RATIO.value,
    }


def bench_memory() -> dict[str, Any]:
    """In a process of its own, since a peak is never taken back."""
    arguments = [f"--{flag.name}={flag.value}" for flag in (_HEADS, _NEW_TOKENS, _KEYS)]
    child = subprocess.run(
        [sys.executable, __file__, "--measure_memory_in_this_process", *arguments],
        check=True,
        capture_output=True,
        text=True,
    )
    gigabytes = json.loads(child.stdout.splitlines()[-1])
    return {
        "what": "memory",
        "new_tokens": _NEW_TOKENS.value,
        "keys": _KEYS.value,
        "gigabytes": {precision: round(value, 3) for precision, value in gigabytes.items()},
        "max_gigabytes": _MAX_MEMORY_GB.value,
        "ok": max(gigabytes.values()) <= _MAX_MEMORY_GB.value,
    }


def _extra_memory() -> dict[str, float]:
    """Peak resident gigabytes above the inputs; BF16 first, since the peak only grows."""
    q, k, v, _ = _inputs(_NEW_TOKENS.value, _KEYS.value)
    cu_q = jnp.array([0, _NEW_TOKENS.value], jnp.int32)
    cu_k = jnp.array([0, _KEYS.value], jnp.int32)
    with open("/proc/self/statm") as file:
        before = int(file.read().split()[1]) * resource.getpagesize()
    peaks = {}
    for precision in ("bf16", "fp8"):
        jax.block_until_ready(
            jaxfp8.prefill_attention(
                q, k, v, cu_q, cu_k, causal=True, precision=precision, backend="xla"
            )
        )
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        peaks[precision] = (peak - before) / 1e9
    return peaks


def bench_import() -> dict[str, Any]:
    """Whole interpreter starts, so that what Python itself takes is in both."""

    def start(code: str) -> Callable[[], Any]:
        return lambda: subprocess.run([sys.executable, "-c", code], check=True)

    ours, jax_alone = _alternate(
        start("import jaxfp8; jaxfp8.prefill_attention"), start("import jax")
    )
    return {
        "what": "import",
        "seconds": round(ours, 3),
        "jax_seconds": round(jax_alone, 3),
        "ratio": round(ours / jax_alone, 3),
        "max_ratio": _MAX_IMPORT_RATIO.value,
        "ok": ours / jax_alone <= _MAX_IMPORT_RATIO.value,
    }


def _attention(*arguments: jax.Array, causal: bool) -> jax.Array:
    return jaxfp8.prefill_attention(*arguments, causal=causal, precision="bf16", backend="xla").out


def _inputs(tokens_q: int, tokens_k: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """q, k, v and the cu_seqlens of one sequence; drawn in pieces, to keep the peak low."""
    rng = np.random.default_rng(0)

    def draw(tokens: int, head_dim: int) -> jax.Array:
        x = np.empty((tokens, _HEADS.value, head_dim), ml_dtypes.bfloat16)
        for first in range(0, tokens, 1024):
            piece = x[first : first + 1024]
            piece[:] = rng.standard_normal(piece.shape, np.float32)
        return jnp.asarray(x)

    return (
        draw(tokens_q, _QK_HEAD_DIM),
        draw(tokens_k, _QK_HEAD_DIM),
        draw(tokens_k, _V_HEAD_DIM),
        jnp.array([0, tokens_q], jnp.int32),
    )


def _alternate(*functions: Callable[[], Any]) -> list[float]:
    """Median seconds of each, after one run to warm up, taking turns."""
    seconds: list[list[float]] = [[] for _ in functions]
    for repetition in range(_REPETITIONS.value + 1):
        for function, times in zip(functions, seconds, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(function())
            if repetition:
                times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds]


if __name__ == "__main__":
    app.run(main)
