# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The prefill that vLLM's MLA attention does, on jaxfp8: new tokens, then context in chunks.

    python interop/examples/vllm_context_chunks.py
    python interop/examples/vllm_context_chunks.py --device cuda --heads 12 --chunk_rows 65536 \\
        --context 100000,3000,0,27 --new_tokens 2048,512,5,1

A few requests, each with cached latents and new tokens. As in vLLM:

- q [Tq, H, 192]; kv_nope [T, H, 256] is projected from the latents and holds K's 128 columns, then
  V's; K is those and the 64 columns that all heads share; V stays a strided view of kv_nope.
- The new tokens attend to one another, causally, in BF16.
- The context comes in chunks of at most --chunk_rows rows that pack several requests, in FP8 with
  static scales from an artifact (which is calibrated here first, and read back from its file).
- Each chunk's attention is merged into what there is.

Chunks are projected into one workspace that is given whole, so that every chunk has one shape and
nothing is copied. The outcome is compared with attention in torch, in float32 from the same BF16
tensors. Exit status 1 where the error is past --max_error.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from absl import app, flags

import jaxfp8
import jaxfp8_torch
from jaxfp8.scales import Identity, merge_shards
from jaxfp8_torch.devices import jax_device

_DEVICE = flags.DEFINE_string("device", "cpu", "torch device")
_HEADS = flags.DEFINE_integer("heads", 2, "heads of this rank", lower_bound=1)
_CONTEXT = flags.DEFINE_list("context", ["150", "37", "0", "3"], "cached tokens of each request")
_NEW_TOKENS = flags.DEFINE_list("new_tokens", ["20", "9", "5", "1"], "new tokens of each request")
_CHUNK_ROWS = flags.DEFINE_integer("chunk_rows", 64, "rows of a chunk", lower_bound=1)
_MAX_ERROR = flags.DEFINE_float("max_error", 0.06, "bound on the relative error of the output")

LATENT, NOPE, ROPE, V_DIM = 512, 128, 64, 128
LAYER = 3


@dataclasses.dataclass(frozen=True)
class Request:
    """Latents of a request: its cached tokens, then its new ones."""

    latents: torch.Tensor  # [tokens, LATENT + ROPE]
    context: int
    new_tokens: int


