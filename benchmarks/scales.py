# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""What the scale artifact costs: loading it, and observing Q, K and V to calibrate it.

    python benchmarks/scales.py
    python benchmarks/scales.py --tokens 65536 --profile_dir /tmp/profile      (on a GPU)

Loading: read and validate an artifact (schema, hash, every value, fit) from a file in the page
cache. Observing: the time until the call returns, the time until the device is done, and that of
one plain sum over the same arrays, which is what reading them once costs. Device-to-host transfers
are forbidden while it is measured. Exit status 1 where a bound is passed.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from jaxfp8 import calibration
from jaxfp8.scales import Identity, LayerAmax, RankShard, ScaleArtifact, merge_shards

_LAYERS = flags.DEFINE_integer("layers", 93, "layers of the artifact", lower_bound=1)
_HEADS = flags.DEFINE_integer("heads", 96, "heads of the model", lower_bound=1)
_TP_SIZE = flags.DEFINE_integer("tp_size", 8, "ranks that the heads are split over", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 4096, "tokens of an observation", lower_bound=1)
_REPETITIONS = flags.DEFINE_integer("repetitions", 20, "measurements of each kind", lower_bound=3)
_MAX_LOAD_MS = flags.DEFINE_float("max_load_ms", 50, "bound on the median time of a load")
_MAX_LOAD_MB = flags.DEFINE_float("max_load_mb", 20, "bound on the memory that a load allocates")
_MAX_PASSES = flags.DEFINE_float(
    "max_passes",
    1.1,
    "bound on the bytes that observing reads and writes, over those of Q, K and V; on a CPU, where "
    "XLA writes the magnitudes to memory before it reduces them, they are reported alone",
)
_JSON = flags.DEFINE_string("json", None, "file that results are appended to, a JSON line each")
_PROFILE_DIR = flags.DEFINE_string("profile_dir", None, "write a JAX profile of observing there")


def main(argv: Sequence[str]) -> int:
    """Measures, prints, and returns the exit status."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if _HEADS.value % _TP_SIZE.value:
        raise app.UsageError("--tp_size must divide --heads")
    results = [bench_load(), bench_observe()]
    for result in results:
        print("  ".join(f"{key}={_text(value)}" for key, value in result.items()))
    if _JSON.value:
        with open(_JSON.value, "a") as file:
            file.writelines(json.dumps(result) + "\n" for result in results)
    return int(any(not result["ok"] for result in results))


def bench_load() -> dict[str, Any]:
    """Time and memory of ScaleArtifact.load."""
    artifact = _artifact()
    deployment = artifact.deployment
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scales.safetensors"
        artifact.save(path)
        size = path.stat().st_size
        first, *rest = _milliseconds(lambda: ScaleArtifact.load(path, deployment))
        tracemalloc.start()
        loaded = ScaleArtifact.load(path, deployment)
        peak = tracemalloc.get_traced_memory()[1] / 1e6
        tracemalloc.stop()
    np.testing.assert_array_equal(loaded.descale, artifact.descale)
    median = statistics.median(rest)
    return {
        "what": "load and validate a scale artifact",
        "shape": {"layers": _LAYERS.value, "heads": _HEADS.value},
        "file_bytes": size,
        "first_ms": first,
        "median_ms": median,
        "quartiles_ms": statistics.quantiles(rest, n=4)[::2],
        "repetitions": len(rest),
        "peak_mb": peak,
        "ok": median <= _MAX_LOAD_MS.value and peak <= _MAX_LOAD_MB.value,
    }


def bench_observe() -> dict[str, Any]:
    """Time of Calibrator.observe, and the bytes that its compiled code touches."""
    identity = _identity()
    heads = identity.local_heads
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (_TOKENS.value, heads, dim), jnp.bfloat16)
        for key, dim in zip(keys, (192, 192, 128), strict=True)
    )
    calibrator = calibration.Calibrator(identity, tp_rank=0, pp_rank=0, layers={0: "layer"})
    calibrator.arm()
    total = jax.jit(lambda *arrays: [jnp.sum(x, dtype=jnp.float32) for x in arrays])

    def finished() -> Any:
        return jax.block_until_ready(calibrator._maxima[0])

    calibrator.observe(0, q, k, v)
    jax.block_until_ready((finished(), total(q, k, v)))
    returned, done, read_once = [], [], []
    with jax.transfer_guard_device_to_host("disallow"):
        for _ in range(_REPETITIONS.value):
            start = time.perf_counter()
            calibrator.observe(0, q, k, v)
            returned.append(1e3 * (time.perf_counter() - start))
            finished()
            done.append(1e3 * (time.perf_counter() - start))
            start = time.perf_counter()
            jax.block_until_ready(total(q, k, v))
            read_once.append(1e3 * (time.perf_counter() - start))
        if _PROFILE_DIR.value:
            with jax.profiler.trace(_PROFILE_DIR.value):
                for _ in range(10):
                    calibrator.observe(0, q, k, v)
                finished()
    expected = [np.abs(np.asarray(x, np.float32)).max(axis=(0, 2)) for x in (q, k, v)]
    for name, amax in zip("qkv", expected, strict=True):
        np.testing.assert_array_equal(getattr(calibrator.shard().layers[0], name), amax)
    size = sum(x.nbytes for x in (q, k, v))
    zeros = jnp.zeros((3, heads), jnp.float32)
    compiled = calibration._max_with_values.lower(zeros, q, k, v, None).compile()
    passes = compiled.cost_analysis()["bytes accessed"] / size
    return {
        "what": "observe Q, K and V",
        "shape": {"tokens": _TOKENS.value, "heads": heads, "qk": 192, "v": 128},
        "dtype": "bfloat16",
        "device": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__},
        "bytes": size,
        "returned_ms": statistics.median(returned),
        "median_ms": statistics.median(done),
        "quartiles_ms": statistics.quantiles(done, n=4)[::2],
        "repetitions": len(done),
        "read_once_ms": statistics.median(read_once),
        "passes": passes,
        "ok": passes <= _MAX_PASSES.value or jax.default_backend() == "cpu",
    }


def _identity() -> Identity:
    return Identity(
        model="benchmark",
        revision="0123456789abcdef",
        checkpoint_id="none",
        calibration_id="random",
        tp_size=_TP_SIZE.value,
        pp_size=1,
        fp8_dtype="float8_e4m3fnuz",
        local_heads=_HEADS.value // _TP_SIZE.value,
        qk_head_dim=192,
        v_head_dim=128,
        margin=1.1,
    )


def _artifact() -> ScaleArtifact:
    identity = _identity()
    rng = np.random.default_rng(0)
    return merge_shards(
        RankShard(
            identity=identity,
            tp_rank=rank,
            pp_rank=0,
            layers={
                layer: LayerAmax(
                    f"model.layers.{layer}.self_attn.attn",
                    *rng.lognormal(1, 1, (3, identity.local_heads)),
                )
                for layer in range(_LAYERS.value)
            },
        )
        for rank in range(identity.tp_size)
    )


def _milliseconds(call: Callable[[], Any]) -> list[float]:
    times = []
    for _ in range(_REPETITIONS.value + 1):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "/".join(map(_text, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    app.run(main)
