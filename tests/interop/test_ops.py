# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""torch.ops.jaxfp8: registration, fakes, torch.compile, inference mode, new memory."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import jaxfp8  # noqa: E402
import jaxfp8_torch  # noqa: E402
from tests.inputs import cu_seqlens, qkv  # noqa: E402
from tests.interop.tensors import DEVICES, native, tensor, tensors  # noqa: E402

on_each_device = pytest.mark.parametrize("device", DEVICES)


def inputs(device):
    q, k, v = qkv(np.random.default_rng(0), 50, 90)
    return tensors((q, k, v, cu_seqlens([20, 30]), cu_seqlens([40, 50])), device)


def calls(device):
    """Arguments of every operator."""
    q, k, v, cu_q, cu_k = inputs(device)
    fmt = native(device).name
    ones = torch.ones(2, device=device)
    static = (2 * ones, 3 * ones, 4 * ones)
    new_k, new_v = k[:50], v[:50]
    options = (0.07, "bf16", None, "xla")
    acc = torch.zeros(50, 2, 128, device=device)
    lse = torch.full((2, 50), -torch.inf, device=device)
    wide = torch.cat([v, v], dim=2)[:, :, 128:]
    return {
        "prefill_attention": [
            (q, k, v, cu_q, cu_k, None, None, None, True, None, "fp8", None, None, "HT"),
            (q, k, wide, cu_q, cu_k, *static, False, 0.1, "fp8", fmt, "xla", "TH"),
            (q, k, v, cu_q, cu_k, None, None, None, True, None, "bf16", None, None, "HT"),
        ],
        "start_prefill": [
            (q, cu_q, None, 128, None, "fp8", None, None),
            (q, cu_q, ones, 128, None, "fp8", fmt, "xla"),
            (q, cu_q, None, 128, None, "bf16", None, None),
        ],
        "attend": [
            (q, None, cu_q, acc, lse, new_k, new_v, None, None, None, *options),
            (q, None, cu_q, acc, lse, k, wide, cu_k, None, None, *options),
        ],
        "merge_states": [(acc, lse, acc + 1, lse + 1, "HT")],
        "per_head_amax": [(q,)],
        "quantize_per_head": [(q, ones, fmt)],
        "dynamic_quantize_per_head": [(q, fmt)],
    }


CASES = [(name, n) for name, given in calls("cpu").items() for n in range(len(given))]


@on_each_device
@pytest.mark.parametrize(("name", "n"), CASES)
def test_opcheck(name, n, device):
    operator = getattr(torch.ops.jaxfp8, name).default
    torch.library.opcheck(operator, calls(device)[name][n])


@pytest.mark.parametrize(("name", "n"), CASES)
def test_a_fake_has_the_shape_dtype_and_strides_of_the_result(name, n):
    operator = getattr(torch.ops.jaxfp8, name)
    arguments = calls("cpu")[name][n]
    real = operator(*arguments)
    with FakeTensorMode() as mode:
        fake = operator(
            *(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments)
        )
    if isinstance(real, torch.Tensor):
        real, fake = (real,), (fake,)
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@pytest.mark.parametrize(("name", "n"), CASES)
def test_results_are_new_memory(name, n):
    arguments = calls("cpu")[name][n]
    results = getattr(torch.ops.jaxfp8, name)(*arguments)
    results = (results,) if isinstance(results, torch.Tensor) else results
    storages = [
        x.untyped_storage().data_ptr()
        for x in (*arguments, *results)
        if isinstance(x, torch.Tensor) and x.numel()
    ]
    given = {x.untyped_storage().data_ptr() for x in arguments if isinstance(x, torch.Tensor)}
    assert len(storages) == len(set(storages) | given) + len(
        [x for x in arguments if isinstance(x, torch.Tensor)]
    ) - len(given)


