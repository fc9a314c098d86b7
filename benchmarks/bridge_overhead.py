# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""What a call from torch costs more than the same call from JAX, and where the time goes.

    python benchmarks/bridge_overhead.py
    python benchmarks/bridge_overhead.py --device cuda --max_overhead_us 100

One prefill_attention of a batch of empty sequences, so that little but the way to the device and
back is left: from JAX under jax.jit; from torch through jaxfp8_torch, with the same tensors in each
call, and with q, k and v in memory that no recent call has seen; and through the same operator
registered as torch.library.custom_op; taking turns. Then the parts alone: a call's tensors to JAX,
its results to torch, the checks, and a trivial operator registered either way. Before the timing,
one call from torch runs with device-to-host copies and host synchronisation forbidden. Exit status
1 where the bound is passed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from absl import flags
from common.program import Recorder, run, start_device
from common.result import Check
from common.timing import Subject, Timing, take_turns

import jaxfp8
from jaxfp8.cli import REFUSED, CommandError

_DEVICE = flags.DEFINE_string("device", "cpu", "torch device")
_TOKENS = flags.DEFINE_integer("tokens", 256, "rows of q, k and v", lower_bound=1)
_HEADS = flags.DEFINE_integer("heads", 12, "heads", lower_bound=1)
_CALLS = flags.DEFINE_integer("calls", 200, "calls of one measurement", lower_bound=1)
_REPETITIONS = flags.DEFINE_integer("repetitions", 5, "measurements of each", lower_bound=1)
_MAX_OVERHEAD_US = flags.DEFINE_float("max_overhead_us", None, "bound, not checked if not given")

_PLACES = 1500


def main(recorder: Recorder) -> None:
    """Measures the call, its parts, and two ways to register an operator."""
    if importlib.util.find_spec("torch") is None:
        raise CommandError("needs torch; pip install 'jaxfp8[torch]' installs it", REFUSED)
    # Before JAX starts: jaxfp8_torch has it leave memory to torch.
    import jaxfp8_torch  # noqa: F401

    start_device()
    _check_device()
    bench_call(recorder)
    bench_parts(recorder)
    bench_registration(recorder)


def _check_device() -> None:
    import torch

    try:
        torch.empty(1, device=_DEVICE.value)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CommandError(f"--device {_DEVICE.value}: {reason}") from None
    if torch.device(_DEVICE.value).type not in ("cpu", "cuda"):
        raise CommandError(f"--device: expected cpu or cuda, which JAX shares, got {_DEVICE.value}")


def bench_call(recorder: Recorder) -> None:
    """The whole call, from JAX and from torch."""
    import torch

    import jaxfp8_torch
    from jaxfp8_torch import crossing, ops

    tensors = _inputs()
    arrays = [crossing.to_array(x) for x in tensors]
    scale = torch.ones(_HEADS.value, device=_DEVICE.value)
    scales = jaxfp8.LayerScales(scale, scale, scale)
    jax_scales = jaxfp8.LayerScales(*map(crossing.to_array, scales))

    @jax.jit
    def from_jax(*arguments: Any) -> Any:
        *arrays, scales = arguments
        return jaxfp8.prefill_attention(*arrays, causal=True, scales=scales)

    def from_torch() -> Any:
        return jaxfp8_torch.prefill_attention(*tensors, causal=True, scales=scales)

    other = _custom_op("prefill", ops.prefill_attention)
    jaxfp8_torch.set_buckets(None)

    moved = itertools.cycle(zip(*map(_copies_elsewhere, tensors[:3]), strict=True))

    def from_new_memory() -> Any:
        arguments = (*next(moved), *tensors[3:])
        return jaxfp8_torch.prefill_attention(*arguments, causal=True, scales=scales)

    def through_custom_op() -> Any:
        return other(*tensors, *scales, True, None, "fp8", None, None, "HT")

    times = _alternate(
        {
            "jax": lambda: from_jax(*arrays, jax_scales),
            "torch": from_torch,
            "torch, new memory": from_new_memory,
            "torch, custom_op": through_custom_op,
        }
    )
    with _no_waiting():
        from_torch()
    for name, timing in times.items():
        overhead = 1e3 * (timing.median_ms - times["jax"].median_ms)
        bounds: tuple[Check, ...] = ()
        if name == "torch" and _MAX_OVERHEAD_US.value is not None:
            bounds = (Check("overhead_us", overhead, _MAX_OVERHEAD_US.value),)
        details = {} if name == "jax" or bounds else {"us_more_than_jax": overhead}
        recorder.add(
            what="call", backend=name, shape=_shape(), bounds=bounds, details=details,
            **timing.fields,
        )  # fmt: skip


