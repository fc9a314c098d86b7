# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""What a call from torch costs more than the same call from JAX, and where the time goes.

    python benchmarks/bridge_overhead.py
    python benchmarks/bridge_overhead.py --device cuda --max_overhead_us 100

One prefill_attention of a batch of empty sequences, so that little but the way to the device and
back is left: from JAX under jax.jit, from torch through jaxfp8_torch, and through the same operator
registered as torch.library.custom_op, taking turns. Then the parts alone: a tensor to JAX, an array
to torch, the checks, and a trivial operator registered either way. Before the timing, one call from
torch runs with device-to-host copies and host synchronisation forbidden. Exit status 1 where the
bound is passed.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from absl import app, flags

import jaxfp8
import jaxfp8_torch
from jaxfp8_torch import checks, dlpack, ops

_DEVICE = flags.DEFINE_string("device", "cpu", "torch device")
_TOKENS = flags.DEFINE_integer("tokens", 256, "rows of q, k and v", lower_bound=1)
_HEADS = flags.DEFINE_integer("heads", 12, "heads", lower_bound=1)
_CALLS = flags.DEFINE_integer("calls", 200, "calls of one measurement", lower_bound=1)
_REPETITIONS = flags.DEFINE_integer("repetitions", 5, "measurements of each", lower_bound=1)
_MAX_OVERHEAD_US = flags.DEFINE_float("max_overhead_us", None, "bound, not checked if not given")
_JSON = flags.DEFINE_string("json", None, "file that results are appended to, a JSON line each")


def main(argv: Sequence[str]) -> int:
    """Measures, prints, and returns the exit status."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    results = [bench_call(), bench_parts(), bench_registration()]
    for result in results:
        print("  ".join(f"{key}={value}" for key, value in result.items()), flush=True)
    if _JSON.value:
        with open(_JSON.value, "a") as file:
            file.writelines(json.dumps(result) + "\n" for result in results)
    return 0 if all(result.get("ok", True) for result in results) else 1


def bench_call() -> dict[str, Any]:
    """The whole call, from JAX and from torch."""
    tensors = _inputs()
    arrays = [dlpack.wrap(x) for x in tensors]
    scale = torch.ones(_HEADS.value, device=_DEVICE.value)
    scales = jaxfp8.LayerScales(scale, scale, scale)
    jax_scales = jaxfp8.LayerScales(*map(dlpack.wrap, scales))

    @jax.jit
    def from_jax(*arguments: Any) -> Any:
        *arrays, scales = arguments
        return jaxfp8.prefill_attention(*arrays, causal=True, scales=scales)

    def from_torch() -> Any:
        return jaxfp8_torch.prefill_attention(*tensors, causal=True, scales=scales)

    other = torch.library.custom_op("jaxfp8_bench::prefill", mutates_args=())(ops.prefill_attention)
    jaxfp8_torch.set_buckets(None)

    def through_custom_op() -> Any:
        return other(*tensors, *scales, True, None, "fp8", None, None, "HT")

    seconds = _alternate(lambda: from_jax(*arrays, jax_scales), from_torch, through_custom_op)
    with _no_waiting():
        from_torch()
    jax_us, torch_us, custom_us = (round(x * 1e6, 1) for x in seconds)
    overhead = round(torch_us - jax_us, 1)
    return {
        "what": "call",
        "device": _DEVICE.value,
        "jax_us": jax_us,
        "torch_us": torch_us,
        "custom_op_us": custom_us,
        "overhead_us": overhead,
        "max_overhead_us": _MAX_OVERHEAD_US.value,
        "ok": _MAX_OVERHEAD_US.value is None or overhead <= _MAX_OVERHEAD_US.value,
    }


def bench_parts() -> dict[str, Any]:
    """The parts of a call."""
    tensors = _inputs()
    array = dlpack.wrap(tensors[0])
    named = dict(zip("abcde", tensors, strict=True))
    parts = {
        "import_us": lambda: dlpack.wrap(tensors[0]),
        "export_us": lambda: dlpack.to_torch(array),
        "checks_us": lambda: checks.tensors(named),
        "cu_seqlens_us": lambda: checks.cu_seqlens_sound(tensors[3], _TOKENS.value),
        "layout_us": lambda: dlpack.heads("q", tensors[0]),
    }
    seconds = _alternate(*parts.values())
    return {
        "what": "parts",
        **{name: round(x * 1e6, 1) for name, x in zip(parts, seconds, strict=True)},
    }


def bench_registration() -> dict[str, Any]:
    """A trivial operator, registered in the two ways."""

    def body(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(0)

    library = torch.library.Library("jaxfp8_bench", "FRAGMENT")
    library.define("low(Tensor x) -> Tensor")
    library.impl("low", body, "CompositeExplicitAutograd")
    custom = torch.library.custom_op("jaxfp8_bench::high", mutates_args=())(body)
    x = _inputs()[0]
    seconds = _alternate(lambda: body(x), lambda: torch.ops.jaxfp8_bench.low(x), lambda: custom(x))
    bare, low, high = (x * 1e6 for x in seconds)
    return {
        "what": "registration",
        "library_us": round(low - bare, 1),
        "custom_op_us": round(high - bare, 1),
    }


def _inputs() -> list[torch.Tensor]:
    tokens, heads, device = _TOKENS.value, _HEADS.value, _DEVICE.value
    q, k = (torch.randn(tokens, heads, 192, device=device).to(torch.bfloat16) for _ in range(2))
    v = torch.randn(tokens, heads, 128, device=device).to(torch.bfloat16)
    cu_seqlens = torch.zeros(2, dtype=torch.int32, device=device)
    return [q, k, v, cu_seqlens, cu_seqlens.clone()]


@contextlib.contextmanager
def _no_waiting() -> Any:
    """Device-to-host copies of JAX's and synchronisation of torch's raise."""
    if _DEVICE.value == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        with jax.transfer_guard_device_to_host("disallow_explicit"):
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _alternate(*functions: Callable[[], Any]) -> list[float]:
    """Median seconds of one call of each, taking turns; a GPU is waited for once a turn."""
    seconds: list[list[float]] = [[] for _ in functions]
    for repetition in range(_REPETITIONS.value + 1):
        for function, times in zip(functions, seconds, strict=True):
            result = None
            start = time.perf_counter()
            for _ in range(_CALLS.value):
                result = function()
                if _DEVICE.value == "cpu":  # an array goes to torch only when it is ready
                    jax.block_until_ready(_arrays(result))
            if _DEVICE.value != "cpu":
                torch.accelerator.synchronize()
                jax.block_until_ready(_arrays(result))
            if repetition:
                times.append((time.perf_counter() - start) / _CALLS.value)
    return [statistics.median(times) for times in seconds]


def _arrays(result: Any) -> list[jax.Array]:
    return [x for x in jax.tree.leaves(result) if isinstance(x, jax.Array)]


if __name__ == "__main__":
    app.run(main)
