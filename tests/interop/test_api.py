# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The functions on tensors: the bits of jaxfp8, and the numbers of the float64 oracle."""

from __future__ import annotations

import threading

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jaxfp8  # noqa: E402
import jaxfp8_torch  # noqa: E402
from jaxfp8_torch import crossing, devices, dlpack  # noqa: E402
from tests import oracle  # noqa: E402
from tests.inputs import cu_seqlens, qkv, with_tail  # noqa: E402
from tests.interop.tensors import (  # noqa: E402
    DEVICES,
    array,
    assert_same_bits,
    native,
    on_jax,
    placed,
    tensor,
    tensors,
)
from tests.tolerances import assert_attention, hopper_fp8_slack  # noqa: E402

on_each_device = pytest.mark.parametrize("device", DEVICES)
LENGTHS_Q, LENGTHS_K = [60, 0, 40], [100, 156, 0]


@pytest.fixture(autouse=True)
def own_shapes():
    """No padding, so that both doors see the same shapes; test_buckets.py is about padding."""
    before = jaxfp8_torch.get_buckets()
    jaxfp8_torch.set_buckets(None)
    yield
    jaxfp8_torch.set_buckets(before)


def inputs(seed=0, heads=3):
    q, k, v = qkv(np.random.default_rng(seed), sum(LENGTHS_Q), sum(LENGTHS_K), num_heads=heads)
    return q, k, v, cu_seqlens(LENGTHS_Q), cu_seqlens(LENGTHS_K)


def static_scales(arrays, fmt):
    return [oracle.descale(x, fmt.name, margin=1.25) for x in arrays[:3]]


def assert_near_oracle(state, arrays, precision, device, scales=None, **options):
    """Attention of tensors is within its bounds; dynamic scales where none are given."""
    q, k, v, *cu = arrays
    slack = None
    if precision == "fp8":
        scales = scales or (None, None, None)
        q, k, v = (
            oracle.through_fp8(x, native(device).name, descale)
            for x, descale in zip((q, k, v), scales, strict=True)
        )
        if jaxfp8.detect_target(devices.jax_device(torch.device(device))).arch == "sm90":
            slack = hopper_fp8_slack(q, k, v, *cu, **options)
    expected = oracle.attention(q, k, v, *cu, **options)
    assert_attention(AsNumpy(state), expected, precision, slack)


class AsNumpy:
    """An AttentionState of tensors, for assert_attention."""

    def __init__(self, state):
        self.out, self.lse = array(state.out), array(state.lse)


# Every option passes the door in one of these, and each costs a compilation at both doors. The
# second is what most tests below call, so that they compile nothing.
CASES = [("bf16", False, 0.06), ("fp8", True, None), ("fp8 static", True, 0.06)]


@on_each_device
@pytest.mark.parametrize(("precision", "causal", "softmax_scale"), CASES)
def test_prefill_attention(precision, causal, softmax_scale, device):
    precision, _, static = precision.partition(" ")
    arrays, fmt = inputs(), native(device)
    scales = static_scales(arrays, fmt) if static else None
    state = jaxfp8_torch.prefill_attention(
        *tensors(arrays, device),
        causal=causal,
        precision=precision,
        softmax_scale=softmax_scale,
        scales=jaxfp8.LayerScales(*tensors(scales, device)) if static else None,
    )
    other = jaxfp8.prefill_attention(
        *on_jax(arrays, device),
        causal=causal,
        precision=precision,
        softmax_scale=softmax_scale,
        scales=jaxfp8.LayerScales(*on_jax(scales, device)) if static else None,
    )
    assert state.out.device.type == state.lse.device.type == device
    assert_same_bits(state.out, other.out)
    assert_same_bits(state.lse, other.lse)
    assert state.lse.is_contiguous()
    assert_near_oracle(
        state, arrays, precision, device, scales, causal=causal, softmax_scale=softmax_scale
    )


