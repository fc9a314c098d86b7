# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Attention, with what others offer for the same shapes beside it.

    python benchmarks/attention.py
    python benchmarks/attention.py --cases=mid --mixes=single,ragged --include_quantization
    python benchmarks/attention.py --cases=mid,late,mid-ragged
    python benchmarks/attention.py --tokens_q=16384 --tokens_k=16384 --causal --peers=torch-cudnn
    python benchmarks/attention.py --cases=mid --sustained=500
    python benchmarks/attention.py --cases=mid --backends=pallas_triton,xla --peers=torch-cudnn

Every backend that the library may choose here takes part (others by name), in FP8 and in BF16, and
every peer that is installed (PyTorch's scaled_dot_product_attention, JAX's dot_product_attention).
They take turns, in bursts of launches. A peer that does not serve a shape is listed with its
reason.

What is timed is all that a call does on the device. The library's inputs are packed before, as in a
prefill pass, where the queries are packed once; with --include_quantization there is a second row,
from BF16 inputs to the output, with static and with dynamic scales. With --sustained each also runs
so many launches back to back, at the power limit, where that takes at most five seconds.

Of every implementation a sample of rows and heads is compared with float64 attention of the BF16
inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from common import backends, bursts, ceilings, inputs, peers, reference
from common.inputs import Batch, Tensors, pick
from common.program import REFCHECK, Recorder, choose, one_line, run, start_device
from common.result import Ceiling
from common.timing import Subject, Timing, burst

import jaxfp8
from jaxfp8 import packing
from jaxfp8.cli import CommandError

# New tokens, keys, causal. The published cases of this kernel's kin.
_CASES = {
    "early": (4096, 4096, True),
    "mid": (4096, 65536, False),
    "late": (4096, 65536, True),
    "16k": (16384, 16384, True),
}

_NAMES = [*_CASES, *(f"{case}-{mix}" for case in _CASES for mix in inputs.MIXES[1:])]
_SELECTED = flags.DEFINE_list("cases", ["early", "mid", "late"], f"some of {', '.join(_NAMES)}")
_TOKENS_Q = flags.DEFINE_integer("tokens_q", None, "new tokens, in place of --cases", lower_bound=1)
_TOKENS_K = flags.DEFINE_integer("tokens_k", None, "keys, in place of --cases", lower_bound=1)
_CAUSAL = flags.DEFINE_bool("causal", False, "with --tokens_q and --tokens_k: aligned bottom right")
_MIXES = flags.DEFINE_list(
    "mixes", ["single"], f"some of {', '.join(inputs.MIXES)}, for cases that name none"
)
_SEQUENCES = flags.DEFINE_integer("sequences", 16, "of uniform and ragged mixes", lower_bound=1)
_HEADS = flags.DEFINE_integer("heads", 12, "heads", lower_bound=1)
_BACKENDS = flags.DEFINE_list("backends", None, "of this library; its choices if not given")
_PRECISIONS = flags.DEFINE_list("precisions", list(backends.PRECISIONS), "of this library")
_PEERS = flags.DEFINE_list("peers", None, f"some of {', '.join(peers.NAMES)}; all if not given")
_QUANTIZATION = flags.DEFINE_bool("include_quantization", False, "also from BF16 inputs")
_SUSTAINED = flags.DEFINE_integer("sustained", 0, "launches back to back", lower_bound=0)
_MATMUL_SIZE = flags.DEFINE_integer("matmul_size", 8192, "of the ceiling", lower_bound=1)

_LONGEST_SUSTAINED_MS = 5_000

_ERRORS = (RuntimeError, NotImplementedError, TypeError, ValueError)


def main(recorder: Recorder) -> None:
    """Runs the cases."""
    cases = _cases(choose("mixes", _MIXES.value, inputs.MIXES))
    named = choose("precisions", _PRECISIONS.value, backends.PRECISIONS)
    precisions = [precision for precision in backends.PRECISIONS if precision in named]
    start_device()
    own = {
        precision: backends.select(_BACKENDS.value, precision, _HEADS.value)
        for precision in precisions
    }
    others = peers.select(_PEERS.value)
    ceiling_of = {}
    if bursts.CEILING.value:
        ceiling_of = {
            precision: ceilings.matmul_ceiling(
                precision, backends.fp8_format(precision), _MATMUL_SIZE.value
            )
            for precision in backends.PRECISIONS
            if precision == "bf16" or own.get("fp8")
        }
    for case, batch in cases.items():
        try:
            run_case(recorder, case, batch, own, others, ceiling_of)
        except _ERRORS as error:  # no room for its inputs, say: others may run
            recorder.add_failure(error, what="attention", case=case)