def bench_parts(recorder: Recorder) -> None:
    """The parts of a call."""
    from jaxfp8_torch import checks, crossing, dlpack

    tensors = _inputs()
    arrays = crossing.to_jax(*tensors)
    named = dict(zip("abcde", tensors, strict=True))
    times = _alternate(
        {
            "import": lambda: crossing.to_jax(*tensors),
            "export": lambda: crossing.to_torch(*arrays[:2]),
            "checks": lambda: checks.tensors(named),
            "cu_seqlens": lambda: checks.cu_seqlens_sound(tensors[3], _TOKENS.value),
            "layout": lambda: dlpack.heads("q", tensors[0]),
        }
    )
    for name, timing in times.items():
        recorder.add(what="part", case=name, backend="torch", shape=_shape(), **timing.fields)


def bench_registration(recorder: Recorder) -> None:
    """A trivial operator, registered in the two ways."""
    import torch

    def body(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(0)

    # `body` has local annotations, which torch wants as objects.
    body.__annotations__ = {"x": torch.Tensor, "return": torch.Tensor}
    library = torch.library.Library("jaxfp8_bench", "FRAGMENT")
    library.define("low(Tensor x) -> Tensor")
    library.impl("low", body, "CompositeExplicitAutograd")
    custom = _custom_op("high", body)
    x = _inputs()[0]
    times = _alternate(
        {
            "bare": lambda: body(x),
            "library": lambda: torch.ops.jaxfp8_bench.low(x),
            "custom_op": lambda: custom(x),
        }
    )
    for name, timing in times.items():
        details = {"us_more_than_bare": 1e3 * (timing.median_ms - times["bare"].median_ms)}
        recorder.add(what="registration", backend=name, details=details, **timing.fields)


def _custom_op(name: str, function: Callable[..., Any]) -> Any:
    import torch

    return torch.library.custom_op(f"jaxfp8_bench::{name}", mutates_args=())(function)


def _shape() -> dict[str, int]:
    return {"tokens": _TOKENS.value, "heads": _HEADS.value}


def _inputs() -> list[Any]:
    import torch

    tokens, heads, device = _TOKENS.value, _HEADS.value, _DEVICE.value
    q, k = (torch.randn(tokens, heads, 192, device=device).to(torch.bfloat16) for _ in range(2))
    v = torch.randn(tokens, heads, 128, device=device).to(torch.bfloat16)
    cu_seqlens = torch.zeros(2, dtype=torch.int32, device=device)
    return [q, k, v, cu_seqlens, cu_seqlens.clone()]


def _copies_elsewhere(x: Any) -> list[Any]:
    """Tensors like x, more than the bridge remembers, each in its own place."""
    apart = 256 // x.element_size()  # what begins at no multiple of 256 bytes would be copied
    memory = x.new_zeros(_PLACES * apart + x.numel())
    return [memory[i * apart :][: x.numel()].view(x.shape) for i in range(_PLACES)]


@contextlib.contextmanager
def _no_waiting() -> Iterator[None]:
    """Device-to-host copies of JAX's and synchronisation of torch's raise."""
    import torch

    if _DEVICE.value == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        with jax.transfer_guard_device_to_host("disallow_explicit"):
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _alternate(functions: dict[str, Callable[[], Any]]) -> dict[str, Timing]:
    """Times of one call of each, taking turns; a GPU is waited for once a turn."""
    import torch

    def subject(function: Callable[[], Any]) -> Subject:
        if _DEVICE.value == "cpu":  # an array goes to torch only when it is ready
            return Subject(lambda i: jax.block_until_ready(_arrays(function())))

        def wait(result: Any) -> None:
            torch.accelerator.synchronize()
            jax.block_until_ready(_arrays(result))

        return Subject(lambda i: function(), wait)

    subjects = {name: subject(function) for name, function in functions.items()}
    return take_turns(subjects, turns=_REPETITIONS.value, least_launches=_CALLS.value)


def _arrays(result: Any) -> list[jax.Array]:
    return [x for x in jax.tree.leaves(result) if isinstance(x, jax.Array)]


if __name__ == "__main__":
    run("bridge_overhead", main)