class Layer:
    """What of an attention layer comes before attention: latents to keys and values."""

    def __init__(self, heads: int, device: str) -> None:
        """Random weights, with heads of different scale."""
        self.heads = heads
        weight = torch.randn(LATENT, heads, NOPE + V_DIM, device=device) * LATENT**-0.5
        weight *= torch.linspace(0.5, 2, heads, device=device)[:, None]
        self.kv_b_proj = weight.flatten(1).to(torch.bfloat16)

    def project(
        self, latents: torch.Tensor, k: torch.Tensor, kv_nope: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Fills the first rows of k [T, H, 192] and kv_nope [T, H, 256]; returns k, and V in it."""
        rows = latents.shape[0]
        torch.mm(latents[:, :LATENT], self.kv_b_proj, out=kv_nope[:rows].flatten(1))
        k[:rows, :, :NOPE] = kv_nope[:rows, :, :NOPE]
        k[:rows, :, NOPE:] = latents[:, None, LATENT:]
        return k, kv_nope[:, :, NOPE:]

    def keys_and_values(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same in memory of its own."""
        k = latents.new_empty(latents.shape[0], self.heads, NOPE + ROPE)
        kv_nope = latents.new_empty(latents.shape[0], self.heads, NOPE + V_DIM)
        return self.project(latents, k, kv_nope)


def offsets(lengths: Sequence[int], device: str) -> torch.Tensor:
    """cu_seqlens."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def chunks(requests: Sequence[Request], rows: int) -> Iterator[list[tuple[int, int]]]:
    """For each chunk the range of every request's context in it: filled request by request."""
    chunk, free = [(0, 0)] * len(requests), rows
    for index, request in enumerate(requests):
        begin = 0
        while begin < request.context:
            taken = min(free, request.context - begin)
            chunk[index] = (begin, begin + taken)
            begin, free = begin + taken, free - taken
            if not free:
                yield chunk
                chunk, free = [(0, 0)] * len(requests), rows
    if free < rows:
        yield chunk


def calibrate(
    layer: Layer, q: torch.Tensor, requests: Sequence[Request], folder: Path
) -> jaxfp8.LayerScales:
    """Static scales from an artifact: observed, merged, written, read for the deployment."""
    fmt = jaxfp8.detect_target(jax_device(q.device)).fp8_format
    if fmt is None:
        raise NotImplementedError("the device has no FP8")
    identity = Identity(
        model="example", revision="0123456789abcdef", checkpoint_id="example",
        calibration_id="example", tp_size=1, pp_size=1, fp8_dtype=fmt.name,
        local_heads=layer.heads, qk_head_dim=NOPE + ROPE, v_head_dim=V_DIM, margin=1.125,
    )  # fmt: skip
    calibrator = jaxfp8_torch.Calibrator(identity, tp_rank=0, pp_rank=0, layers={LAYER: "attn"})
    calibrator.arm()
    for request in requests:
        calibrator.observe(LAYER, q, *layer.keys_and_values(request.latents))
    artifact = merge_shards([calibrator.shard()])
    artifact.save(folder / "scales.safetensors")
    return jaxfp8_torch.ScaleArtifact.load(
        folder / "scales.safetensors", artifact.deployment, device=q.device
    ).layer(LAYER, tp_rank=0)


def prefill(
    layer: Layer,
    q: torch.Tensor,
    requests: Sequence[Request],
    scales: jaxfp8.LayerScales,
    chunk_rows: int,
) -> jaxfp8_torch.AttentionState:
    """The loop itself."""
    device = str(q.device)
    cu_seqlens_q = offsets([request.new_tokens for request in requests], device)
    state = jaxfp8_torch.start_prefill(q, cu_seqlens_q, q_descale=scales.q)
    new = torch.cat([request.latents[request.context :] for request in requests])
    state = jaxfp8_torch.attend_new_tokens(state, *layer.keys_and_values(new))

    k = q.new_empty(chunk_rows, layer.heads, NOPE + ROPE)
    kv_nope = q.new_empty(chunk_rows, layer.heads, NOPE + V_DIM)
    for chunk in chunks(requests, chunk_rows):
        latents = torch.cat(
            [
                request.latents[first:end]
                for request, (first, end) in zip(requests, chunk, strict=True)
            ]
        )
        cu_seqlens_k = offsets([end - first for first, end in chunk], device)
        state = jaxfp8_torch.attend_segment(
            state, *layer.project(latents, k, kv_nope), cu_seqlens_k,
            k_descale=scales.k, v_descale=scales.v,
        )  # fmt: skip
    return state.attention_state


def reference(layer: Layer, q: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """float32 [Tq, H, 128], all keys of a request at once, from the same BF16 tensors."""
    outputs, begin = [], 0
    for request in requests:
        k, v = layer.keys_and_values(request.latents)
        rows = q[begin : begin + request.new_tokens].float()
        begin += request.new_tokens
        scores = torch.einsum("qhd,khd->hqk", rows, k.float()) * (NOPE + ROPE) ** -0.5
        seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device)
        scores.masked_fill_(~seen.tril(request.context), -torch.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.float()))
    return torch.cat(outputs)


def run(
    device: str, heads: int, context: Sequence[int], new_tokens: Sequence[int], chunk_rows: int
) -> float:
    """The relative error of the loop's output."""
    torch.manual_seed(0)
    layer = Layer(heads, device)
    requests = [
        Request(
            torch.randn(cached + new, LATENT + ROPE, device=device).to(torch.bfloat16), cached, new
        )
        for cached, new in zip(context, new_tokens, strict=True)
    ]
    q = torch.randn(sum(new_tokens), heads, NOPE + ROPE, device=device).to(torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        scales = calibrate(layer, q, requests, Path(folder))
        out = prefill(layer, q, requests, scales, chunk_rows).out.float()
        expected = reference(layer, q, requests)
    return float((out - expected).norm() / expected.norm())


def main(argv: Sequence[str]) -> int:
    """Runs, prints, and returns the exit status."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    context, new_tokens = (list(map(int, x)) for x in (_CONTEXT.value, _NEW_TOKENS.value))
    if len(context) != len(new_tokens):
        raise app.UsageError("--context and --new_tokens must name as many requests")
    error = run(_DEVICE.value, _HEADS.value, context, new_tokens, _CHUNK_ROWS.value)
    print(
        f"device={_DEVICE.value}  requests={len(context)}  context={sum(context)}  "
        f"new_tokens={sum(new_tokens)}  programs={jaxfp8_torch.compilation_count()}  "
        f"relative_error={error:.4f}  max_error={_MAX_ERROR.value}"
    )
    return 0 if error <= _MAX_ERROR.value else 1


if __name__ == "__main__":
    app.run(main)
