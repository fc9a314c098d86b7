# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""torch.ops.jaxfp8: the operators, each with a fake implementation for torch.compile.

The functions of the package are a thin layer over these. They are registered with
torch.library.Library and not as torch.library.custom_op, which costs more for every call
(benchmarks/bridge_overhead.py measures both).

An operator returns new memory, never a tensor that it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import torch
from torch import Tensor

import jaxfp8
from jaxfp8 import HeadSlice, LayerScales
from jaxfp8_torch import buckets, checks, compiled, crossing, devices, dlpack, runtime

_library = torch.library.Library("jaxfp8", "DEF")


def _register(function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = function.__name__
    schema = torch.library.infer_schema(function, mutates_args=())
    _library.define(
        name + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    )
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"jaxfp8::{name}", fake, lib=_library)


class _Columns(NamedTuple):
    """`size` columns from `start` of every head of a tensor, for a HeadSlice."""

    whole: Tensor
    start: int
    size: int


def _run(program: Callable[..., Any], *operands: Tensor | _Columns) -> list[Tensor]:
    """Calls a compiled program with tensors, the last of them a Tensor; its outputs as tensors."""
    # Held to the end: before the outputs cross, another thread could be given their memory.
    tensors = [crossing.readable(x.whole if isinstance(x, _Columns) else x) for x in operands]
    arrays: list[Any] = crossing.to_jax(*tensors)
    for index, x in enumerate(operands):
        if isinstance(x, _Columns):
            arrays[index] = HeadSlice(arrays[index], x.start, x.size)
    outputs = program(*arrays)
    return crossing.to_torch(*outputs) if outputs else []


def _rows(name: str, x: Tensor, capacity: int) -> Tensor | _Columns:
    """x [T, H, D] with the rows of its bucket: in place where it has them, else in a copy."""
    whole, start = dlpack.heads(name, x, may_copy=True)
    if x.shape[0] != capacity:
        return buckets.pad_rows(x, capacity)
    return whole if whole.shape == x.shape else _Columns(whole, start, x.shape[2])


def _pack(
    cu_seqlens: Sequence[Tensor | None], descales: Sequence[Tensor | None]
) -> tuple[Tensor, compiled.Layout]:
    """The small vectors of a call as one, which crosses once.

    Every crossing costs more than the copy, which also takes vectors of any alignment: offsets are
    often views, four bytes into something. Batches are padded here with empty sequences.
    """
    pieces: list[Tensor] = []
    layout: list[int | None] = []
    for x in cu_seqlens:
        if x is None:
            layout.append(None)
            continue
        length = buckets.sequence_capacity(x.shape[0] - 1) + 1
        layout.append(length)
        pieces.append(x)
        if length > x.shape[0]:
            pieces.append(x[-1:].expand(length - x.shape[0]))
    for x in descales:
        layout.append(None if x is None else x.shape[0])
        if x is not None:
            pieces.append(x.view(torch.int32))
    return torch.cat(pieces), tuple(layout)


def _first(x: Tensor, tokens: int) -> Tensor:
    """The first tokens of an output [T, ...]."""
    return x if x.shape[0] == tokens else x[:tokens]


def _float32(x: Tensor | None) -> Tensor | None:
    """Descales in float64 are rounded, as jaxfp8 does."""
    return x.float() if isinstance(x, Tensor) and x.dtype == torch.float64 else x