@on_each_device
def test_v_inside_kv_nope_is_read_in_place(device):
    q, k, v, *cu = tensors(inputs(), device)
    kv_nope = torch.full((*k.shape[:2], 256), torch.nan, dtype=torch.bfloat16, device=device)
    kv_nope[:, :, 128:] = v
    inside = kv_nope[:, :, 128:]
    assert isinstance(dlpack.from_torch("v", inside), jaxfp8.HeadSlice)
    a = jaxfp8_torch.prefill_attention(q, k, v, *cu, causal=True)
    b = jaxfp8_torch.prefill_attention(q, k, inside, *cu, causal=True)
    assert_same_bits(a.out, array(b.out))
    assert_same_bits(a.lse, array(b.lse))


@on_each_device
def test_memory_that_kernels_cannot_read_in_place(device, monkeypatch):
    """On NVIDIA they want multiples of 256 bytes, of a wider tensor that holds V too."""
    monkeypatch.setitem(crossing.KERNEL_ALIGNMENT, device, 256)
    q, k, v, *cu = tensors(inputs(), device)
    wide = torch.cat([v, v], dim=2)
    expected = jaxfp8_torch.prefill_attention(q, k, wide[:, :, 128:], *cu, causal=True)
    q, k, wide = (placed(x, 256, 128) for x in (q, k, wide))
    found = jaxfp8_torch.prefill_attention(q, k, wide[:, :, 128:], *cu, causal=True)
    assert_same_bits(found.out, array(expected.out))
    assert_same_bits(found.lse, array(expected.lse))


@on_each_device
def test_sglang_lse_layout(device):
    arguments = tensors(inputs(), device)
    ht = jaxfp8_torch.prefill_attention(*arguments, causal=True)
    th = jaxfp8_torch.prefill_attention(*arguments, causal=True, lse_layout="TH")
    assert th.lse.is_contiguous()
    assert_same_bits(th.lse, array(ht.lse).T)
    assert_same_bits(th.out, array(ht.out))
    merged = jaxfp8_torch.merge_states(th, th, lse_layout="TH")
    assert_same_bits(merged.lse, array(jaxfp8_torch.merge_states(ht, ht).lse).T)
    state = jaxfp8_torch.start_prefill(arguments[0], arguments[3], lse_layout="TH")
    state = jaxfp8_torch.attend_segment(state, *arguments[1:3], arguments[4])
    assert state.lse.shape == th.lse.shape
    assert state.lse.is_contiguous()


@on_each_device
@pytest.mark.parametrize("static", [False, True])
def test_a_pass_has_the_bits_of_the_other_door(static, device):
    """Its new tokens are in BF16, its segments in FP8."""
    q, k, v, cu_q, cu_k = inputs()
    new_k, new_v = qkv(np.random.default_rng(1), 1, len(q), num_heads=3)[1:]
    scales = static_scales((q, k, v), native(device)) if static else None

    def run(door, put):
        give = put(scales, device) if scales else (None, None, None)
        arrays = put((q, cu_q, new_k, new_v, k, v, cu_k), device)
        state = door.start_prefill(*arrays[:2], q_descale=give[0])
        state = door.attend_new_tokens(state, *arrays[2:4])
        for _ in range(2):
            state = door.attend_segment(state, *arrays[4:], k_descale=give[1], v_descale=give[2])
        return state

    ours, other = run(jaxfp8_torch, tensors), run(jaxfp8, on_jax)
    # The steps are compiled in other groups than there: XLA contracts a product and a sum here
    # and not there, and float32 numbers may differ in the last place.
    np.testing.assert_allclose(array(ours.acc), np.asarray(other.acc), rtol=1e-6, atol=1e-6)
    assert_same_bits(ours.out, other.out)
    np.testing.assert_allclose(array(ours.lse), np.asarray(other.lse), rtol=1e-6, atol=1e-6)


@on_each_device
def test_a_pass_against_the_oracle(device):
    q, k, v, cu_q, cu_k = inputs()
    new_k, new_v = qkv(np.random.default_rng(1), 1, len(q), num_heads=3)[1:]
    arrays = tensors((q, cu_q, new_k, new_v, k, v, cu_k), device)
    state = jaxfp8_torch.start_prefill(*arrays[:2], precision="bf16")
    state = jaxfp8_torch.attend_new_tokens(state, *arrays[2:4])
    state = jaxfp8_torch.attend_segment(state, *arrays[4:])
    keys, values, lengths = [], [], []
    for b in range(len(cu_q) - 1):
        context, new = slice(*cu_k[b : b + 2]), slice(*cu_q[b : b + 2])
        keys += [k[context], new_k[new]]
        values += [v[context], new_v[new]]
        lengths.append(LENGTHS_K[b] + LENGTHS_Q[b])
    expected = oracle.attention(
        q, np.concatenate(keys), np.concatenate(values), cu_q, cu_seqlens(lengths), causal=True
    )
    assert_attention(AsNumpy(state), expected, "bf16")


