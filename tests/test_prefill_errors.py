# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""What a caller can get wrong, through the public functions: the error's type and its sentence."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8 import checks
from tests.inputs import cu_seqlens, qkv

H = 3
Q, K, V = (jnp.asarray(x) for x in qkv(np.random.default_rng(0), 10, 20, H))
CU_Q, CU_K = jnp.asarray(cu_seqlens([4, 6])), jnp.asarray(cu_seqlens([12, 8]))
SCALE = np.full(H, 0.01, np.float32)
SCALES = jaxfp8.LayerScales(SCALE, SCALE, SCALE)
FNUZ, FN = jaxfp8.E4M3FNUZ, jaxfp8.E4M3FN


def call(q=Q, k=K, v=V, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, **options):
    return jaxfp8.prefill_attention(
        q, k, v, cu_seqlens_q, cu_seqlens_k, **{"causal": True, **options}
    )


def i32(*values):
    return jnp.array(values, jnp.int32)


CASES = {
    "q of two dimensions": (
        {"q": Q[0]}, ValueError, "q: expected shape [Tq, H, Dqk], got [3, 192]"),
    "k of two dimensions": (
        {"k": K[0]}, ValueError, "k: expected shape [Tk, 3, 192], got [3, 192]"),
    "v of four dimensions": (
        {"v": V[None]}, ValueError, "v: expected shape [20, 3, Dv], got [1, 20, 3, 128]"),
    "q is a list": (
        {"q": [[1.0]]}, TypeError,
        "q: expected a JAX or NumPy array of shape [Tq, H, Dqk], got list"),
    "no heads": (
        {"q": Q[:, :0]}, ValueError,
        "q: expected shape [Tq, H, Dqk] with H >= 1 and D >= 1, got [10, 0, 192]"),
    "heads of k": (
        {"k": K[:, :2]}, ValueError,
        "k: expected shape [Tk, 3, 192] to match q, got [20, 2, 192]"),
    "head dim of k": (
        {"k": K[:, :, :128]}, ValueError,
        "k: expected shape [Tk, 3, 192] to match q, got [20, 3, 128]"),
    "heads of v": (
        {"v": V[:, :1]}, ValueError, "v: expected shape [20, 3, Dv] to match k, got [20, 1, 128]"),
    "tokens of v": (
        {"v": V[:5]}, ValueError, "v: expected shape [20, 3, Dv] to match k, got [5, 3, 128]"),
    "q float64": (
        {"q": np.asarray(Q, np.float64)}, TypeError,
        "q: expected dtype bfloat16 or float8_e4m3fnuz, got float64"),
    "k float16": (
        {"k": K.astype(jnp.float16)}, TypeError,
        "k: expected dtype bfloat16 or float8_e4m3fnuz, got float16"),
    "v float32": (
        {"v": V.astype(jnp.float32)}, TypeError,
        "v: expected dtype bfloat16 or float8_e4m3fnuz, got float32"),
    "v int8": (
        {"v": V.astype(jnp.int8)}, TypeError,
        "v: expected dtype bfloat16 or float8_e4m3fnuz, got int8"),
    "fp8 in a bf16 request": (
        {"k": K.astype(FNUZ.dtype), "precision": "bf16"}, TypeError,
        "k: expected dtype bfloat16, got float8_e4m3fnuz (precision='bf16' takes bfloat16 alone)"),
    "fp8 of the other format": (
        {"k": K.astype(FN.dtype), "scales": SCALES}, ValueError,
        "k: expected bfloat16 or float8_e4m3fnuz, the FP8 format of this request, got "
        "float8_e4m3fn. The same bits read as float8_e4m3fnuz mean half the value"),
    "fp8 without scales": (
        {"q": Q.astype(FNUZ.dtype)}, ValueError,
        "scales: expected descales for q, which is already float8_e4m3fnuz"),
    "cu_seqlens int64": (
        {"cu_seqlens_q": np.array([0, 4, 10])}, TypeError,
        "cu_seqlens_q: expected dtype int32, got int64"),
    "cu_seqlens a list": (
        {"cu_seqlens_k": [0, 12, 20]}, TypeError,
        "cu_seqlens_k: expected an int32 array of shape [B + 1], got list"),
    "cu_seqlens of two dimensions": (
        {"cu_seqlens_q": CU_Q[None]}, ValueError,
        "cu_seqlens_q: expected shape [B + 1] (B sequences, at least [0]), got [1, 3]"),
    "cu_seqlens empty": (
        {"cu_seqlens_q": CU_Q[:0]}, ValueError,
        "cu_seqlens_q: expected shape [B + 1] (B sequences, at least [0]), got [0]"),
    "cu_seqlens of another batch": (
        {"cu_seqlens_k": i32(0, 20)}, ValueError,
        "cu_seqlens_k: expected shape [3] to match cu_seqlens_q, got [2]"),
    "cu_seqlens not from 0": (
        {"cu_seqlens_q": i32(1, 4, 10)}, ValueError,
        "cu_seqlens_q: expected to start at 0, got 1"),
    "cu_seqlens decreasing": (
        {"cu_seqlens_k": i32(0, 12, 8)}, ValueError,
        "cu_seqlens_k: expected values that do not decrease, got 12 at 1 and 8 at 2"),
    "cu_seqlens beyond the array": (
        {"cu_seqlens_k": i32(0, 12, 21)}, ValueError,
        "cu_seqlens_k: expected to end within the 20 tokens of k, got 21"),
    "scales of another type": (
        {"scales": {"q": SCALE}}, TypeError, "scales: expected a LayerScales or None, got dict"),
    "scales of wrong length": (
        {"scales": SCALES._replace(k=SCALE[:2])}, ValueError,
        "scales.k: expected shape [3], one per head of k, got [2]"),
    "scales of zero": (
        {"scales": SCALES._replace(v=np.float32([0.1, 0.0, 0.1]))}, ValueError,
        "scales.v: expected finite values > 0, got 0.0 for head 1"),
    "scales of NaN": (
        {"scales": SCALES._replace(q=np.float32([0.1, 0.1, np.nan]))}, ValueError,
        "scales.q: expected finite values > 0, got nan for head 2"),
    "scales of integers": (
        {"scales": SCALES._replace(q=np.ones(H, np.int32))}, TypeError,
        "scales.q: expected dtype float32 or float64, got int32"),
    "scales with bf16": (
        {"scales": SCALES, "precision": "bf16"}, ValueError,
        "scales: expected None with precision='bf16', which has no scales to use"),
    "fmt a string": (
        {"fmt": "float8_e4m3fn"}, TypeError,
        "fmt: expected jaxfp8.E4M3FNUZ or jaxfp8.E4M3FN, got str"),
    "fmt made up": (
        {"fmt": jaxfp8.Fp8Format("int8", np.dtype("int8"), 127.0)}, ValueError,
        "fmt: expected jaxfp8.E4M3FNUZ or jaxfp8.E4M3FN, got Fp8Format(name='int8'"),
    "backend a list": (
        {"backend": ["xla"]}, TypeError, "backend: expected a name or None, got list"),
    "softmax_scale huge": (
        {"softmax_scale": 1e38}, ValueError,
        "softmax_scale: expected a finite number > 0, got 1e+38"),
    "precision unknown": (
        {"precision": "fp16"}, ValueError, "precision: expected 'fp8' or 'bf16', got 'fp16'"),
    "backend unknown": (
        {"backend": "cuda"}, ValueError, "backend: expected None or one of xla, "),
    "backend unable": (
        {"backend": "pallas_triton"}, NotImplementedError, "backend pallas_triton: runs on a GPU"),
    "softmax_scale NaN": (
        {"softmax_scale": float("nan")}, ValueError,
        "softmax_scale: expected a finite number > 0, got nan"),
    "softmax_scale zero": (
        {"softmax_scale": 0}, ValueError, "softmax_scale: expected a finite number > 0, got 0.0"),
    "softmax_scale a string": (
        {"softmax_scale": "auto"}, TypeError,
        "softmax_scale: expected a number or None, got str"),
    "softmax_scale a number in a string": (
        {"softmax_scale": "0.5"}, TypeError,
        "softmax_scale: expected a number or None, got str"),
    "softmax_scale True": (
        {"softmax_scale": True}, TypeError,
        "softmax_scale: expected a number or None, got bool"),
    "causal None": ({"causal": None}, TypeError, "causal: expected True or False, got NoneType"),
    "slice beyond its array": (
        {"v": jaxfp8.HeadSlice(V, 64, 128)}, ValueError,
        "v: expected a slice within the 128 columns of its array, got start 64 and size 128"),
    "slice from half a column": (
        {"v": jaxfp8.HeadSlice(V, 0.5, 64)}, TypeError,
        "v: expected integers for the start and size of a slice, got 0.5 and 64"),
    "parts of k of different lengths": (
        {"k": jaxfp8.AssembledKey(K[:, :, :128], K[:9, 0, 128:])}, ValueError,
        "k.rope: expected shape [20, Dr] to match k.nope, got [9, 64]"),
    "parts of k too narrow": (
        {"k": jaxfp8.AssembledKey(K[:, :, :128], K[:, 0, 160:])}, ValueError,
        "k: expected shape [Tk, 3, 192] to match q, got [20, 3, 160]"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_prefill_attention(name):
    arguments, error, message = CASES[name]
    with pytest.raises(error, match=r"^" + re.escape(message)):
        call(**arguments)


def on_target(monkeypatch, arch):
    from jaxfp8 import packing, targets

    monkeypatch.setattr(packing, "detect_target", lambda device=None: targets.target_of_arch(arch))


@pytest.mark.parametrize("arch, fmt, factor", [("gfx942", FN, "half"), ("sm90", FNUZ, "twice")])
def test_formats_that_the_target_does_not_speak(monkeypatch, arch, fmt, factor):
    on_target(monkeypatch, arch)
    with pytest.raises(ValueError, match=rf"^fmt: expected .*of {arch}, got .*mean {factor} the"):
        call(fmt=fmt)


def test_fp8_on_a_device_without_it(monkeypatch):
    on_target(monkeypatch, "sm80")
    with pytest.raises(NotImplementedError, match=r"^precision: 'fp8' needs .* sm80 has none"):
        call()


def test_traced_softmax_scale():
    with pytest.raises(TypeError, match=r"^softmax_scale: expected a Python number, got a traced"):
        jax.jit(lambda scale: call(softmax_scale=scale))(0.1)


BAD_CU_SEQLENS = [(5, 4, 10), (0, 12, 8), (0, 7, 2**31 - 1), (0, -5, 10), (-3, -2, -1)]


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_traced_cu_seqlens_are_made_sound(backend):
    """They cannot be refused; every row is defined, and nothing past the arrays is read."""

    @jax.jit
    def traced(cu_q, cu_k):
        return call(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=False, backend=backend)

    for bad in BAD_CU_SEQLENS:
        state = traced(i32(*bad), i32(*bad))
        assert np.isfinite(np.asarray(state.out, np.float32)).all()
        assert not np.isnan(np.asarray(state.lse)).any()


def test_sound_cu_seqlens_are_left_as_they_are():
    for good in (CU_Q, CU_K, i32(0), i32(0, 0, 0, 10), i32(0, 10, 10)):
        np.testing.assert_array_equal(checks.sound_cu_seqlens(good, 10 + 10 * (good is CU_K)), good)


def traced(function):
    """A function that is traced and not run: it compiles nothing."""
    return lambda *arguments, **options: jax.eval_shape(lambda: function(*arguments, **options))


def test_parts_that_do_not_fit_each_other():
    quantize_context = traced(jaxfp8.quantize_context)
    query = traced(jaxfp8.quantize_query)(Q, CU_Q)
    context = quantize_context(K, V, CU_K)
    with pytest.raises(TypeError, match=r"^query: expected a QuantizedQuery, got "):
        jaxfp8.attend(Q, context, causal=True)
    with pytest.raises(TypeError, match=r"^context: expected a QuantizedContext, got tuple"):
        jaxfp8.attend(query, (K, V), causal=True)
    with pytest.raises(ValueError, match=r"^context: expected number of heads 3 to match query"):
        jaxfp8.attend(query, quantize_context(K[:, :2], V[:, :2], CU_K), causal=True)
    with pytest.raises(ValueError, match=r"^context: expected fmt float8_e4m3fnuz to match query"):
        jaxfp8.attend(query, quantize_context(K, V, CU_K, fmt=FN), causal=True)
    with pytest.raises(ValueError, match=r"^context: expected backend xla to match query, got int"):
        jaxfp8.attend(query, quantize_context(K, V, CU_K, backend="interpret"), causal=True)
    with pytest.raises(TypeError, match=r"^backend: expected a name or None, got list"):
        jaxfp8.attend(query, context, causal=True, backend=["xla"])
    with pytest.raises(ValueError, match=r"^backend: query and context are in the layout of 'xla'"):
        jaxfp8.attend(query, context, causal=True, backend="interpret")
    with pytest.raises(ValueError, match=r"^context: expected cu_seqlens shape"):
        jaxfp8.attend(query, quantize_context(K, V, i32(0, 20)), causal=True)


def test_quantized_query_and_context():
    with pytest.raises(ValueError, match=r"^descale: expected shape \[3\], one per head of q"):
        jaxfp8.quantize_query(Q, CU_Q, descale=SCALE[:1])
    with pytest.raises(ValueError, match=r"^descale: expected descales for q, which is already"):
        jaxfp8.quantize_query(Q.astype(FNUZ.dtype), CU_Q)
    with pytest.raises(ValueError, match=r"^k_descale: expected descales for k, which is already"):
        jaxfp8.quantize_context(K.astype(FNUZ.dtype), V, CU_K)
    with pytest.raises(ValueError, match=r"^v_descale: expected finite values > 0, got -0.01"):
        jaxfp8.quantize_context(K, V, CU_K, v_descale=-SCALE)


def test_prefill_pass():
    state = jaxfp8.start_prefill(Q, CU_Q)
    with pytest.raises(TypeError, match=r"^state: expected a PrefillState from start_prefill, got"):
        jaxfp8.attend_segment(Q, K, V, CU_K)
    with pytest.raises(ValueError, match=r"^v: expected shape \[Tk, 3, 128\] to match start_pre"):
        jaxfp8.attend_segment(state, K, V[:, :, :64], CU_K)
    with pytest.raises(ValueError, match=r"^k: expected shape \[Tk, 3, 192\] to match q"):
        jaxfp8.attend_segment(state, K[:, :1], V, CU_K)
    with pytest.raises(ValueError, match=r"^cu_seqlens_k: expected shape \[3\] to match cu_seq"):
        jaxfp8.attend_segment(state, K, V, i32(0, 20))
    with pytest.raises(ValueError, match=r"^k: expected shape \[10, 3, 192\] to match q"):
        jaxfp8.attend_new_tokens(state, K, V)
    with pytest.raises(ValueError, match=r"^precision: expected 'fp8' or 'bf16', got 'int8'"):
        jaxfp8.attend_new_tokens(state, K[:10], V[:10], precision="int8")
    bf16 = jaxfp8.start_prefill(Q, CU_Q, precision="bf16")
    with pytest.raises(ValueError, match=r"^precision: expected 'bf16' in a pass of precision"):
        jaxfp8.attend_new_tokens(bf16, K[:10], V[:10], precision="fp8")
    with pytest.raises(ValueError, match=r"^k_descale: expected None"):
        jaxfp8.attend_segment(bf16, K, V, CU_K, k_descale=SCALE)
    with pytest.raises(ValueError, match=r"^q_descale: expected None"):
        jaxfp8.start_prefill(Q, CU_Q, precision="bf16", q_descale=SCALE)
    with pytest.raises(ValueError, match=r"^v_head_dim: expected at least 1, got 0"):
        jaxfp8.start_prefill(Q, CU_Q, v_head_dim=0)


def test_quantizers():
    x = Q
    with pytest.raises(TypeError, match=r"^x: expected dtype bfloat16 or float32, got float64"):
        jaxfp8.per_head_amax(np.ones((2, 3, 4)))
    with pytest.raises(ValueError, match=r"^x: expected shape \[T, H, D\], got \[3, 192\]"):
        jaxfp8.quantize_per_head(x[0], SCALE, FNUZ)
    with pytest.raises(ValueError, match=r"^descale: expected shape \[3\], one per head of x"):
        jaxfp8.quantize_per_head(x, SCALE[:2], FNUZ)
    with pytest.raises(ValueError, match=r"^descale: expected finite values > 0, got 0.0 for head"):
        jaxfp8.quantize_per_head(x, 0 * SCALE, FNUZ)
    with pytest.raises(TypeError, match=r"^fmt: expected jaxfp8.E4M3FNUZ or jaxfp8.E4M3FN, got st"):
        jaxfp8.dynamic_quantize_per_head(x, "e4m3")
    with pytest.raises(ValueError, match=r"^margin: expected a finite number >= 1, got 0.5"):
        jaxfp8.descale_from_amax(SCALE, FNUZ, margin=0.5)
    with pytest.raises(TypeError, match=r"^margin: expected a number, got str"):
        jaxfp8.descale_from_amax(SCALE, FNUZ, margin="1.5")
    with pytest.raises(ValueError, match=r"^amax: expected shape \[H\], got \[3, 1\]"):
        jaxfp8.descale_from_amax(SCALE[:, None], FNUZ)
    with pytest.raises(TypeError, match=r"^amax: expected a JAX or NumPy array .* got HeadSlice"):
        jaxfp8.descale_from_amax(jaxfp8.HeadSlice(SCALE, 0, 3), FNUZ)


def test_merge_states():
    a = jaxfp8.AttentionState(V[:10], jnp.ones((H, 10), jnp.float32))
    with pytest.raises(TypeError, match=r"^b: expected an AttentionState, got tuple"):
        jaxfp8.merge_states(a, (a.out, a.lse))
    with pytest.raises(ValueError, match=r"^a.lse: expected shape \[3, 10\] to match a.out, got"):
        jaxfp8.merge_states(a._replace(lse=a.lse.T), a)
    with pytest.raises(ValueError, match=r"^b.out: expected shape \[10, 3, 128\] to match a.out"):
        jaxfp8.merge_states(a, jaxfp8.AttentionState(a.out[:9], a.lse[:, :9]))
    for field in ("out", "lse"):
        sliced = a._replace(**{field: jaxfp8.HeadSlice(a.out, 0, 64)})
        with pytest.raises(TypeError, match=rf"^b.{field}: expected .*, got HeadSlice"):
            jaxfp8.merge_states(a, sliced)
    with pytest.raises(TypeError, match=r"^b.lse: expected dtype float32, got float16"):
        jaxfp8.merge_states(a, a._replace(lse=a.lse.astype(jnp.float16)))


def test_targets():
    with pytest.raises(TypeError, match=r"^device: expected a jax.Device, got str"):
        jaxfp8.detect_target("gfx942")