def serve(q, k, v, cu_q, cu_k, fmt):
    """Everything at once, with work of torch's own around it."""
    whole = jaxfp8_torch.prefill_attention(q * 1, k, v, cu_q, cu_k, causal=True)
    state = jaxfp8_torch.start_prefill(q, cu_q)
    state = jaxfp8_torch.attend_new_tokens(state, k[:50], v[:50])
    state = jaxfp8_torch.attend_segment(state, k, v, cu_k)
    merged = jaxfp8_torch.merge_states(whole, state.attention_state)
    values, descale = jaxfp8_torch.dynamic_quantize_per_head(q, fmt)
    again = jaxfp8_torch.quantize_per_head(q, descale, fmt)
    return whole.out + 1, state.out, state.lse, merged.out, merged.lse, values, again


@on_each_device
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(dynamic, device):
    arguments, fmt = inputs(device), native(device)
    compiled = torch.compile(serve, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    with torch.no_grad():
        results = compiled(*arguments, fmt)
        for a, b in zip(results, serve(*arguments, fmt), strict=True):
            assert torch.equal(a.float(), b.float())


def test_compile_refuses_a_gradient():
    q, k, v, cu_q, cu_k = inputs("cpu")
    compiled = torch.compile(serve, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="jaxfp8 is for inference"):
        compiled(q.clone().requires_grad_(), k, v, cu_q, cu_k, jaxfp8.E4M3FNUZ)


@on_each_device
def test_inference_mode(device):
    expected = serve(*inputs(device), native(device))
    with torch.inference_mode():
        results = serve(*inputs(device), native(device))
    for a, b in zip(results, expected, strict=True):
        assert torch.equal(a.float(), b.float())


def test_importing_again_registers_nothing_again():
    importlib.reload(jaxfp8_torch)
    x = tensor(qkv(np.random.default_rng(0), 4, 4)[0])
    assert torch.ops.jaxfp8.per_head_amax(x).shape == (2,)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_capture_is_refused():
    arguments = inputs("cuda")
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(NotImplementedError, match="cannot be captured in a CUDA or HIP graph"),
        torch.cuda.graph(graph),
    ):
        jaxfp8_torch.prefill_attention(*arguments, causal=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_side_streams_without_synchronising():
    """Long kernels before the call and after it, on streams of torch's; the host never waits."""
    q, k, v, cu_q, cu_k = inputs("cuda")
    expected = serve(q, k, v, cu_q, cu_k, native("cuda"))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    for stream in streams:
        with torch.cuda.stream(stream):
            copies = [torch.full_like(x, torch.nan) for x in (q, k, v)]
            torch.cuda._sleep(20_000_000)  # the values come long after the call is queued
            for copy, x in zip(copies, (q, k, v), strict=True):
                copy.copy_(x)
            result = serve(*copies, cu_q, cu_k, native("cuda"))
            for copy in copies:
                copy.fill_(torch.nan)  # and go as soon as it has read them
            results.append([x.clone() for x in result])
            torch.cuda._sleep(20_000_000)
    torch.cuda.synchronize()
    for result in results:
        for a, b in zip(result, expected, strict=True):
            assert torch.equal(a.float(), b.float())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_that_is_let_go_and_filled_while_a_call_is_queued():
    """JAX's arrays own nothing of it: the order of torch's stream keeps it as it was."""
    q, k, v, cu_q, cu_k = inputs("cuda")
    expected = serve(q, k, v, cu_q, cu_k, native("cuda"))
    torch.cuda.synchronize()
    results = []
    for _ in range(5):
        torch.cuda._sleep(20_000_000)
        copies = [x.clone() for x in (q, k, v, cu_q, cu_k)]
        results.append(serve(*copies, native("cuda")))
        places = {x.data_ptr() for x in copies}
        del copies
        others = [torch.full_like(x, -7) for x in (q, k, v, cu_q, cu_k)]
        assert places & {x.data_ptr() for x in others}  # torch does hand it out again
    for result in results:
        for a, b in zip(result, expected, strict=True):
            assert torch.equal(a.float(), b.float())