@on_each_device
def test_queries_that_are_fp8_already(device):
    q, k, v, cu_q, cu_k = inputs()
    fmt = native(device)
    descale = oracle.descale(q, fmt.name)
    stored = oracle.quantize(q, descale, fmt.name)
    arguments = tensors((k, v, cu_k), device)
    given, quantized = (
        jaxfp8_torch.attend_segment(
            jaxfp8_torch.start_prefill(
                tensor(x, device), tensor(cu_q, device), q_descale=tensor(descale, device)
            ),
            *arguments,
        )
        for x in (stored, q)
    )
    assert_same_bits(given.acc, array(quantized.acc))


@on_each_device
def test_quantizers(device):
    x = inputs()[0]
    fmt = native(device)
    ours, (theirs,) = tensor(x, device), on_jax([x], device)
    assert_same_bits(jaxfp8_torch.per_head_amax(ours), jaxfp8.per_head_amax(theirs))
    values, descale = jaxfp8_torch.dynamic_quantize_per_head(ours, fmt)
    expected = jaxfp8.dynamic_quantize_per_head(theirs, fmt)
    assert_same_bits(values, expected[0])
    assert_same_bits(descale, expected[1])
    static = jaxfp8_torch.quantize_per_head(ours, 2 * descale, fmt)
    assert_same_bits(static, jaxfp8.quantize_per_head(theirs, 2 * expected[1], fmt))
    assert_same_bits(static, oracle.quantize(x, 2 * np.asarray(expected[1]), fmt.name))


@on_each_device
def test_merge_states(device):
    rng = np.random.default_rng(2)
    outs = [qkv(rng, 1, 30, num_heads=2)[2] for _ in range(2)]
    lses = [rng.standard_normal((2, 30)).astype(np.float32) for _ in range(2)]
    lses[0][0, :5] = -np.inf
    lses[1][:, 3:9] = -np.inf
    lses[1][1, 20] = np.inf
    ours = jaxfp8_torch.merge_states(
        *(jaxfp8_torch.AttentionState(*tensors(x, device)) for x in zip(outs, lses, strict=True))
    )
    other = jaxfp8.merge_states(
        *(jaxfp8.AttentionState(*on_jax(x, device)) for x in zip(outs, lses, strict=True))
    )
    assert_same_bits(ours.out, other.out)
    assert_same_bits(ours.lse, other.lse)


@on_each_device
def test_capacity_behind_the_tokens_is_ignored(device):
    q, k, v, cu_q, cu_k = inputs()
    arrays = [with_tail(q, 128), with_tail(k, 320), with_tail(v, 320), cu_q, cu_k]
    state = jaxfp8_torch.prefill_attention(*tensors(arrays, device), causal=True, precision="bf16")
    expected = oracle.attention(q, k, v, cu_q, cu_k, causal=True)
    assert not array(state.out)[len(q) :].any()
    assert np.isneginf(array(state.lse)[:, len(q) :]).all()
    held = jaxfp8_torch.AttentionState(state.out[: len(q)], state.lse[:, : len(q)])
    assert_attention(AsNumpy(held), expected, "bf16")


@on_each_device
@pytest.mark.parametrize("lengths", [([], []), ([0], [0]), ([5], [0]), ([0], [7])])
def test_nothing_to_attend_with_or_to(lengths, device):
    lengths_q, lengths_k = lengths
    q, k, v = qkv(np.random.default_rng(0), sum(lengths_q), sum(lengths_k))
    arrays = (q, k, v, cu_seqlens(lengths_q), cu_seqlens(lengths_k))
    for buckets in (None, jaxfp8_torch.Buckets()):
        jaxfp8_torch.set_buckets(buckets)
        state = jaxfp8_torch.prefill_attention(*tensors(arrays, device), causal=True)
        assert state.out.shape == (len(q), 2, 128)
        assert not array(state.out).any()
        assert np.isneginf(array(state.lse)).all()
        assert state.lse.shape == (2, len(q))