def _lse(lse: Tensor, tokens: int, layout: str) -> Tensor:
    """The first tokens of an LSE, contiguous."""
    if layout == "TH":
        return _first(lse, tokens)
    return lse if lse.shape[1] == tokens else lse[:, :tokens].contiguous()


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    causal: bool,
    softmax_scale: float | None,
    precision: str,
    fmt: str | None,
    backend: str | None,
    lse_layout: str,
) -> tuple[Tensor, Tensor]:
    """Attention: out bfloat16 [Tq, H, Dv], and the LSE."""
    runtime.enter()
    scales = {
        f"scales.{name}": _float32(x)
        for name, x in (("q", q_descale), ("k", k_descale), ("v", v_descale))
    }
    arguments = {
        "q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k
    }  # fmt: skip
    device = devices.jax_device(checks.tensors(arguments | scales))
    if not (
        checks.heads_match(q, k, v)
        and checks.cu_seqlens_sound(cu_seqlens_q, q.shape[0])
        and checks.cu_seqlens_sound(cu_seqlens_k, k.shape[0])
        and cu_seqlens_q.shape == cu_seqlens_k.shape
        and all(checks.descale_sound(x, q.shape[1]) for x in scales.values())
    ):

        def refuse(given: dict[str, Any]) -> None:
            descales = [given.pop(name, None) for name in scales]
            jaxfp8.prefill_attention(
                **given, causal=causal, softmax_scale=softmax_scale,
                precision=cast(Any, precision), fmt=compiled.format_of(fmt), backend=backend,
                scales=None if descales[0] is None else LayerScales(*descales),
            )  # fmt: skip

        checks.let_jaxfp8_refuse(refuse, arguments | scales)
    packed, layout = _pack((cu_seqlens_q, cu_seqlens_k), tuple(scales.values()))
    program = compiled.prefill_attention(
        device, layout, causal, softmax_scale, precision, fmt, backend, lse_layout
    )
    tokens, rows = q.shape[0], buckets.context_capacity(k.shape[0])
    out, lse = _run(
        program,
        _rows("q", q, buckets.query_capacity(tokens)),
        _rows("k", k, rows),
        _rows("v", v, rows),
        packed,
    )
    return _first(out, tokens), _lse(lse, tokens, lse_layout)


def _fake_prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    for name, x in (("q", q), ("k", k), ("v", v)):
        dlpack.check_grad(name, x)
    tokens, num_heads, _ = q.shape
    lse_layout = options.get("lse_layout", rest[-1] if rest else "HT")
    shape = (tokens, num_heads) if lse_layout == "TH" else (num_heads, tokens)
    return (
        q.new_empty((tokens, num_heads, v.shape[2]), dtype=torch.bfloat16),
        q.new_empty(shape, dtype=torch.float32),
    )


