# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Quantizing K and V of a segment: how near to a copy of as many bytes?

    python benchmarks/quantize.py
    python benchmarks/quantize.py --tokens=65536,4096 --peers=torch-compile

- static: descales given: one pass.
- dynamic: descales from the data: two reads, one write.
- assembled: static, K from its two parts as an up-projection leaves them (128 columns of each head
  beside V, 64 that all heads share), without a K in BF16 in memory.

The library's backends write their kernels' layouts (quantize_context). Beside them stand the same
arithmetic on token-major arrays in plain XLA (`xla-plain`) and in PyTorch, compiled and eager. The
ceiling is a copy measured in the same run; bytes are those that must be read and written.

What a backend packed is checked by attention over it, against float64 attention of the BF16 values;
token-major results by the values that they stand for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from common import backends, bursts, ceilings, inputs, peers, reference, torch_on_gpu
from common.inputs import Batch, pick
from common.program import REFCHECK, Recorder, choose, one_line, run, start_device, token_counts
from common.result import Ceiling, Check
from common.timing import Subject

import jaxfp8
from jaxfp8 import packing
from jaxfp8.cli import CommandError
from jaxfp8.formats import MIN_DESCALE, Fp8Format

_KINDS = ("static", "dynamic", "assembled")
_PEERS = ("xla-plain", "torch-compile", "torch-eager")

_TOKENS = flags.DEFINE_list("tokens", ["65536"], "tokens of K and V")
_HEADS = flags.DEFINE_integer("heads", 12, "heads", lower_bound=1)
_SELECTED = flags.DEFINE_list("kinds", list(_KINDS), f"some of {', '.join(_KINDS)}")
_BACKENDS = flags.DEFINE_list("backends", None, "of this library; its choices if not given")
_NAMES = flags.DEFINE_list("peers", None, f"some of {', '.join(_PEERS)}; all if not given")
_COPY_MB = flags.DEFINE_integer("copy_mb", 400, "megabytes of the copy", lower_bound=1)

_QUERIES = 64


@dataclasses.dataclass(frozen=True)
class Inputs:
    """K and V, and the parts that they are made of, bfloat16.

    Attributes:
      nope_and_v: [T, H, 128 + 128].
      rope: [T, 64].
      k: [T, H, 192].
      v: [T, H, 128].
    """

    nope_and_v: jax.Array
    rope: jax.Array
    k: jax.Array
    v: jax.Array


def main(recorder: Recorder) -> None:
    """Runs every number of tokens."""
    kinds = choose("kinds", _SELECTED.value, _KINDS)
    tokens = token_counts("tokens", _TOKENS.value)
    start_device()
    names = backends.select(_BACKENDS.value, "fp8", _HEADS.value)
    others = _select_peers()
    ceiling = ceilings.copy_ceiling(_COPY_MB.value) if bursts.CEILING.value else None
    for count in tokens:
        _run_case(recorder, count, kinds, names, others, ceiling)


def _select_peers() -> list[str]:
    reason = peers.torch_missing()
    if _NAMES.value is None:
        return [name for name in _PEERS if reason is None or not name.startswith("torch")]
    names = choose("peers", _NAMES.value, _PEERS, or_none=True)
    for name in names:
        if reason is not None and name.startswith("torch"):
            raise CommandError(f"--peers: {name} cannot run here: {reason}")
    return names


