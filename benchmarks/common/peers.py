# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Attention that others offer for the same shapes, by name: in bfloat16, and one in FP8.

Each makes a Subject from the sets of inputs, and raises where it does not serve the batch. A peer
that is installed takes part; one that is asked for by name and cannot is an error.

JAX's path to cuDNN wants V as wide as K; what is timed computes with zeros beside V, laid there
before.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from common import inputs, torch_attention, torch_on_gpu
from common.inputs import Batch, Tensors, pick
from common.program import choose
from common.timing import Subject
from jaxfp8.cli import CommandError
from jaxfp8.ops.attention.base import Precision


@dataclasses.dataclass(frozen=True)
class Peer:
    """An implementation of attention.

    Attributes:
      name: as --peers has it.
      missing: why it cannot run on this machine, or None.
      make: its Subject; `output` gives [Tq, H, Dv] and None, for these do not return an LSE.
      precision: what it computes in.
    """

    name: str
    missing: Callable[[], str | None]
    make: Callable[[Batch, list[Tensors]], Subject]
    precision: Precision = "bf16"


def select(names: Sequence[str] | None) -> list[Peer]:
    """The peers of those names; those that can run here where names is None.

    Raises:
      CommandError: a name is unknown, or its peer cannot run here.
    """
    if names is None:
        return [peer for peer in _PEERS.values() if peer.missing() is None]
    peers = [_PEERS[name] for name in choose("peers", names, _PEERS, or_none=True)]
    for peer in peers:
        if reason := peer.missing():
            raise CommandError(f"--peers: {peer.name} cannot run here: {reason}")
    return peers


def torch_missing() -> str | None:
    """Why torch cannot be used beside JAX, or None."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    if jax.default_backend() != "cpu" and not torch_on_gpu.usable():
        return "torch sees no GPU"
    return None


def _torch_gpu_missing() -> str | None:
    if jax.default_backend() == "cpu":
        return "it needs a GPU"
    return torch_missing()


def _cudnn_missing() -> str | None:
    if any("NVIDIA" in device.device_kind for device in jax.devices()):
        return None
    return "it needs an NVIDIA GPU"


def _jax_cudnn(batch: Batch, sets: list[Tensors]) -> Subject:
    length_q, length_k = _one_length(batch)
    if batch.causal and length_q != length_k:
        raise NotImplementedError("its causal mask is aligned top left")
    sequences = len(batch.lengths_q)
    v_head_dim = sets[0].v.shape[2]

    @jax.jit
    def attention(*tensors: Any) -> jax.Array:
        q, k, v = (x.reshape(sequences, -1, *x.shape[1:]) for x in tensors)
        out = jax.nn.dot_product_attention(q, k, v, is_causal=batch.causal, implementation="cudnn")
        return out.reshape(-1, *out.shape[2:])

    widths = [(0, 0), (0, 0), (0, sets[0].k.shape[2] - v_head_dim)]
    padded = [(q, k, jnp.pad(v, widths)) for q, k, v in sets]
    return Subject(
        lambda i: attention(*pick(padded, i)), output=lambda out: _on_host(out[:, :, :v_head_dim])
    )


def _jax_cudnn_fp8(batch: Batch, sets: list[Tensors]) -> Subject:
    raise NotImplementedError(
        "JAX has cuDNN's FP8 attention in jax._src alone, without a public function"
    )


def _jax_xla(batch: Batch, sets: list[Tensors]) -> Subject:
    """The three lines that attention is, as XLA compiles them: all scores are in memory."""
    mask = _mask(batch) if batch.causal or len(batch.lengths_q) > 1 else None

    @jax.jit
    def attention(q: Any, k: Any, v: Any, mask: Any) -> jax.Array:
        scores = jnp.einsum("qhd,khd->hqk", q, k, preferred_element_type=jnp.float32)
        scores = scores * inputs.QK_HEAD_DIM**-0.5
        if mask is not None:
            scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
        p = jax.nn.softmax(scores, axis=-1)
        if mask is not None:
            p = jnp.where(mask, p, 0)  # a row that sees no key
        return jnp.einsum("hqk,khd->qhd", p.astype(v.dtype), v)

    return Subject(lambda i: attention(*pick(sets, i), mask), output=_on_host)


def _on_host(out: jax.Array) -> tuple[np.ndarray, None]:
    return np.asarray(out), None


def _one_length(batch: Batch) -> tuple[int, int]:
    """New tokens and keys of each sequence."""
    if len(set(batch.lengths_q)) > 1 or len(set(batch.lengths_k)) > 1:
        raise NotImplementedError("it serves sequences of one length alone")
    if not batch.lengths_q[0] or not batch.lengths_k[0]:
        raise NotImplementedError("it serves no empty sequences")
    return batch.lengths_q[0], batch.lengths_k[0]


def _mask(batch: Batch) -> jax.Array:
    """bool [Tq, Tk]: which keys a token sees."""

    def places(lengths: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        # Counted from the end of the sequence, as the causal mask is aligned there.
        from_end = np.concatenate([np.arange(-n, 0) for n in lengths])
        return sequence, from_end

    sequence_q, place_q = places(batch.lengths_q)
    sequence_k, place_k = places(batch.lengths_k)
    mask = sequence_q[:, None] == sequence_k[None]
    if batch.causal:
        mask &= place_k[None] <= place_q[:, None]
    return jnp.asarray(mask)


_PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "torch-cudnn",
            _torch_gpu_missing,
            functools.partial(torch_attention.subject, "CUDNN_ATTENTION"),
        ),
        Peer(
            "torch-flash",
            _torch_gpu_missing,
            functools.partial(torch_attention.subject, "FLASH_ATTENTION"),
        ),
        Peer("torch-sdpa", torch_missing, functools.partial(torch_attention.subject, None)),
        Peer("jax-cudnn", _cudnn_missing, _jax_cudnn),
        Peer("jax-cudnn-fp8", _cudnn_missing, _jax_cudnn_fp8, "fp8"),
        Peer("jax-xla", lambda: None, _jax_xla),
    )
}

NAMES = tuple(_PEERS)
