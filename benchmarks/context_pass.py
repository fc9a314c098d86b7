# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""A whole prefill pass over a long context: BF16, FP8 with dynamic scales, FP8 with static ones.

    python benchmarks/context_pass.py
    python benchmarks/context_pass.py --contexts=1047552 --levels=layer --max_time_of_bf16=0.8

The new tokens attend to each other, causally and in BF16, and then to the context in segments. The
three ways take turns, so that each repeat of one has a matched repeat of the others, and ratios are
medians over the matched ones.

- attention: start_prefill, attend_new_tokens, attend_segment, called one after the other on K and V
  as an up-projection leaves them (K's own columns beside V, its shared ones apart).
- layer: jaxfp8.models' prefill_layer, one compiled program from hidden states and latent cache to
  the output of the layer.

Then the parts of a segment alone: up-projection, quantization (in BF16: packing), attention, merge.

The attention pass is compared with float64 attention for a sample of rows and heads, the layer in
FP8 with the layer in BF16.

Bounds, besides those given: a first call, compilation included, takes at most --max_first_call_s;
after that of the shortest context nothing is compiled, neither from segment to segment nor for a
longer context.
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from common import backends, compilations, inputs, layers, reference, ways
from common.inputs import Batch, segment_lengths
from common.program import REFCHECK, Recorder, choose, progress, run, start_device, token_counts
from common.result import Check
from common.timing import Subject, Timing, take_turns
from common.ways import Way, chosen_backend, static_scales

import jaxfp8
from jaxfp8 import packing
from jaxfp8.cli import CommandError
from jaxfp8.models import KIMI_K3, SMALL, MlaConfig, mla
from jaxfp8.models.prefill import prefill_layer
from jaxfp8.ops.attention.base import Precision
from jaxfp8.states import merge_float32

_LEVELS = ("attention", "layer")

_CONTEXTS = flags.DEFINE_list("contexts", ["131072", "524288", "1047552"], "tokens of context")
_SEGMENT = flags.DEFINE_integer("segment", 65536, "tokens of a segment", lower_bound=1)
_NEW_TOKENS = flags.DEFINE_integer("new_tokens", 4096, "new tokens", lower_bound=1)
_HEADS = flags.DEFINE_integer("heads", 12, "heads: those of one rank", lower_bound=1)
_SELECTED = flags.DEFINE_list("levels", list(_LEVELS), f"some of {', '.join(_LEVELS)}")
_BACKENDS = flags.DEFINE_list("backends", None, "of this library; its own choice if not given")
_WAYS = flags.DEFINE_list("ways", list(ways.NAMES), f"some of {', '.join(ways.NAMES)}")
_SMALL = flags.DEFINE_bool("small", False, "layers of the small preset, not of Kimi-K3's size")
_REPEATS = flags.DEFINE_integer("repeats", 3, "matched repeats", lower_bound=1)
_BURST_MS = flags.DEFINE_float("burst_ms", 100.0, "least length of a repeat", lower_bound=0.0)
_PARTS = flags.DEFINE_bool("parts", True, "also time the parts of a segment")
_MAX_FIRST_CALL_S = flags.DEFINE_float(
    "max_first_call_s", 60.0, "bound on the seconds of a first call, which compiles"
)
_MAX_TIME_OF_BF16 = flags.DEFINE_float(
    "max_time_of_bf16", None, "bound on the time of FP8 with static scales over that of BF16"
)
_MAX_TIME_OF_DYNAMIC = flags.DEFINE_float(
    "max_time_of_dynamic", None, "bound on the time of static scales over that of dynamic ones"
)


def main(recorder: Recorder) -> None:
    """Runs every context at every level, the shortest first."""
    levels = choose("levels", _SELECTED.value, _LEVELS)
    contexts = token_counts("contexts", _CONTEXTS.value)
    selected = ways.select(_WAYS.value)
    names_of_ways = {way.name for way in selected}
    for flag, needed in (
        (_MAX_TIME_OF_BF16, {"fp8-static"}),
        (_MAX_TIME_OF_DYNAMIC, {"fp8-static", "fp8-dynamic"}),
    ):
        if flag.value is not None and not needed <= names_of_ways:
            missing = " and ".join(sorted(needed))
            raise CommandError(f"--{flag.name}: expected {missing} among --ways: it bounds that")
    start_device()
    names: list[str | None] = [None]
    if _BACKENDS.value is not None:
        names = list(backends.select(_BACKENDS.value, "fp8", _HEADS.value))
    for level in levels:
        one = AttentionPass() if level == "attention" else LayerPass(contexts[-1])
        for backend in names:
            for context in contexts:
                _run_pass(recorder, level, one, context, selected, backend, context == contexts[0])
        if _PARTS.value and isinstance(one, LayerPass):
            for backend in names:
                _run_parts(recorder, one, contexts, selected, backend)


def _run_pass(
    recorder: Recorder,
    level: str,
    one: AttentionPass | LayerPass,
    context: int,
    selected: list[Way],
    backend: str | None,
    compiles: bool,
) -> None:
    """The ways beside each other; `compiles` says that this pass is the first on its backend."""
    subjects, first_seconds, first_programs, errors = {}, {}, {}, {}
    for way in selected:
        subject = subjects[way.name] = one.subject(context, way, backend)
        start = time.perf_counter()
        with compilations.counted() as compiled:
            output = subject.run()
        first_seconds[way.name] = time.perf_counter() - start
        first_programs[way.name] = compiled.programs
        errors[way.name] = one.check(context, way, output)
    with (
        progress(_REPEATS.value * len(selected), f"{level} {context}") as bar,
        compilations.counted() as recompiled,
    ):
        times = take_turns(
            subjects,
            turns=_REPEATS.value,
            least_seconds=1e-3 * _BURST_MS.value,
            on_burst=bar.update,
        )
    # Of the process up to here; a CPU has no such figure.
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    memory = {} if peak is None else {"peak_gb": peak / 1e9}
    for way in selected:
        timing = times[way.name]
        programs = recompiled.programs + (0 if compiles else first_programs[way.name])
        details: dict[str, Any] = {"programs_of_first_call": first_programs[way.name], **memory}
        bounds = [
            Check("seconds of the first call", first_seconds[way.name], _MAX_FIRST_CALL_S.value),
            Check("programs compiled later", programs, 0),
        ]
        of_bf16 = _matched_ratio(timing, times["bf16"])
        if way.precision == "fp8":
            details["times_bf16"] = 1 / of_bf16
        if way.static and _MAX_TIME_OF_BF16.value is not None:
            bounds.append(Check("time over that of BF16", of_bf16, _MAX_TIME_OF_BF16.value))
        if way.static and "fp8-dynamic" in times:
            of_dynamic = _matched_ratio(timing, times["fp8-dynamic"])
            details["time_of_dynamic"] = of_dynamic
            if _MAX_TIME_OF_DYNAMIC.value is not None:
                limit = _MAX_TIME_OF_DYNAMIC.value
                bounds.append(Check("time over that of dynamic scales", of_dynamic, limit))
        recorder.add(
            what=f"{level} pass",
            case=way.name,
            shape=_shape(context),
            dtype=way.dtype,
            backend=chosen_backend(way.precision, backend, _HEADS.value),
            flops=one.flops(context),
            errors=errors[way.name],
            bounds=tuple(bounds),
            details=details,
            **timing.fields,
        )


def _matched_ratio(a: Timing, b: Timing) -> float:
    return statistics.median(x / y for x, y in zip(a.seconds, b.seconds, strict=True))


def _shape(context: int) -> dict[str, int]:
    return {
        "context": context,
        "new_tokens": _NEW_TOKENS.value,
        "heads": _HEADS.value,
        "segment": _SEGMENT.value,
    }


def _attention_flops(context: int) -> int:
    new = _NEW_TOKENS.value
    batches = (Batch((new,), (context,), False), Batch((new,), (new,), True))
    return sum(batch.flops(_HEADS.value) for batch in batches)


class AttentionPass:
    """The pass on K and V that lie in memory, as views of what an up-projection writes.

    Segments are made as contexts ask for them, and kept: the longest context holds 6.6 GB of
    1,047,552 tokens and 12 heads.
    """

    def __init__(self) -> None:
        new, heads = _NEW_TOKENS.value, _HEADS.value
        self.q = inputs.normal(0, new, heads, inputs.QK_HEAD_DIM)
        self.new = self._make_segment(1, new)
        self.cu_q = inputs.cu_seqlens([new])
        self.segments: list[Any] = []
        self.exact: dict[int, tuple[reference.Exact, reference.Sample]] = {}
        k, v = self.new
        self.scales = static_scales(self.q, k.materialize(), v)

    @staticmethod
    def _make_segment(seed: int, tokens: int) -> Any:
        return inputs.views(*inputs.up_projected(seed, tokens, _HEADS.value))

    def flops(self, context: int) -> int:
        """Of the attention."""
        return _attention_flops(context)

    def subject(self, context: int, way: Way, backend: str | None) -> Subject:
        """The pass; `output` gives out and LSE on the host."""
        lengths = segment_lengths(context, _SEGMENT.value)
        while len(self.segments) < len(lengths):
            self.segments.append(self._make_segment(2 + len(self.segments), _SEGMENT.value))
        cu_k = [inputs.cu_seqlens([length]) for length in lengths]
        scales = self.scales if way.static else jaxfp8.LayerScales(None, None, None)

        begin, step = _pass_functions(way.precision, backend)

        def launch(number: int) -> Any:
            state = begin(self.q, *self.new, self.cu_q, scales)
            for (k, v), cu in zip(self.segments, cu_k, strict=False):
                state = step(state, k, v, cu, scales)
            return state.attention_state

        return Subject(launch, output=lambda state: tuple(map(np.asarray, state)))

    def check(self, context: int, way: Way, output: Any) -> tuple[Check, ...]:
        """Against float64, for a sample."""
        if not REFCHECK.value:
            return ()
        (out, lse), (exact, sampled) = output, self._exact(context)
        return reference.compare(out, lse, exact, sampled, way.precision)

    def _exact(self, context: int) -> tuple[reference.Exact, reference.Sample]:
        if context not in self.exact:
            self.exact[context] = self._compute_exact(context)
        return self.exact[context]

    def _compute_exact(self, context: int) -> tuple[reference.Exact, reference.Sample]:
        own = Batch((_NEW_TOKENS.value,), (_NEW_TOKENS.value,), True)
        sampled = reference.sample(own, _HEADS.value, rows=16, heads=2)
        q = np.asarray(self.q[sampled.rows][:, sampled.heads])
        lengths = segment_lengths(context, _SEGMENT.value)

        def chunk(segment: Any, length: int) -> tuple[np.ndarray, np.ndarray]:
            key, value = segment
            # float32 from the device: NumPy is slow with bfloat16.
            nope_and_v = np.asarray(value.array[:length, sampled.heads].astype(jnp.float32))
            rope = np.asarray(key.rope[:length].astype(jnp.float32))
            rope = rope[:, None].repeat(len(sampled.heads), 1)
            k = np.concatenate([nope_and_v[:, :, : inputs.NOPE_DIM], rope], axis=2)
            return k, nope_and_v[:, :, inputs.NOPE_DIM :]

        def chunks() -> Any:
            for segment, length in zip(self.segments, lengths, strict=False):
                yield chunk(segment, length)
            yield chunk(self.new, _NEW_TOKENS.value)

        # Context first, then the new tokens up to the row's own.
        visible = context + sampled.rows + 1
        scale = inputs.QK_HEAD_DIM**-0.5
        return reference.attention_rows(q, chunks(), visible, scale), sampled


@functools.cache
def _pass_functions(precision: Precision, backend: str | None) -> tuple[Any, Any]:
    """The beginning of a pass and a step of it, compiled once for all contexts."""

    @jax.jit
    def begin(q: Any, k: Any, v: Any, cu_q: Any, scales: Any) -> Any:
        state = jaxfp8.start_prefill(
            q, cu_q, precision=precision, q_descale=scales.q, backend=backend
        )
        return jaxfp8.attend_new_tokens(state, k, v)

    @jax.jit
    def step(state: Any, k: Any, v: Any, cu_k: Any, scales: Any) -> Any:
        return jaxfp8.attend_segment(state, k, v, cu_k, k_descale=scales.k, v_descale=scales.v)

    return begin, step


@functools.cache
def _layer_function(config: MlaConfig, precision: Precision, backend: str | None) -> Any:
    """prefill_layer within a jitted function: called alone it reads the batch's values, to check
    them, and waits for them.
    """

    @functools.partial(jax.jit, donate_argnums=2)
    def layer(weights: Any, hidden: Any, cache: Any, batch: Any, scales: Any) -> Any:
        return prefill_layer(
            config, weights, hidden, cache, batch,
            segment=_SEGMENT.value, precision=precision, scales=scales, backend=backend,
        )  # fmt: skip

    return layer


class LayerPass:
    """The pass from hidden states and latent cache to the output of the layer, a single program.

    The cache is as long as the longest context, whatever part of it is one, so that the program is
    compiled once. It is donated to each launch and comes back: what is written into it, the latents
    of the new tokens behind the context, is as random as what was there.
    """

    def __init__(self, longest: int) -> None:
        new = _NEW_TOKENS.value
        self.config = SMALL if _SMALL.value else KIMI_K3
        self.weights = layers.seeded_weights(self.config, 0, _HEADS.value)
        self.hidden = inputs.normal(0, new, self.config.hidden_size)
        self.longest = longest
        self.cache: jax.Array | None = None
        self.bf16_output: tuple[int, np.ndarray] | None = None
        cached = layers.seeded_latents(self.config, 1, new)
        self.q, k, v = layers.projected(self.config, self.weights, self.hidden, cached)
        self.scales = static_scales(self.q, k, v)
        self.score_norm = reference.first_rows_norm(self.q, k, self.config.softmax_scale)

    def flops(self, context: int) -> int:
        """Of the attention and of the up-projection."""
        head_dims = self.config.qk_nope_head_dim + self.config.v_head_dim
        up_projection = 2 * context * self.config.kv_lora_rank * _HEADS.value * head_dims
        return _attention_flops(context) + up_projection

    def subject(self, context: int, way: Way, backend: str | None) -> Subject:
        """The pass; `output` gives the layer's output on the host."""
        if self.cache is None:
            self.cache = layers.seeded_latents(self.config, 0, self.longest + _NEW_TOKENS.value)
        capacity = self.longest + _NEW_TOKENS.value
        batch = layers.one_sequence(_NEW_TOKENS.value, context, capacity)
        scales = self.scales if way.static else None
        layer = _layer_function(self.config, way.precision, backend)

        def launch(number: int) -> Any:
            result = layer(self.weights, self.hidden, self.cache, batch, scales)
            self.cache = result.cache
            return result.out

        return Subject(launch, output=np.asarray)

    def check(self, context: int, way: Way, output: Any) -> tuple[Check, ...]:
        """FP8 against BF16, which comes first."""
        if not REFCHECK.value:
            return ()
        if way.precision == "bf16":
            self.bf16_output = (context, output)
            return ()
        assert self.bf16_output is not None and self.bf16_output[0] == context
        error = reference.relative_error(output, self.bf16_output[1])
        limit = reference.out_limit("fp8", self.score_norm)
        return (Check("relative error to BF16", error, limit),)

    def parts(self, way: Way, backend: str | None) -> dict[str, Subject]:
        """What a segment goes through, each alone, at the size of one segment."""
        name = chosen_backend(way.precision, backend, _HEADS.value)
        cached = layers.seeded_latents(self.config, 0, _SEGMENT.value)
        cu_q = inputs.cu_seqlens([_NEW_TOKENS.value])
        cu_k = inputs.cu_seqlens([_SEGMENT.value])
        q_descale, k_descale, v_descale = self.scales if way.static else (None, None, None)
        up_project, attend, merge = _part_functions(self.config)

        @jax.jit
        def quantize(k: Any, v: Any, k_descale: Any, v_descale: Any) -> Any:
            return packing.pack_context(k, v, cu_k, k_descale, v_descale, way.precision, None, name)

        k, v = up_project(self.weights, cached)
        context = quantize(k, v, k_descale, v_descale)
        query = packing.pack_query(
            self.q, cu_q, q_descale, way.precision, None, name, v_head_dim=inputs.V_HEAD_DIM
        )
        state = attend(query, context)
        acc = state.out.astype(jnp.float32)
        return {
            "up-projection": Subject(lambda i: up_project(self.weights, cached)),
            "quantization": Subject(lambda i: quantize(k, v, k_descale, v_descale)),
            "attention": Subject(lambda i: attend(query, context)),
            "merge": Subject(lambda i: merge(acc, state.lse, state.out, state.lse)),
        }


@functools.cache
def _part_functions(config: MlaConfig) -> tuple[Any, Any, Any]:
    """Up-projection, attention and merge, each compiled once for all ways that it is alike in."""
    return (
        jax.jit(functools.partial(mla.up_project, config)),
        jax.jit(functools.partial(jaxfp8.attend, causal=False, softmax_scale=config.softmax_scale)),
        jax.jit(merge_float32),
    )


def _run_parts(
    recorder: Recorder,
    layer: LayerPass,
    contexts: list[int],
    selected: list[Way],
    backend: str | None,
) -> None:
    layer.cache = None  # room for what a segment becomes
    for way in selected:
        subjects = layer.parts(way, backend)
        with progress(_REPEATS.value * len(subjects), f"parts, {way.name}") as bar:
            times = take_turns(
                subjects,
                turns=_REPEATS.value,
                least_launches=3,
                least_seconds=1e-3 * _BURST_MS.value / 10,
                on_burst=bar.update,
            )
        total = sum(timing.median_ms for timing in times.values())
        for name, timing in times.items():
            per_pass = {
                f"ms_of_{context}": len(segment_lengths(context, _SEGMENT.value)) * timing.median_ms
                for context in contexts
            }
            recorder.add(
                what=f"segment: {name}",
                case=way.name,
                shape={k: v for k, v in _shape(0).items() if k != "context"},
                dtype=way.dtype,
                backend=chosen_backend(way.precision, backend, _HEADS.value),
                details={"share": timing.median_ms / total, **per_pass},
                **timing.fields,
            )


if __name__ == "__main__":
    run("context_pass", main)