def _run_case(
    recorder: Recorder,
    tokens: int,
    kinds: Sequence[str],
    names: Sequence[str],
    others: Sequence[str],
    ceiling: Ceiling | None,
) -> None:
    fmt = backends.fp8_format("fp8")
    assert fmt is not None
    packed_bytes = tokens * _HEADS.value * (inputs.QK_HEAD_DIM + inputs.V_HEAD_DIM)
    sets = [_draw(i, tokens) for i in range(inputs.sets_past_the_cache(packed_bytes))]
    check = _PackedCheck(sets[0]) if REFCHECK.value else None
    for kind in kinds:
        makers: dict[str, Callable[[], Subject]] = {
            name: functools.partial(_packed, kind, sets, name) for name in names
        }
        for name in others:
            maker = _xla_plain if name == "xla-plain" else functools.partial(_torch, name)
            makers[name] = functools.partial(maker, kind, sets, fmt)
        subjects: dict[str, Subject] = {}
        rows: dict[str, dict[str, Any]] = {}
        for name, make in makers.items():
            row = {
                "what": f"quantize {kind}",
                "case": f"{tokens} tokens",
                "shape": {
                    "tokens": tokens,
                    "heads": _HEADS.value,
                    "qk_head_dim": 192,
                    "v_head_dim": 128,
                },
                "dtype": fmt.name,
                "backend": name,
                "bytes": _bytes(kind, tokens),
                "ceiling": ceiling,
            }
            try:
                subject = make()
                output = subject.run()
            except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
                if name in others:
                    recorder.add(**row, unavailable=one_line(error))
                else:  # the library's own: it said before that it serves this
                    recorder.add_failure(error, **row)
                continue
            if check is not None:
                row["errors"] = (
                    check(output, name) if name in names else _values_check(output, sets[0])
                )
            subjects[name], rows[name] = subject, row
        for name, timing in bursts.timed(subjects, f"{tokens} tokens, {kind}").items():
            recorder.add(**rows[name], **timing.fields)


def _bytes(kind: str, tokens: int) -> int:
    """Read in BF16 and written in FP8."""
    heads = _HEADS.value
    written = tokens * heads * (inputs.QK_HEAD_DIM + inputs.V_HEAD_DIM)
    if kind == "assembled":
        columns = heads * (inputs.NOPE_DIM + inputs.V_HEAD_DIM) + inputs.ROPE_DIM
        return 2 * tokens * columns + written
    return (4 if kind == "dynamic" else 2) * written + written


def _draw(number: int, tokens: int) -> Inputs:
    nope_and_v, rope = inputs.up_projected(number, tokens, _HEADS.value)
    key, value = inputs.views(nope_and_v, rope)
    return Inputs(nope_and_v, rope, key.materialize(), value.materialize())


def _descale(fmt: Fp8Format) -> jax.Array:
    return jnp.full(_HEADS.value, inputs.AMAX / fmt.max, jnp.float32)


def _packed(kind: str, sets: list[Inputs], backend: str) -> Subject:
    """quantize_context, under jit as in a model."""
    fmt = backends.fp8_format("fp8")
    assert fmt is not None
    cu = inputs.cu_seqlens([sets[0].k.shape[0]])
    descale = None if kind == "dynamic" else _descale(fmt)

    @jax.jit
    def quantize(k: Any, v: Any, descale: Any) -> Any:
        return jaxfp8.quantize_context(
            k, v, cu, k_descale=descale, v_descale=descale, backend=backend
        )

    operands: list[Any] = [(x.k, x.v) for x in sets]
    if kind == "assembled":
        operands = [inputs.views(x.nope_and_v, x.rope) for x in sets]
    return Subject(lambda i: quantize(*pick(operands, i), descale))


def _xla_plain(kind: str, sets: list[Inputs], fmt: Fp8Format) -> Subject:
    """Token-major: `output` gives stored K and V with their descales."""

    @jax.jit
    def quantize(k: Any, v: Any, descale: Any) -> Any:
        results = []
        for x in (k, v):
            if kind == "dynamic":
                results.append(jaxfp8.dynamic_quantize_per_head(x, fmt))
            else:
                results.append((jaxfp8.quantize_per_head(x, descale, fmt), descale))
        return results

    @jax.jit
    def assembled(nope_and_v: Any, rope: Any, descale: Any) -> Any:
        key, value = inputs.views(nope_and_v, rope)
        return quantize(key.materialize(), value.materialize(), descale)

    descale = _descale(fmt)
    if kind == "assembled":
        parts = [(x.nope_and_v, x.rope) for x in sets]
        return Subject(lambda i: assembled(*pick(parts, i), descale), output=_on_host)
    pairs = [(x.k, x.v) for x in sets]
    return Subject(lambda i: quantize(*pick(pairs, i), descale), output=_on_host)


