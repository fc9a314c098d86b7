# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""What the scale artifact costs: loading it, and observing Q, K and V to calibrate it.

    python benchmarks/scales.py
    python benchmarks/scales.py --tokens 65536 --profile_dir profile      (on a GPU)

Loading: read and validate an artifact (schema, hash, every value, fit) from a file in the page
cache. Observing: the time until the call returns, the time until the device is done, and that of
one plain sum over the same arrays, which is what reading them once costs. Device-to-host transfers
are forbidden while it is measured. Exit status 1 where a bound is passed.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from common import inputs
from common.program import REFCHECK, Recorder, progress, run, start_device
from common.result import Check
from common.timing import Subject, take_turns

from jaxfp8 import calibration
from jaxfp8.cli import CommandError
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
_PROFILE_DIR = flags.DEFINE_string("profile_dir", None, "write a JAX profile of observing there")


def main(recorder: Recorder) -> None:
    """Measures both."""
    if _HEADS.value % _TP_SIZE.value:
        raise CommandError(
            f"--tp_size: expected a divisor of --heads={_HEADS.value}, got {_TP_SIZE.value}"
        )
    bench_load(recorder)
    start_device()
    bench_observe(recorder)


def bench_load(recorder: Recorder) -> None:
    """Time and memory of ScaleArtifact.load."""
    artifact = _artifact()
    deployment = artifact.deployment
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scales.safetensors"
        artifact.save(path)
        size = path.stat().st_size
        load = Subject(lambda i: ScaleArtifact.load(path, deployment))
        first_ms = 1e3 * _seconds(load)
        with progress(_REPETITIONS.value, "load") as bar:
            timing = take_turns({"": load}, turns=_REPETITIONS.value, on_burst=bar.update)[""]
        tracemalloc.start()
        loaded = ScaleArtifact.load(path, deployment)
        peak = tracemalloc.get_traced_memory()[1] / 1e6
        tracemalloc.stop()
    recorder.add(
        what="load and validate a scale artifact",
        shape={"layers": _LAYERS.value, "heads": _HEADS.value},
        backend="jaxfp8",
        device="CPU",
        bytes=size,
        errors=_mismatches(loaded.descale, artifact.descale),
        bounds=(
            Check("median_ms", timing.median_ms, _MAX_LOAD_MS.value),
            Check("peak_mb", peak, _MAX_LOAD_MB.value),
        ),
        details={"first_ms": first_ms},
        **timing.fields,
    )


def bench_observe(recorder: Recorder) -> None:
    """Time of Calibrator.observe, and the bytes that its compiled code touches."""
    identity = _identity()
    heads = identity.local_heads
    q, k, v = inputs.tensor_sets(_TOKENS.value, _TOKENS.value, heads)[0]
    calibrator = calibration.Calibrator(identity, tp_rank=0, pp_rank=0, layers={0: "layer"})
    calibrator.arm()
    total = jax.jit(lambda *arrays: [jnp.sum(x, dtype=jnp.float32) for x in arrays])
    returned: list[float] = []

    def observe(number: int) -> None:
        start = time.perf_counter()
        calibrator.observe(0, q, k, v)
        returned.append(1e3 * (time.perf_counter() - start))

    subjects = {
        "observe": Subject(observe, lambda _: jax.block_until_ready(calibrator._maxima[0])),
        "read once": Subject(lambda i: total(q, k, v)),
    }
    for subject in subjects.values():
        subject.run()
    with (
        jax.transfer_guard_device_to_host("disallow"),
        progress(2 * _REPETITIONS.value, "observe") as bar,
    ):
        times = take_turns(subjects, turns=_REPETITIONS.value, on_burst=bar.update)
        if _PROFILE_DIR.value:
            with jax.profiler.trace(_PROFILE_DIR.value):
                for number in range(10):
                    observe(number)
                subjects["observe"].wait(None)
    size = sum(x.nbytes for x in (q, k, v))
    zeros = jnp.zeros((3, heads), jnp.float32)
    compiled = calibration._max_with_values.lower(zeros, q, k, v, None).compile()
    cost = compiled.cost_analysis()
    assert cost is not None  # a program compiled from JAX has one
    passes = cost["bytes accessed"] / size
    limit = None if jax.default_backend() == "cpu" else _MAX_PASSES.value
    observed = calibrator.shard().layers[0]
    errors = tuple(
        check
        for name, x in zip("qkv", (q, k, v), strict=True)
        for check in _mismatches(
            getattr(observed, name), np.abs(np.asarray(x, np.float32)).max(axis=(0, 2)), name
        )
    )
    recorder.add(
        what="observe Q, K and V",
        shape={"tokens": _TOKENS.value, "heads": heads, "qk": 192, "v": 128},
        dtype="bf16",
        backend="jaxfp8",
        bytes=size,
        errors=errors,
        bounds=(Check("passes", passes, limit),),
        details={
            "returned_ms": statistics.median(returned),
            "read_once_ms": times["read once"].median_ms,
        },
        **times["observe"].fields,
    )


def _mismatches(actual: Any, expected: Any, name: str = "values") -> tuple[Check, ...]:
    """How many values differ; none may."""
    if not REFCHECK.value:
        return ()
    return (Check(f"{name} that differ", int(np.sum(np.asarray(actual) != expected)), 0),)


def _seconds(subject: Subject) -> float:
    start = time.perf_counter()
    subject.run()
    return time.perf_counter() - start


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


if __name__ == "__main__":
    run("scales", main)
