# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Attention and packing on a GPU, with what others offer for the same shapes beside it.

    python benchmarks/attention.py
    python benchmarks/attention.py --cases=mid,4k --backends=pallas_triton --sustained=0

Every implementation of a case runs in bursts that take turns; a time is the median over the rounds
of the seconds per launch of a burst, which has as many launches as --burst_ms needs, so that what
starts a burst does not count. With --sustained, each also runs that many launches back to
back, at the power limit. Peers (PyTorch's scaled_dot_product_attention with cuDNN or flash
attention, JAX's with cuDNN) run in BF16; one that does not serve a shape is listed with its reason.
Attention includes everything that a call does on the device; its inputs are packed before, except
in `quantized`.
"""

from __future__ import annotations

import os

# PyTorch wants memory beside JAX.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import jaxfp8
from jaxfp8 import packing

_QK_HEAD_DIM, _V_HEAD_DIM = 192, 128


@dataclasses.dataclass(frozen=True)
class Case:
    """Sequences of one shape of work."""

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    causal: bool
    what: str = "attention"  # "quantized": from BF16 inputs with static scales; "pack": K and V


def _mixed(total: int, seed: int) -> tuple[int, ...]:
    """Sixteen lengths between a quarter and twice their mean, summing to `total`."""
    shares = np.random.default_rng(seed).uniform(0.25, 2.0, 16)
    lengths = np.floor(shares / shares.sum() * total).astype(int)
    lengths[-1] += total - lengths.sum()
    return tuple(int(x) for x in lengths)


_CASES = {
    "mid": Case((4096,), (65536,), False),
    "mid-causal": Case((4096,), (65536,), True),
    "16k": Case((16384,), (16384,), True),
    "4k": Case((4096,), (4096,), True),
    "varlen": Case(_mixed(4096, 0), _mixed(65536, 1), False),
    "quantized": Case((4096,), (65536,), False, "quantized"),
    "pack": Case((4096,), (65536,), False, "pack"),
}

_SELECTED = flags.DEFINE_list("cases", list(_CASES), "cases to run")
_BACKENDS = flags.DEFINE_list("backends", [], "backends of this library; empty: the default one")
_PRECISIONS = flags.DEFINE_list("precisions", ["fp8", "bf16"], "precisions of this library")
_PEERS = flags.DEFINE_list("peers", ["torch-cudnn", "torch-flash", "jax-cudnn"], "peers")
_HEADS = flags.DEFINE_integer("heads", 12, "heads", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "bursts of each implementation", lower_bound=1)
_LAUNCHES = flags.DEFINE_integer("launches", 10, "least launches of a burst", lower_bound=1)
_BURST_MS = flags.DEFINE_float("burst_ms", 20.0, "least length of a burst", lower_bound=0.0)
_PAUSE = flags.DEFINE_float("pause", 0.2, "seconds before a burst, for the chip to cool")
_SUSTAINED = flags.DEFINE_integer("sustained", 500, "launches back to back of `mid`; 0: none")
_JSON = flags.DEFINE_string("json", None, "file that results are appended to, a JSON line each")

# Launches an implementation `n` times and waits for the last.
Burst = Callable[[int], None]


def main(argv: Sequence[str]) -> None:
    """Runs the cases and prints a line for each implementation."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    unknown = set(_SELECTED.value) - set(_CASES)
    if unknown:
        raise app.UsageError(f"--cases: expected some of {', '.join(_CASES)}, got {unknown}")
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}", flush=True)
    for name in _SELECTED.value:
        for result in run_case(name, _CASES[name]):
            print("  ".join(f"{k}={v}" for k, v in result.items()), flush=True)
            if _JSON.value:
                with open(_JSON.value, "a") as file:
                    file.write(json.dumps({**result, "device": device.device_kind}) + "\n")


def run_case(name: str, case: Case) -> list[dict[str, Any]]:
    """One result an implementation; the first, in whose terms `ratio` is, is this library's."""
    results: list[dict[str, Any]] = []
    bursts: dict[str, Burst] = {}
    launches: dict[str, int] = {}
    for implementation, make in _implementations(case).items():
        result: dict[str, Any] = {"case": name, "implementation": implementation}
        results.append(result)
        try:
            burst = make()
            burst(2)
            launches[implementation] = _launches_of(burst)
        except Exception as error:  # a peer says here that it does not serve the shape
            result["unavailable"] = str(error).strip().splitlines()[0][:120]
            continue
        bursts[implementation] = burst
    times = _interleave(bursts, launches, _ROUNDS.value, _PAUSE.value)
    sustained: dict[str, float] = {}
    if name == "mid" and _SUSTAINED.value:
        sustained = _interleave(bursts, dict.fromkeys(bursts, _SUSTAINED.value), 1, 1.0)
    first = next(iter(times.values()), None)
    for result in results:
        seconds = times.get(result["implementation"])
        if seconds is None:
            continue
        result["ms"] = round(seconds * 1e3, 4)
        result["ratio"] = round(seconds / first, 3) if first else None
        result.update(_rate(case, seconds))
        if result["implementation"] in sustained:
            long = sustained[result["implementation"]]
            result["sustained_ms"] = round(long * 1e3, 4)
            result["sustained_tflops"] = _rate(case, long)["tflops"]
    return results