@on_each_device
def test_unaligned_offsets_are_taken(device):
    """cu_seqlens are often views, four bytes past an aligned address."""
    q, k, v, cu_q, cu_k = tensors(inputs(), device)
    together = torch.cat([torch.zeros(1, dtype=torch.int32, device=device), cu_q])
    assert together[1:].data_ptr() % 32
    a = jaxfp8_torch.prefill_attention(q, k, v, cu_q, cu_k, causal=True)
    b = jaxfp8_torch.prefill_attention(q, k, v, together[1:], cu_k, causal=True)
    assert_same_bits(a.out, array(b.out))


def call(change):
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
    given = dict(zip(names, tensors(inputs(), "cpu"), strict=True)) | {"causal": True}
    given |= {name: make(given) for name, make in change.items()}
    return jaxfp8_torch.prefill_attention(**given)


ones = jaxfp8.LayerScales(*(torch.ones(3) for _ in range(3)))
REFUSED = {
    "q is no tensor": (
        {"q": lambda _: np.zeros((2, 2, 192))},
        TypeError,
        "q: expected a torch.Tensor, got ndarray",
    ),
    "v too short": (
        {"v": lambda given: given["v"][:200]},
        ValueError,
        r"v: expected shape \[256, 3, Dv\] to match k, got \[200, 3, 128\]",
    ),
    "other heads": (
        {"k": lambda given: given["k"][:, :2].contiguous()},
        ValueError,
        r"k: expected shape \[Tk, 3, 192\] to match q, got \[256, 2, 192\]",
    ),
    "two dimensions": (
        {"q": lambda given: given["q"][:, 0].contiguous()},
        ValueError,
        r"q: expected shape \[Tq, H, Dqk\], got \[100, 192\]",
    ),
    "float32": (
        {"q": lambda given: given["q"].float()},
        TypeError,
        "q: expected dtype bfloat16 or float8_e4m3fnuz, got float32",
    ),
    "long": (
        {"cu_seqlens_q": lambda given: given["cu_seqlens_q"].long()},
        TypeError,
        "cu_seqlens_q: expected dtype int32, got int64; it is not narrowed",
    ),
    "float offsets": (
        {"cu_seqlens_k": lambda given: given["cu_seqlens_k"].float()},
        TypeError,
        "cu_seqlens_k: expected dtype int32, got float32",
    ),
    "other batch": (
        {"cu_seqlens_k": lambda given: given["cu_seqlens_k"][:3]},
        ValueError,
        r"cu_seqlens_k: expected shape \[4\] to match cu_seqlens_q, got \[3\]",
    ),
    "no start": (
        {"cu_seqlens_k": lambda given: given["cu_seqlens_k"] + 1},
        ValueError,
        "cu_seqlens_k: expected to start at 0, got 1",
    ),
    "falls": (
        {"cu_seqlens_q": lambda _: torch.tensor([0, 60, 50, 100], dtype=torch.int32)},
        ValueError,
        "cu_seqlens_q: expected values that do not decrease, got 60 at 1 and 50 at 2",
    ),
    "too long": (
        {"cu_seqlens_q": lambda _: torch.tensor([0, 60, 60, 101], dtype=torch.int32)},
        ValueError,
        "cu_seqlens_q: expected to end within the 100 tokens of q, got 101",
    ),
    "causal": ({"causal": lambda _: 1}, TypeError, "causal: expected True or False, got int"),
    "precision": ({"precision": lambda _: "int8"}, ValueError, "precision: expected 'fp8' or"),
    "layout": ({"lse_layout": lambda _: "hT"}, ValueError, "lse_layout: expected 'HT' or 'TH'"),
    "scale": ({"softmax_scale": lambda _: -1.0}, ValueError, "softmax_scale: expected a finite"),
    "scale tensor": (
        {"softmax_scale": lambda _: torch.ones(())},
        TypeError,
        "softmax_scale: expected a number or None, got Tensor",
    ),
    "scale True": (
        {"softmax_scale": lambda _: True},
        TypeError,
        "softmax_scale: expected a number or None, got bool",
    ),
    "format": ({"fmt": lambda _: "e4m3"}, TypeError, "fmt: expected jaxfp8.E4M3FNUZ or"),
    "backend": ({"backend": lambda _: "cuda"}, ValueError, "backend: expected None or one of xla"),
    "no backend's name": (
        {"backend": lambda _: ["xla"]},
        TypeError,
        "backend: expected a name or None, got list",
    ),
    "unsupported": (
        {"backend": lambda _: "pallas_triton"},
        NotImplementedError,
        "backend pallas_triton: runs on a GPU",
    ),
    "scales": ({"scales": lambda _: (1, 2, 3)}, TypeError, "scales: expected a LayerScales"),
    "scales in bf16": (
        {"scales": lambda _: ones, "precision": lambda _: "bf16"},
        ValueError,
        "scales: expected None with precision='bf16'",
    ),
    "zero scale": (
        {"scales": lambda _: ones._replace(k=torch.zeros(3))},
        ValueError,
        "scales.k: expected finite values > 0, got 0.0 for head 0",
    ),
    "scales of other heads": (
        {"scales": lambda _: ones._replace(v=torch.ones(4))},
        ValueError,
        r"scales.v: expected shape \[3\], one per head of v, got \[4\]",
    ),
    "fp8 without scales": (
        {"q": lambda given: given["q"].to(torch.float8_e4m3fnuz)},
        ValueError,
        "scales: expected descales for q",
    ),
    "gradient": (
        {"v": lambda given: given["v"].clone().requires_grad_()},
        NotImplementedError,
        "v: requires a gradient",
    ),
    "layout of q": (
        {"q": lambda given: given["q"].transpose(1, 2).contiguous().transpose(1, 2)},
        ValueError,
        "q: expected a contiguous tensor",
    ),
}