def _cases(mixes: list[str]) -> dict[str, Batch]:
    """The batches by name, in the order asked for."""
    shapes: dict[str, tuple[int, int, bool]] = _CASES
    if _TOKENS_Q.value is None and _TOKENS_K.value is None:
        names = choose("cases", _SELECTED.value, _NAMES)
    elif _TOKENS_Q.value is None or _TOKENS_K.value is None:
        raise CommandError("--tokens_q and --tokens_k: expected both or none")
    else:
        causal = _CAUSAL.value
        names = [f"{_TOKENS_Q.value}x{_TOKENS_K.value}{'-causal' if causal else ''}"]
        shapes = {names[0]: (_TOKENS_Q.value, _TOKENS_K.value, causal)}
    cases = {}
    for name in names:
        shape, its_mixes = name, mixes
        if name not in shapes:  # with its mix
            shape, _, mix = name.partition("-")
            its_mixes = [mix]
        for mix in its_mixes:
            case = shape if mix == "single" else f"{shape}-{mix}"
            cases[case] = inputs.batch(mix, *shapes[shape], _SEQUENCES.value)
    return cases


def run_case(
    recorder: Recorder,
    case: str,
    batch: Batch,
    own: dict[Any, list[str]],
    others: list[peers.Peer],
    ceiling_of: dict[Any, Ceiling | None],
) -> None:
    """Measures all implementations of a batch, and records them in order."""
    sets = inputs.tensor_sets(batch.tokens_q, batch.tokens_k, _HEADS.value)
    makers = _makers(batch, sets, own, others)
    common = {
        "case": case,
        "shape": {
            "tokens_q": batch.tokens_q,
            "tokens_k": batch.tokens_k,
            "heads": _HEADS.value,
            "qk_head_dim": inputs.QK_HEAD_DIM,
            "v_head_dim": inputs.V_HEAD_DIM,
            "causal": batch.causal,
            "sequences": len(batch.lengths_q),
        },
        "flops": batch.flops(_HEADS.value),
    }
    sampled = reference.sample(batch, _HEADS.value)
    scale = inputs.QK_HEAD_DIM**-0.5
    # A case spends most of its time on the host: on compiling kernels, which other threads can do
    # at the same time, and on the reference. What peers compile may try kernels out on the device,
    # and is left alone.
    with ThreadPoolExecutor() as pool:
        started = {
            key: pool.submit(_first_run, make)
            for key, make in makers.items()
            if key[2] not in peers.NAMES
        }
        exact = None
        if REFCHECK.value:
            exact = reference.exact_attention(*sets[0], batch, sampled, scale)
    subjects: dict[str, Subject] = {}
    fields: dict[str, dict[str, Any]] = {}
    for key_of_maker, make in makers.items():
        what, precision, name = key_of_maker
        dtype = backends.dtype_name(precision)
        row = {"what": what, "dtype": dtype, "backend": name, **common}
        try:
            run_before = started.get(key_of_maker)
            if run_before is not None and run_before.exception() is None:
                subject, (out, lse) = run_before.result()
            else:  # a peer; or one that had no room beside the others, and may have it alone
                subject, (out, lse) = _first_run(make)
        except _ERRORS as error:
            if name in peers.NAMES:
                recorder.add(**row, unavailable=one_line(error))
            else:  # the library's own: it said before that it serves this
                recorder.add_failure(error, **row)
            continue
        if exact is not None:
            row["errors"] = reference.compare(out, lse, exact, sampled, precision)
        row["ceiling"] = ceiling_of.get(precision)
        key = f"{what} {dtype} {name}"
        subjects[key], fields[key] = subject, row
    times = bursts.timed(subjects, case)
    sustained = _sustained(subjects, times)
    for key, timing in times.items():
        recorder.add(
            **fields[key],
            **timing.fields,
            details=_details(key, timing, times, fields, sustained.get(key)),
        )


