# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Calibration from torch: the shards of `jaxfp8.Calibrator`, from tensors."""

from __future__ import annotations

import os
import threading
import types
from collections.abc import Mapping
from typing import Any

import torch

import jaxfp8
from jaxfp8.scales import Identity, RankShard
from jaxfp8.scales.arguments import integer
from jaxfp8_torch.states import check_tensor


class Calibrator:
    """Running per-head maxima of Q, K and V in the attention layers of one rank.

    As `jaxfp8.Calibrator`: the same shard, bit for bit, for the same values; the same `arm`, the
    same context manager. The maxima are taken by torch and live on the tensors' device: observing
    queues work on the current stream and waits for nothing. Thread-safe.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        tp_rank: int,
        pp_rank: int,
        layers: Mapping[int, str],
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        """As `jaxfp8.Calibrator`."""
        self._lock = threading.Lock()
        # float32 [3, local_heads] of each layer: q, k, v; and the stream that it was made on.
        self._maxima: dict[int, tuple[torch.Tensor, torch.Stream | None]] = {}
        self._shards = _Shards(
            identity,
            tp_rank=tp_rank,
            pp_rank=pp_rank,
            layers=layers,
            directory=directory,
        )
        self._shards.on_device = self._maxima
        self._shards.on_device_lock = self._lock

    @property
    def identity(self) -> Identity:
        """What the calibration is made of and for."""
        return self._shards.identity

    @property
    def armed(self) -> bool:
        """Whether observations are recorded."""
        return self._shards.armed

    def arm(self) -> None:
        """Starts recording. To be called after warm-up, whose inputs are not the model's."""
        self._shards.arm()

    def observe(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        num_tokens: int | None = None,
    ) -> None:
        """Takes the values of one attention call into account.

        Args:
          layer: the model's 0-based layer index.
          q: bfloat16 or float32 [Tq, local_heads, qk_head_dim]; any strides.
          k: bfloat16 or float32 [Tk, local_heads, qk_head_dim].
          v: bfloat16 or float32 [Tk, local_heads, v_head_dim].
          num_tokens: where the tensors are longer than what they hold, the number of tokens to
            look at, of each.

        Raises:
          TypeError: not a tensor, a wrong dtype, or a layer or num_tokens that is not an integer.
          ValueError: a layer that this stage does not have, or a wrong shape.
        """
        layer = self._shards.layer_index(layer)
        identity = self.identity
        dims = (identity.qk_head_dim, identity.qk_head_dim, identity.v_head_dim)
        for name, dim, x in zip("qkv", dims, (q, k, v), strict=True):
            check_tensor(name, x)
            if x.dtype not in (torch.bfloat16, torch.float32):
                raise TypeError(
                    f"{name}: expected dtype bfloat16 or float32, got "
                    f"{str(x.dtype).removeprefix('torch.')}"
                )
            if x.dim() != 3 or x.shape[1:] != (identity.local_heads, dim):
                raise ValueError(
                    f"{name}: expected shape [T, {identity.local_heads}, {dim}] to match the "
                    f"identity, got {list(x.shape)}"
                )
        rows = min(x.shape[0] for x in (q, k, v))
        if num_tokens is not None and not 0 <= integer("num_tokens", num_tokens) <= rows:
            raise ValueError(
                "num_tokens: expected a number of tokens within q, k and v, got "
                f"{num_tokens} for {q.shape[0]}, {k.shape[0]} and {v.shape[0]}"
            )
        if not self.armed or 0 in (num_tokens, q.shape[0] + k.shape[0]):
            return
        with torch.no_grad():
            self._take(layer, torch.stack([_amax(x[:num_tokens]) for x in (q, k, v)]))

    def observe_amax(
        self, layer: int, q_amax: torch.Tensor, k_amax: torch.Tensor, v_amax: torch.Tensor
    ) -> None:
        """Takes maxima into account that the caller has already, float32 [local_heads] each.

        They must not hide a NaN or an infinity that was among the values. A negative one, like
        those, sticks, and the shard is refused.

        Raises:
          TypeError: not a tensor, a wrong dtype, or a layer that is not an integer.
          ValueError: a layer that this stage does not have, or a wrong shape.
        """
        layer = self._shards.layer_index(layer)
        heads = self.identity.local_heads
        for name, x in (("q_amax", q_amax), ("k_amax", k_amax), ("v_amax", v_amax)):
            check_tensor(name, x)
            if x.dtype != torch.float32:
                raise TypeError(
                    f"{name}: expected dtype float32, got {str(x.dtype).removeprefix('torch.')}"
                )
            if x.shape != (heads,):
                raise ValueError(
                    f"{name}: expected shape [{heads}] to match the identity, got {list(x.shape)}"
                )
        if self.armed:
            with torch.no_grad():
                maxima = torch.stack([q_amax, k_amax, v_amax])
                # A negative maximum is somebody's mistake: it is made to stick, as a NaN is.
                self._take(layer, torch.where(maxima >= 0, maxima, torch.inf))
            self._shards.note_given(layer)

    def shard(self) -> RankShard:
        """This rank's shard. Waits for the device.

        Raises:
          ScaleArtifactError: as `jaxfp8.Calibrator.shard`.
        """
        return self._shards.shard()

    def save(self, directory: str | os.PathLike[str] | None = None) -> str:
        """Writes this rank's shard, atomically and durably, and returns its path.

        Raises:
          ScaleArtifactError, OSError, ValueError: as `jaxfp8.Calibrator.save`.
        """
        return self._shards.save(directory)

    def __enter__(self) -> Calibrator:
        self._shards.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self._shards.__exit__(kind, error, traceback)

    def _take(self, layer: int, maxima: torch.Tensor) -> None:
        device = maxima.device
        stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)
        with self._lock:
            if layer in self._maxima:
                seen, last = self._maxima[layer]
                if stream is not None and last is not None and stream != last:
                    stream.wait_stream(last)
                    seen.record_stream(stream)
                maxima = torch.maximum(seen, maxima)
            self._maxima[layer] = (maxima, stream)


class _Shards(jaxfp8.Calibrator):
    """The calibrator of jaxfp8, which takes the maxima from torch when a shard is wanted."""

    on_device: dict[int, tuple[torch.Tensor, torch.Stream | None]]
    on_device_lock: threading.Lock

    def layer_index(self, layer: Any) -> int:
        """layer as an int, if it is an attention layer of this stage."""
        return self._require_layer(layer)

    def note_given(self, layer: int) -> None:
        """To be called for a layer whose maxima the caller gave."""
        self._given.add(layer)

    def shard(self) -> RankShard:
        with self.on_device_lock:
            on_device = dict(self.on_device)
        for layer, (seen, stream) in on_device.items():
            if stream is not None:
                stream.synchronize()
            with self._lock:
                self._maxima[layer] = seen.cpu().numpy()
        return super().shard()


def _amax(x: torch.Tensor) -> torch.Tensor:
    """float32 [H]: largest |x| of each head; infinity where a NaN is among the values."""
    if x.shape[0] == 0:
        return x.new_zeros(x.shape[1], dtype=torch.float32)
    largest = torch.linalg.vector_norm(x, torch.inf, dim=(0, 2)).float()
    return torch.where(largest.isnan(), torch.inf, largest)