@pytest.mark.parametrize("buckets", [None, jaxfp8_torch.Buckets()], ids=["exact", "padded"])
@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, buckets):
    change, error, message = REFUSED[case]
    jaxfp8_torch.set_buckets(buckets)
    with pytest.raises(error, match=message):
        call(change)


def started(**options):
    q, _, _, cu_q, _ = tensors(inputs(), "cpu")
    return jaxfp8_torch.start_prefill(q, cu_q, **options)


REFUSED_IN_A_PASS = {
    "no state": (
        lambda q, k, v, cu: jaxfp8_torch.attend_segment(None, k, v, cu),
        TypeError,
        "state: expected a PrefillState from start_prefill, got NoneType",
    ),
    "v of another size": (
        lambda q, k, v, cu: jaxfp8_torch.attend_segment(started(v_head_dim=64), k, v, cu),
        ValueError,
        r"v: expected shape \[Tk, 3, 64\] to match start_prefill, got \[256, 3, 128\]",
    ),
    "other batch": (
        lambda q, k, v, cu: jaxfp8_torch.attend_segment(started(), k, v, cu[:2]),
        ValueError,
        "cu_seqlens_k: expected shape",
    ),
    "too long": (
        lambda q, k, v, cu: jaxfp8_torch.attend_segment(started(), k[:8], v[:8], cu),
        ValueError,
        "cu_seqlens_k: expected to end within the 8 tokens of k, got 256",
    ),
    "other new tokens": (
        lambda q, k, v, cu: jaxfp8_torch.attend_new_tokens(started(), k, v),
        ValueError,
        r"k: expected shape \[100, 3, 192\] to match q, got \[256, 3, 192\]",
    ),
    "fp8 in bf16": (
        lambda q, k, v, cu: jaxfp8_torch.attend_new_tokens(
            started(precision="bf16"), q, q, precision="fp8"
        ),
        ValueError,
        "precision: expected 'bf16' in a pass of precision 'bf16'",
    ),
    "v_head_dim": (
        lambda q, k, v, cu: started(v_head_dim=1.5),
        TypeError,
        "v_head_dim: expected an integer, got float",
    ),
    "no backend's name": (
        lambda q, k, v, cu: started(backend=5),
        TypeError,
        "backend: expected a name or None, got int",
    ),
    "no v_head_dim": (
        lambda q, k, v, cu: started(v_head_dim=0),
        ValueError,
        "v_head_dim: expected at least 1, got 0",
    ),
    "q_descale": (
        lambda q, k, v, cu: started(q_descale=torch.ones(4)),
        ValueError,
        r"q_descale: expected shape \[3\]",
    ),
    "q_descale in bf16": (
        lambda q, k, v, cu: started(precision="bf16", q_descale=torch.ones(3)),
        ValueError,
        "q_descale: expected None with precision='bf16'",
    ),
    "k_descale": (
        lambda q, k, v, cu: jaxfp8_torch.attend_segment(
            started(), k, v, cu, k_descale=-torch.ones(3)
        ),
        ValueError,
        "k_descale: expected finite values > 0",
    ),
    "merge of other shapes": (
        lambda q, k, v, cu: jaxfp8_torch.merge_states(
            started().attention_state, jaxfp8_torch.AttentionState(v, torch.ones(3, 256))
        ),
        ValueError,
        r"b.out: expected shape \[100, 3, 128\] to match a.out, got \[256, 3, 128\]",
    ),
    "merge of a wrong layout": (
        lambda q, k, v, cu: jaxfp8_torch.merge_states(
            *2 * [started(lse_layout="TH").attention_state]
        ),
        ValueError,
        r"a.lse: expected shape \[3, 100\] to match a.out, got \[100, 3\]",
    ),
    "merge of no state": (
        lambda q, k, v, cu: jaxfp8_torch.merge_states(q, q),
        TypeError,
        "a: expected an AttentionState, got Tensor",
    ),
    "quantizer's format": (
        lambda q, k, v, cu: jaxfp8_torch.quantize_per_head(q, torch.ones(3), None),
        TypeError,
        "fmt: expected jaxfp8.E4M3FNUZ",
    ),
    "quantizer's descale": (
        lambda q, k, v, cu: jaxfp8_torch.quantize_per_head(q, torch.ones(2), jaxfp8_torch.E4M3FNUZ),
        ValueError,
        r"descale: expected shape \[3\]",
    ),
    "quantizer's x": (
        lambda q, k, v, cu: jaxfp8_torch.per_head_amax(q[0].contiguous()),
        ValueError,
        r"x: expected shape \[T, H, D\], got \[3, 192\]",
    ),
}