def _first_run(make: Callable[[], Subject]) -> tuple[Subject, Any]:
    """A subject, and its output."""
    subject = make()
    return subject, subject.run()


def _makers(
    batch: Batch, sets: list[Tensors], own: dict[Any, list[str]], others: list[peers.Peer]
) -> dict[tuple[str, Any, str], Callable[[], Subject]]:
    """How to make each implementation, by what it does, precision and name."""
    makers: dict[tuple[str, Any, str], Callable[[], Subject]] = {}
    for precision, names in own.items():
        for name in names:
            makers["attention", precision, name] = functools.partial(
                _attention, batch, sets, precision, name
            )
            if _QUANTIZATION.value and precision == "fp8":
                for scales in ("static", "dynamic"):
                    what = f"attention with {scales} quantization"
                    makers[what, precision, name] = functools.partial(
                        _from_bf16, batch, sets, name, scales == "static"
                    )
    for peer in others:
        makers["attention", peer.precision, peer.name] = functools.partial(peer.make, batch, sets)
    return makers


def _attention(batch: Batch, sets: list[Tensors], precision: Any, backend: str) -> Subject:
    """Attention alone, of inputs packed before."""
    cu_q, cu_k = inputs.cu_seqlens(batch.lengths_q), inputs.cu_seqlens(batch.lengths_k)
    attend = jax.jit(functools.partial(jaxfp8.attend, causal=batch.causal))
    packed = []
    for q, k, v in sets:
        query = packing.pack_query(
            q, cu_q, None, precision, None, backend, v_head_dim=inputs.V_HEAD_DIM
        )
        packed.append(
            (query, packing.pack_context(k, v, cu_k, None, None, precision, None, backend))
        )
    return Subject(lambda i: attend(*pick(packed, i)), output=_on_host)


def _from_bf16(batch: Batch, sets: list[Tensors], backend: str, static: bool) -> Subject:
    """Quantization and attention, under jit as in a model: outside of it cu_seqlens are read back
    and checked at every call.
    """
    cu_q, cu_k = inputs.cu_seqlens(batch.lengths_q), inputs.cu_seqlens(batch.lengths_k)
    scales = None
    if static:
        fmt = backends.fp8_format("fp8")
        assert fmt is not None
        descale = jnp.full(_HEADS.value, inputs.AMAX / fmt.max, jnp.float32)
        scales = jaxfp8.LayerScales(descale, descale, descale)

    @jax.jit
    def prefill(q: Any, k: Any, v: Any, scales: Any) -> jaxfp8.AttentionState:
        return jaxfp8.prefill_attention(
            q, k, v, cu_q, cu_k, causal=batch.causal, scales=scales, backend=backend
        )

    return Subject(lambda i: prefill(*pick(sets, i), scales), output=_on_host)


def _on_host(state: jaxfp8.AttentionState) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(state.out), np.asarray(state.lse)


def _sustained(subjects: dict[str, Subject], times: dict[str, Timing]) -> dict[str, float]:
    """Milliseconds a launch, back to back; not of what would take longer than it is worth."""
    launches = _SUSTAINED.value
    return {
        key: 1e3 * burst(subject, launches)
        for key, subject in subjects.items()
        if 0 < launches * times[key].median_ms <= _LONGEST_SUSTAINED_MS
    }


def _details(
    key: str,
    timing: Timing,
    times: dict[str, Timing],
    fields: dict[str, dict[str, Any]],
    sustained: float | None,
) -> dict[str, Any]:
    """How much faster than the fastest peer of the same run, and the sustained rate."""
    details: dict[str, Any] = {}
    rivals = {fields[k]["backend"]: times[k].median_ms for k in times}
    rivals = {name: ms for name, ms in rivals.items() if name in peers.NAMES}
    if rivals and fields[key]["backend"] not in peers.NAMES:
        details["best_peer"] = min(rivals, key=lambda name: rivals[name])
        details["times_best_peer"] = min(rivals.values()) / timing.median_ms
    if sustained is not None:
        details["sustained_ms"] = sustained
        details["sustained_tflops"] = fields[key]["flops"] / sustained / 1e9
    return details


if __name__ == "__main__":
    run("attention", main)