def _on_host(results: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(np.asarray(stored), np.asarray(descale)) for stored, descale in results]


def _torch(name: str, kind: str, sets: list[Inputs], fmt: Fp8Format) -> Subject:
    """Token-major, as `_xla_plain`."""
    import torch

    dtype = getattr(torch, fmt.name)
    descale = torch.utils.dlpack.from_dlpack(_descale(fmt))

    def one(x: Any) -> tuple[Any, Any]:
        scale = descale
        if kind == "dynamic":
            scale = (x.abs().amax((0, 2)).float() / fmt.max).clamp_min(MIN_DESCALE)
        return (x.float() / scale[:, None]).clamp(-fmt.max, fmt.max).to(dtype), scale

    def both(k: Any, v: Any) -> list[tuple[Any, Any]]:
        return [one(k), one(v)]

    def assembled(nope_and_v: Any, rope: Any) -> list[tuple[Any, Any]]:
        nope, v = nope_and_v.split([inputs.NOPE_DIM, inputs.V_HEAD_DIM], dim=2)
        shared = rope[:, None].expand(-1, nope.shape[1], -1)
        return both(torch.cat([nope, shared], dim=2), v)

    operands: list[Any] = [(x.k, x.v) for x in sets]
    function: Callable[..., Any] = both
    if kind == "assembled":
        operands, function = [(x.nope_and_v, x.rope) for x in sets], assembled
    operands = [tuple(map(torch.utils.dlpack.from_dlpack, pair)) for pair in operands]
    if name == "torch-compile":
        function = torch.compile(function)

    def output(results: Any) -> list[tuple[np.ndarray, np.ndarray]]:
        return [
            (stored.view(torch.uint8).cpu().numpy().view(fmt.dtype), scale.cpu().numpy())
            for stored, scale in results
        ]

    def launch(number: int) -> Any:
        with torch.inference_mode():
            return function(*pick(operands, number))

    return Subject(launch, torch_on_gpu.synchronize, output)


class _PackedCheck:
    """Attention of a few queries over what a backend packed."""

    def __init__(self, data: Inputs) -> None:
        tokens = data.k.shape[0]
        self.q = inputs.normal(10**6, _QUERIES, _HEADS.value, inputs.QK_HEAD_DIM)
        batch = Batch((_QUERIES,), (tokens,), False)
        self.sampled = reference.sample(batch, _HEADS.value)
        self.exact = reference.exact_attention(
            self.q, data.k, data.v, batch, self.sampled, inputs.QK_HEAD_DIM**-0.5
        )

    def __call__(self, context: Any, backend: str) -> tuple[Check, ...]:
        query = packing.pack_query(
            self.q, inputs.cu_seqlens([_QUERIES]), None, "fp8", None, backend,
            v_head_dim=inputs.V_HEAD_DIM,
        )  # fmt: skip
        state = jaxfp8.attend(query, context, causal=False)
        out, lse = np.asarray(state.out), np.asarray(state.lse)
        return reference.compare(out, lse, self.exact, self.sampled, "fp8")


def _values_check(output: Any, data: Inputs) -> tuple[Check, ...]:
    """Stored value times descale, against the BF16 value, over the first tokens."""
    few = slice(0, 4096)
    checks = []
    for name, x, (stored, descale) in zip("KV", (data.k, data.v), output, strict=True):
        values = stored[few].astype(np.float64) * descale[:, None]
        error = reference.relative_error(values, np.asarray(x[few]).astype(np.float64))
        checks.append(Check(f"relative error of {name}", error, reference.ROUNDING_LIMIT))
    return tuple(checks)


if __name__ == "__main__":
    run("quantize", main)