@pytest.mark.parametrize("buckets", [None, jaxfp8_torch.Buckets()], ids=["exact", "padded"])
@pytest.mark.parametrize("case", REFUSED_IN_A_PASS)
def test_refused_in_a_pass(case, buckets):
    function, error, message = REFUSED_IN_A_PASS[case]
    jaxfp8_torch.set_buckets(buckets)
    q, k, v, _, cu_k = tensors(inputs(), "cpu")
    with pytest.raises(error, match=message):
        function(q, k, v, cu_k)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_two_devices_are_refused():
    with pytest.raises(ValueError, match="k: expected a tensor on cpu, as the others, got cuda:0"):
        call({"k": lambda given: given["k"].cuda()})


@on_each_device
def test_threads(device):
    arguments = [tensors(inputs(seed), device) for seed in range(8)]
    expected = [jaxfp8_torch.prefill_attention(*x, causal=True) for x in arguments]
    failures = []

    def work(index):
        try:
            for _ in range(10):
                state = jaxfp8_torch.prefill_attention(*arguments[index], causal=True)
                assert torch.equal(state.out, expected[index].out)
                assert torch.equal(state.lse, expected[index].lse)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@on_each_device
def test_inputs_can_be_overwritten_as_soon_as_a_call_returns(device):
    """The reading comes before, in the order of torch's current stream."""
    q, k, v, cu_q, cu_k = tensors(inputs(), device)
    expected = jaxfp8_torch.prefill_attention(q, k, v, cu_q, cu_k, causal=True)
    for _ in range(20):
        copies = [x.clone() for x in (q, k, v)]
        state = jaxfp8_torch.prefill_attention(*copies, cu_q, cu_k, causal=True)
        for x in copies:
            x.fill_(torch.nan)
        assert torch.equal(state.out, expected.out)


def test_jax_stays_on_the_tensors_device():
    state = jaxfp8_torch.prefill_attention(*tensors(inputs(), "cpu"), causal=True)
    assert state.out.device.type == "cpu"
    assert devices.jax_device(state.out.device) in jax.devices("cpu")
