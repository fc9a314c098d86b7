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

import functools
import json
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl import app, flags
from common.program import REFCHECK, Recorder, choose, outcome, progress, start_device
from common.result import Check
from common.timing import Subject, Timing, take_turns

import jaxfp8

_WHAT = flags.DEFINE_list("what", ["bf16", "causal", "memory", "import"], "what to measure")
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
_CHILD = flags.DEFINE_bool("measure_memory_in_this_process", False, "used by `memory` itself")

_QK_HEAD_DIM, _V_HEAD_DIM = 192, 128


def main(recorder: Recorder) -> None:
    """Measures what is selected."""
    benches = {
        "bf16": bench_bf16,
        "causal": bench_causal,
        "memory": bench_memory,
        "import": bench_import,
    }
    selected = choose("what", _WHAT.value, benches)
    start_device()
    for name in selected:
        benches[name](recorder)


def bench_bf16(recorder: Recorder) -> None:
    """prefill_attention against the three lines that it stands for."""
    q, k, v, cu_seqlens = _inputs(_TOKENS.value, _TOKENS.value)

    @jax.jit
    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, k) * _QK_HEAD_DIM**-0.5
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, axis=-1), v)

    def ours() -> jax.Array:
        return _attention(q, k, v, cu_seqlens, cu_seqlens, causal=False)

    times = _alternate("bf16", {"ours": ours, "plain": lambda: plain(q, k, v)})
    errors: tuple[Check, ...] = ()
    if REFCHECK.value:
        error = float(jnp.max(jnp.abs(ours().astype(jnp.float32) - plain(q, k, v))))
        errors = (Check("largest difference", error, 2**-7),)
    _record(
        recorder, "bf16", times["ours"], times["plain"], _MAX_RATIO.value, "plain_ms",
        shape={"tokens": _TOKENS.value, "heads": _HEADS.value}, dtype="bf16", errors=errors,
    )  # fmt: skip


def bench_causal(recorder: Recorder) -> None:
    """Causal against non-causal: tiles that no row sees are skipped."""
    q, k, v, cu_seqlens = _inputs(_CAUSAL_TOKENS.value, _CAUSAL_TOKENS.value)

    def run(causal: bool) -> Callable[[], jax.Array]:
        return lambda: _attention(q, k, v, cu_seqlens, cu_seqlens, causal=causal)

    times = _alternate("causal", {"causal": run(True), "full": run(False)})
    _record(
        recorder, "causal", times["causal"], times["full"], _MAX_CAUSAL_RATIO.value,
        "non_causal_ms", shape={"tokens": _CAUSAL_TOKENS.value, "heads": _HEADS.value},
        dtype="bf16",
    )  # fmt: skip


def bench_memory(recorder: Recorder) -> None:
    """In a process of its own, since a peak is never taken back."""
    arguments = [f"--{flag.name}={flag.value}" for flag in (_HEADS, _NEW_TOKENS, _KEYS)]
    child = subprocess.run(
        [sys.executable, __file__, "--measure_memory_in_this_process", *arguments],
        check=True,
        capture_output=True,
        text=True,
    )
    gigabytes = json.loads(child.stdout.splitlines()[-1])
    for precision, value in gigabytes.items():
        recorder.add(
            what="memory",
            shape={"new_tokens": _NEW_TOKENS.value, "keys": _KEYS.value, "heads": _HEADS.value},
            dtype=precision,
            backend="xla",
            bounds=(Check("gigabytes", value, _MAX_MEMORY_GB.value),),
        )


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


def bench_import(recorder: Recorder) -> None:
    """Whole interpreter starts, so that what Python itself takes is in both."""

    def start(code: str) -> Callable[[], Any]:
        return lambda: subprocess.run([sys.executable, "-c", code], check=True)

    times = _alternate(
        "import",
        {"ours": start("import jaxfp8; jaxfp8.prefill_attention"), "jax": start("import jax")},
    )
    _record(
        recorder, "import", times["ours"], times["jax"], _MAX_IMPORT_RATIO.value, "jax_ms"
    )  # fmt: skip


def _record(
    recorder: Recorder,
    what: str,
    ours: Timing,
    other: Timing,
    max_ratio: float,
    other_name: str,
    **fields: Any,
) -> None:
    recorder.add(
        what=what,
        backend="xla",
        bounds=(Check("ratio", ours.median_ms / other.median_ms, max_ratio),),
        details={other_name: other.median_ms},
        **ours.fields,
        **fields,
    )


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


def _call(function: Callable[[], Any], number: int) -> Any:
    return function()


def _alternate(what: str, functions: dict[str, Callable[[], Any]]) -> dict[str, Timing]:
    subjects = {
        name: Subject(functools.partial(_call, function)) for name, function in functions.items()
    }
    with progress(len(subjects) * _REPETITIONS.value, what) as bar:
        return take_turns(subjects, turns=_REPETITIONS.value, on_burst=bar.update)


def _start(argv: Sequence[str]) -> int:
    if _CHILD.value:
        print(json.dumps(_extra_memory()))
        return 0
    return outcome("xla_backend", main, argv)


if __name__ == "__main__":
    app.run(_start)