def _launches_of(burst: Burst) -> int:
    """Launches of a burst that lasts long enough."""
    start = time.perf_counter()
    burst(_LAUNCHES.value)
    seconds = (time.perf_counter() - start) / _LAUNCHES.value
    return max(_LAUNCHES.value, int(_BURST_MS.value * 1e-3 / seconds) + 1)


def _interleave(
    bursts: dict[str, Burst], launches: dict[str, int], rounds: int, pause: float
) -> dict[str, float]:
    """Median seconds a launch of each."""
    seconds: dict[str, list[float]] = {name: [] for name in bursts}
    for _ in range(rounds):
        for name, burst in bursts.items():
            time.sleep(pause)
            start = time.perf_counter()
            burst(launches[name])
            seconds[name].append((time.perf_counter() - start) / launches[name])
    return {name: statistics.median(x) for name, x in seconds.items()}


def _rate(case: Case, seconds: float) -> dict[str, float]:
    if case.what == "pack":
        elements = sum(case.lengths_k) * _HEADS.value * (_QK_HEAD_DIM + _V_HEAD_DIM)
        return {"gb_per_s": round(3 * elements / seconds / 1e9)}  # 2 bytes in, 1 out
    pairs = sum(
        q * k - (q * (q - 1) // 2 if case.causal else 0)
        for q, k in zip(case.lengths_q, case.lengths_k, strict=True)
    )
    flops = 2 * pairs * _HEADS.value * (_QK_HEAD_DIM + _V_HEAD_DIM)
    return {"tflops": round(flops / seconds / 1e12)}


def _implementations(case: Case) -> dict[str, Callable[[], Burst]]:
    q, k, v = _inputs(case)
    makers: dict[str, Callable[[], Burst]] = {}
    for backend in _BACKENDS.value or [None]:
        for precision in _PRECISIONS.value:
            if case.what != "attention" and precision != "fp8":
                continue
            label = f"jaxfp8-{precision}" + (f"-{backend}" if backend else "")
            makers[label] = functools.partial(_ours, case, q, k, v, precision, backend)
    if case.what == "pack":
        return makers
    square = case.lengths_q == case.lengths_k
    if len(case.lengths_q) > 1 or (case.causal and not square):
        return makers  # no peer serves a ragged batch or a causal mask aligned bottom right
    for peer in _PEERS.value:
        maker = {"torch-cudnn": _torch, "torch-flash": _torch, "jax-cudnn": _jax_cudnn}[peer]
        makers[peer] = functools.partial(maker, peer, case, q, k, v)
    return makers


def _inputs(case: Case) -> list[jax.Array]:
    shapes = (
        (sum(case.lengths_q), _HEADS.value, _QK_HEAD_DIM),
        (sum(case.lengths_k), _HEADS.value, _QK_HEAD_DIM),
        (sum(case.lengths_k), _HEADS.value, _V_HEAD_DIM),
    )
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, shapes, strict=True)]


def _repeat(launch: Callable[[], Any]) -> Burst:
    def burst(n: int) -> None:
        for _ in range(n):
            last = launch()
        jax.block_until_ready(last)

    return burst


def _ours(case: Case, q: Any, k: Any, v: Any, precision: str, backend: str | None) -> Burst:
    cu_q, cu_k = (
        jnp.asarray(np.concatenate([[0], np.cumsum(x)]), jnp.int32)
        for x in (case.lengths_q, case.lengths_k)
    )
    if case.what != "attention":
        descale = functools.partial(jnp.full, _HEADS.value, dtype=jnp.float32)
        scales = jaxfp8.LayerScales(*(descale(0.0125) for _ in range(3)))
        # Under jit, as in a model: outside of it the cu_seqlens are read and checked every call.
        if case.what == "pack":
            pack = jax.jit(functools.partial(jaxfp8.quantize_context, backend=backend))
            return _repeat(lambda: pack(k, v, cu_k, k_descale=scales.k, v_descale=scales.v))
        prefill = jax.jit(
            functools.partial(
                jaxfp8.prefill_attention, causal=case.causal, scales=scales, backend=backend
            )
        )
        return _repeat(lambda: prefill(q, k, v, cu_q, cu_k))
    query = packing.pack_query(q, cu_q, None, precision, None, backend, v_head_dim=_V_HEAD_DIM)
    context = packing.pack_context(k, v, cu_k, None, None, precision, None, backend)
    attend = jax.jit(functools.partial(jaxfp8.attend, causal=case.causal))
    return _repeat(lambda: attend(query, context))


def _torch(peer: str, case: Case, q: Any, k: Any, v: Any) -> Burst:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernel = {
        "torch-cudnn": SDPBackend.CUDNN_ATTENTION,
        "torch-flash": SDPBackend.FLASH_ATTENTION,
    }[peer]
    arguments = [torch.from_dlpack(x).transpose(0, 1)[None].contiguous() for x in (q, k, v)]

    def burst(n: int) -> None:
        with sdpa_kernel(kernel):
            for _ in range(n):
                torch.nn.functional.scaled_dot_product_attention(*arguments, is_causal=case.causal)
        torch.cuda.synchronize()

    return burst


def _jax_cudnn(peer: str, case: Case, q: Any, k: Any, v: Any) -> Burst:
    attention = jax.jit(
        functools.partial(
            jax.nn.dot_product_attention, implementation="cudnn", is_causal=case.causal
        )
    )
    return _repeat(lambda: attention(q[None], k[None], v[None]))


if __name__ == "__main__":
    app.run(main)