def start_prefill(
    q: Tensor,
    cu_seqlens_q: Tensor,
    q_descale: Tensor | None,
    v_head_dim: int,
    softmax_scale: float | None,
    precision: str,
    fmt: str | None,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """FP8 q and its descale (both empty where q is attended with as it is), acc and lse."""
    runtime.enter()
    q_descale = _float32(q_descale)
    arguments = {"q": q, "cu_seqlens_q": cu_seqlens_q, "q_descale": q_descale}
    device = devices.jax_device(checks.tensors(arguments))
    if not (
        q.dim() == 3
        and checks.cu_seqlens_sound(cu_seqlens_q, q.shape[0])
        and checks.descale_sound(q_descale, q.shape[1])
    ):

        def refuse(given: dict[str, Any]) -> None:
            jaxfp8.start_prefill(
                **given, precision=cast(Any, precision), v_head_dim=v_head_dim,
                fmt=compiled.format_of(fmt), backend=backend,
            )  # fmt: skip

        checks.let_jaxfp8_refuse(refuse, arguments)
    packed, layout = _pack((cu_seqlens_q,), (q_descale,))
    program = compiled.start_prefill(
        device, layout, v_head_dim, softmax_scale, precision, fmt, backend
    )
    tokens = q.shape[0]
    quantized = _run(program, _rows("q", q, buckets.query_capacity(tokens)), packed)
    acc, lse = _nothing_seen(q, v_head_dim)
    if not quantized:
        return q.new_empty(0), lse.new_empty(0), acc, lse
    values, descale = quantized
    return _first(values, tokens), descale, acc, lse


def _fake_start_prefill(
    q: Tensor, cu_seqlens_q: Tensor, q_descale: Tensor | None, v_head_dim: int,
    softmax_scale: float | None, precision: str, fmt: str | None, backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dlpack.check_grad("q", q)
    acc, lse = _nothing_seen(q, v_head_dim)
    if precision == "bf16" or q.dtype != torch.bfloat16:
        return q.new_empty(0), lse.new_empty(0), acc, lse
    stored = getattr(torch, fmt or compiled.target_format(q.device))
    return q.new_empty(q.shape, dtype=stored), lse.new_empty(q.shape[1]), acc, lse


def _nothing_seen(q: Tensor, v_head_dim: int) -> tuple[Tensor, Tensor]:
    tokens, num_heads, _ = q.shape
    return (
        q.new_zeros((tokens, num_heads, v_head_dim), dtype=torch.float32),
        torch.full((num_heads, tokens), -torch.inf, dtype=torch.float32, device=q.device),
    )


def attend(
    q: Tensor,
    q_descale: Tensor | None,
    cu_seqlens_q: Tensor,
    acc: Tensor,
    lse: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_k: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    softmax_scale: float | None,
    precision: str,
    fmt: str | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """One step of a pass; cu_seqlens_k None: the keys are the new tokens' own, causally."""
    runtime.enter()
    q_descale, k_descale, v_descale = map(_float32, (q_descale, k_descale, v_descale))
    context = {
        "k": k, "v": v, "cu_seqlens_k": cu_seqlens_k, "k_descale": k_descale,
        "v_descale": v_descale,
    }  # fmt: skip
    held = {"q": q, "q_descale": q_descale, "cu_seqlens_q": cu_seqlens_q, "acc": acc, "lse": lse}
    device = devices.jax_device(checks.tensors(held | context))
    tokens = q.shape[0]
    new_tokens = cu_seqlens_k is None
    if not (
        checks.heads_match(q, k, v)
        and v.shape[2] == acc.shape[2]
        and (
            k.shape[0] == tokens
            if cu_seqlens_k is None
            else checks.cu_seqlens_sound(cu_seqlens_k, k.shape[0])
            and cu_seqlens_k.shape == cu_seqlens_q.shape
        )
        and all(checks.descale_sound(x, q.shape[1]) for x in (k_descale, v_descale))
    ):

        def refuse(given: dict[str, Any]) -> None:
            del given["acc"], given["lse"]
            queries = {name: given.pop(name) for name in tuple(given) if name in held}
            state = jaxfp8.start_prefill(
                **queries, precision=cast(Any, precision), v_head_dim=acc.shape[2],
                fmt=compiled.format_of(fmt), backend=backend,
            )  # fmt: skip
            if new_tokens:
                jaxfp8.attend_new_tokens(state, precision=cast(Any, precision), **given)
            else:
                jaxfp8.attend_segment(state, **given)

        checks.let_jaxfp8_refuse(refuse, held | context)
    packed, layout = _pack((cu_seqlens_q, cu_seqlens_k), (q_descale, k_descale, v_descale))
    program = compiled.attend(device, layout, softmax_scale, precision, fmt, backend)
    capacity = buckets.query_capacity(tokens)
    rows = capacity if new_tokens else buckets.context_capacity(k.shape[0])
    new_acc, new_lse = _run(
        program,
        _rows("q", q, capacity),
        buckets.pad_rows(dlpack.contiguous("acc", acc), capacity),
        buckets.pad_columns(dlpack.contiguous("lse", lse), capacity),
        _rows("k", k, rows),
        _rows("v", v, rows),
        packed,
    )
    return _first(new_acc, tokens), _lse(new_lse, tokens, "HT")


def _fake_attend(
    q: Tensor, q_descale: Tensor | None, cu_seqlens_q: Tensor, acc: Tensor, lse: Tensor,
    k: Tensor, v: Tensor, *rest: Any, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    for name, x in (("q", q), ("k", k), ("v", v)):
        dlpack.check_grad(name, x)
    return acc.new_empty(acc.shape), lse.new_empty(lse.shape)


def merge_states(
    a_out: Tensor, a_lse: Tensor, b_out: Tensor, b_lse: Tensor, lse_layout: str
) -> tuple[Tensor, Tensor]:
    """The out and LSE of two states merged."""
    runtime.enter()
    arguments = {"a.out": a_out, "a.lse": a_lse, "b.out": b_out, "b.lse": b_lse}
    device = devices.jax_device(checks.tensors(arguments))
    transposed = lse_layout == "TH"
    if not (
        a_out.shape == b_out.shape
        and a_lse.shape == b_lse.shape
        and a_out.dim() == 3
        and a_lse.shape == (a_out.shape[:2] if transposed else a_out.shape[1::-1])
    ):

        def refuse(given: dict[str, Any]) -> None:
            a, b = (
                jaxfp8.AttentionState(
                    given[f"{x}.out"],
                    given[f"{x}.lse"].T if transposed else given[f"{x}.lse"],
                )
                for x in "ab"
            )
            jaxfp8.merge_states(a, b)

        checks.let_jaxfp8_refuse(refuse, arguments)
    tokens = a_out.shape[0]
    capacity = buckets.query_capacity(tokens)
    pad_lse = buckets.pad_rows if transposed else buckets.pad_columns

    operands = []
    for out_name, lse_name in (("a.out", "a.lse"), ("b.out", "b.lse")):
        out = dlpack.contiguous(out_name, arguments[out_name])
        operands.append(buckets.pad_rows(out, capacity))
        lse = dlpack.contiguous(lse_name, arguments[lse_name])
        operands.append(pad_lse(lse, capacity))
    out, lse = _run(compiled.merge_states(device, lse_layout), *operands)
    return _first(out, tokens), _lse(lse, tokens, lse_layout)


def _fake_merge_states(
    a_out: Tensor, a_lse: Tensor, b_out: Tensor, b_lse: Tensor, lse_layout: str
) -> tuple[Tensor, Tensor]:
    for name, x in (("a.out", a_out), ("a.lse", a_lse), ("b.out", b_out), ("b.lse", b_lse)):
        dlpack.check_grad(name, x)
    return a_out.new_empty(a_out.shape), a_lse.new_empty(a_lse.shape)


def per_head_amax(x: Tensor) -> Tensor:
    """float32 [H]: largest finite magnitude of each head of x [T, H, D]."""
    device = _check_values(x, lambda given: jaxfp8.per_head_amax(**given))
    return _run(compiled.per_head_amax(device), _values(x))[0]


def _fake_per_head_amax(x: Tensor) -> Tensor:
    dlpack.check_grad("x", x)
    return x.new_empty((x.shape[1],), dtype=torch.float32)


def quantize_per_head(x: Tensor, descale: Tensor, fmt: str) -> Tensor:
    """x [T, H, D] in FP8, quantized with descale [H]."""
    descale = cast(Tensor, _float32(descale))

    def refuse(given: dict[str, Any]) -> None:
        jaxfp8.quantize_per_head(**given, fmt=cast(Any, compiled.format_of(fmt)))

    device = _check_values(x, refuse, descale)
    packed, layout = _pack((), (descale,))
    program = compiled.quantize_per_head(device, layout, fmt)
    return _first(_run(program, _values(x), packed)[0], x.shape[0])


def _fake_quantize_per_head(x: Tensor, descale: Tensor, fmt: str) -> Tensor:
    dlpack.check_grad("x", x)
    return x.new_empty(x.shape, dtype=getattr(torch, fmt))


def dynamic_quantize_per_head(x: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """x [T, H, D] in FP8 and the descale [H] that its values ask for."""
    device = _check_values(x, lambda given: jaxfp8.per_head_amax(**given))
    values, descale = _run(compiled.dynamic_quantize_per_head(device, fmt), _values(x))
    return _first(values, x.shape[0]), descale


def _fake_dynamic_quantize_per_head(x: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    return _fake_quantize_per_head(x, x, fmt), _fake_per_head_amax(x)


def _check_values(
    x: Tensor, refuse: Callable[[dict[str, Any]], Any], descale: Tensor | None = None
) -> jax.Device:
    """The checks of a quantizer's x [T, H, D] and, if it takes one, descale [H]."""
    runtime.enter()
    arguments = {"x": x, "descale": descale}
    device = devices.jax_device(checks.tensors(arguments))
    if not (x.dim() == 3 and 0 not in x.shape[1:] and checks.descale_sound(descale, x.shape[1])):
        checks.let_jaxfp8_refuse(refuse, arguments)
    return device


def _values(x: Tensor) -> Tensor | _Columns:
    """x [T, H, D] in its bucket, with zeros behind it, which change no maximum."""
    capacity = buckets.context_capacity(x.shape[0])
    if capacity == x.shape[0]:
        return _rows("x", x, capacity)
    dlpack.heads("x", x, may_copy=True)
    return buckets.pad_rows_with_zeros(x, capacity)


for _operator, _fake in (
    (prefill_attention, _fake_prefill_attention),
    (start_prefill, _fake_start_prefill),
    (attend, _fake_attend),
    (merge_states, _fake_merge_states),
    (per_head_amax, _fake_per_head_amax),
    (quantize_per_head, _fake_quantize_per_head),
    (dynamic_quantize_per_head, _fake_dynamic_quantize_per_head),
):
    _register(_operator, _fake)
