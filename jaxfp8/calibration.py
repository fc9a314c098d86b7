# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Calibration: watch Q, K and V of a running model, keep the largest magnitude of every head."""

from __future__ import annotations

import errno
import logging
import os
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8 import checks
from jaxfp8.head_slice import HeadSlice, as_array
from jaxfp8.scales.arguments import integer, require, require_path
from jaxfp8.scales.errors import ScaleArtifactError, listed
from jaxfp8.scales.files import make_folder
from jaxfp8.scales.identity import Identity
from jaxfp8.scales.shard import LayerAmax, RankShard

_LOG = logging.getLogger(__name__)
_Array = jax.Array | np.ndarray | HeadSlice


class Calibrator:
    """Running per-head maxima of Q, K and V in the attention layers of one rank.

    The maxima live on the device; observing queues work there and waits for nothing. They come to
    the host once, when the shard is made. A NaN or an infinity that was seen sticks, and the shard
    is then refused.

    As a context manager it writes its shard into `directory` at the end of the block.

    If the block ends with an error (or is interrupted), what was seen is written beside the shard's
    place, under a name ending in ".incomplete" that a merge leaves out, and the error goes on its
    way with a note of it. An error while saving is raised after a block that ended well, and is a
    note on the error of one that did not: it never takes that error's place, nor keeps clean-up
    code around the block from running.

    Thread-safe.

    Example:
      >>> import jax.numpy as jnp, jaxfp8
      >>> identity = jaxfp8.scales.Identity(
      ...     model="example", revision="0123abc", checkpoint_id="example", calibration_id="books",
      ...     tp_size=1, pp_size=1, fp8_dtype="float8_e4m3fnuz", local_heads=2,
      ...     qk_head_dim=192, v_head_dim=128, margin=1.25,
      ... )
      >>> q, v = jnp.ones((8, 2, 192), jnp.bfloat16), jnp.ones((8, 2, 128), jnp.bfloat16)
      >>> calibrator = jaxfp8.Calibrator(
      ...     identity, tp_rank=0, pp_rank=0, layers={3: "layers.3.attn"}, directory="shards"
      ... )
      >>> with calibrator:
      ...     calibrator.observe(3, q, 100 * q, v)  # warm-up: checked, not recorded
      ...     calibrator.arm()
      ...     calibrator.observe(3, q, 2 * q, v)  # in the model, at each attention call
      >>> artifact = jaxfp8.scales.merge_folder("shards")
      >>> (artifact.layer(3).k * 240).tolist()  # 2, with the margin
      [2.5, 2.5]
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
        """Nothing is recorded before `arm`.

        Args:
          identity: what the calibration is made of and for.
          tp_rank: this rank's tensor-parallel rank.
          pp_rank: this rank's pipeline stage.
          layers: the runtime name of each attention layer of this stage, by the model's 0-based
            layer index; empty for a stage that has none.
          directory: where the shard is written, made now if it is missing, so that a place that
            cannot be written is noticed before hours of work; None where `save` is told.

        Raises:
          TypeError: identity is not an Identity, layers not a mapping, or directory not a path.
          ValueError: a rank or layer that cannot be, or two layers of one runtime name.
          OSError: the directory cannot be made or written into.
        """
        require("identity", identity, Identity, "an Identity")
        require("layers", layers, Mapping, "runtime names by layer index")
        # A shard of ones has the same ranks, layers and names as the one to come: it checks them.
        ones = np.ones(identity.local_heads, np.float32)
        checked = RankShard(
            identity=identity,
            tp_rank=tp_rank,
            pp_rank=pp_rank,
            layers={index: LayerAmax(name, ones, ones, ones) for index, name in layers.items()},
        )
        names = {index: layer.runtime_name for index, layer in checked.layers.items()}
        twice = [name for name, count in Counter(names.values()).items() if count > 1]
        if twice:
            raise ValueError(f"layers: expected distinct runtime names, got {twice[0]!r} twice")
        if directory is not None:
            require_path("directory", directory)
            make_folder(directory)
            if not os.access(directory, os.W_OK | os.X_OK):
                raise PermissionError(
                    errno.EACCES, "cannot write shards here", os.fspath(directory)
                )
        self._identity = identity
        self._tp_rank = checked.tp_rank
        self._pp_rank = checked.pp_rank
        self._layers = names
        self._directory = directory
        self._armed = False
        self._lock = threading.Lock()
        # float32 [3, local_heads] of each layer observed: q, k, v; infinity for what is not finite.
        self._maxima: dict[int, jax.Array | np.ndarray] = {}
        # Layers of which maxima were given, which may be negative by mistake.
        self._given: set[int] = set()

    @property
    def identity(self) -> Identity:
        """What the calibration is made of and for."""
        return self._identity

    @property
    def armed(self) -> bool:
        """Whether observations are recorded."""
        return self._armed

    def arm(self) -> None:
        """Starts recording. To be called after warm-up, whose inputs are not the model's."""
        self._armed = True

    def observe(
        self, layer: int, q: _Array, k: _Array, v: _Array, *, num_tokens: int | None = None
    ) -> None:
        """Takes the values of one attention call into account.

        One pass over q, k and v, queued on their device; compiled once for every shape. Arguments
        are checked before `arm` too.

        Args:
          layer: the model's 0-based layer index.
          q: bfloat16 or float32 [Tq, local_heads, qk_head_dim].
          k: bfloat16 or float32 [Tk, local_heads, qk_head_dim].
          v: bfloat16 or float32 [Tk, local_heads, v_head_dim]; like the others it may be a
            HeadSlice.
          num_tokens: where the arrays are longer than what they hold, the number of tokens to look
            at, of each; what lies beyond may be anything.

        Raises:
          TypeError: a traced value (observing is for eager code), a wrong dtype, or a layer or
            num_tokens that is not an integer.
          ValueError: a layer that this stage does not have, or a wrong shape.
        """
        layer = self._require_layer(layer)
        heads = self._identity.local_heads
        dims = {"q": self._identity.qk_head_dim, "k": self._identity.qk_head_dim}
        dims["v"] = self._identity.v_head_dim
        for (name, dim), x in zip(dims.items(), (q, k, v), strict=True):
            shape = f"[T, {heads}, {dim}]"
            checks.array(name, x, shape)
            _require_concrete(name, x)
            checks.dtype_in(name, x, (jnp.bfloat16, np.float32))
            checks.matches(name, x, shape, (None, heads, dim), "the identity")
        if num_tokens is not None:
            _require_concrete("num_tokens", num_tokens)
            num_tokens = integer("num_tokens", num_tokens)
            if not 0 <= num_tokens <= min(x.shape[0] for x in (q, k, v)):
                raise ValueError(
                    "num_tokens: expected a number of tokens within q, k and v, got "
                    f"{num_tokens} for {q.shape[0]}, {k.shape[0]} and {v.shape[0]}"
                )
        if not self._armed or 0 in (num_tokens, q.shape[0] + k.shape[0]):
            return
        self._take(layer, lambda seen: _max_with_values(seen, q, k, v, num_tokens))

    def observe_amax(self, layer: int, q_amax: _Array, k_amax: _Array, v_amax: _Array) -> None:
        """Takes maxima into account that the caller has already.

        Args:
          layer: the model's 0-based layer index.
          q_amax, k_amax, v_amax: float32 [local_heads], largest magnitude of each head. They must
            not hide a NaN or an infinity that was among the values. A negative one, like those,
            sticks, and the shard is refused: looking at it here would wait for the device.

        Raises:
          TypeError: a traced value, a wrong dtype, or a layer that is not an integer.
          ValueError: a layer that this stage does not have, or a wrong shape.
        """
        layer = self._require_layer(layer)
        heads = self._identity.local_heads
        maxima = {"q_amax": q_amax, "k_amax": k_amax, "v_amax": v_amax}
        for name, x in maxima.items():
            checks.array(name, x, "[H]")
            _require_concrete(name, x)
            checks.dtype_in(name, x, (np.float32,))
            checks.matches(name, x, f"[{heads}]", (heads,), "the identity")
        if self._armed:
            self._take(layer, lambda seen: _max_with_maxima(seen, q_amax, k_amax, v_amax))
            self._given.add(layer)

    def shard(self) -> RankShard:
        """This rank's shard. Waits for the device.

        Raises:
          ScaleArtifactError: nothing was recorded, a layer was never seen, or what was seen
            cannot be scaled (NaN, infinity, a head that is zero throughout); all layers concerned
            are named.
        """
        with self._lock:
            maxima = {layer: np.asarray(seen) for layer, seen in self._maxima.items()}
        problems = []
        if self._layers and not self._armed:
            problems.append(f"arm() was not called, so nothing was recorded of {self._names()}")
        elif unseen := [layer for layer in self._layers if layer not in maxima]:
            problems.append(f"never observed: {self._names(unseen)}")
        for layer, seen in sorted(maxima.items()):
            what = "NaN or infinity"
            if layer in self._given:
                what += " (or a negative maximum given to observe_amax)"
            for name, heads in zip("qkv", seen, strict=True):
                for fault, found in (
                    (f"{what} in {name}", ~np.isfinite(heads)),
                    (f"{name} is zero throughout", heads == 0),
                ):
                    if found.any():
                        where = listed(np.flatnonzero(found).tolist())
                        problems.append(f"{self._name(layer)}: {fault}, heads {where}")
        if problems:
            raise ScaleArtifactError("calibration", problems)
        return RankShard(
            identity=self._identity,
            tp_rank=self._tp_rank,
            pp_rank=self._pp_rank,
            layers={layer: LayerAmax(name, *maxima[layer]) for layer, name in self._layers.items()},
        )

    def save(self, directory: str | os.PathLike[str] | None = None) -> str:
        """Writes this rank's shard, atomically and durably, and returns its path.

        Args:
          directory: the folder; None takes that of the constructor.

        Raises:
          ScaleArtifactError: as `shard`; nothing is written.
          OSError: it could not be written; what was there is unchanged.
          TypeError: directory is not a path.
          ValueError: no directory is known.
        """
        return self.shard().save(self._require_directory(directory))

    def __enter__(self) -> Calibrator:
        self._require_directory(None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        # SystemExit with status 0 is how a server that was told to stop ends well.
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.save()
            return
        try:
            shard = self.shard()
            path = shard.save_as(self._require_directory(None), f"{shard.file_name}.incomplete")
            note = f"the calibration ended early; what it saw is in {path}, which no merge reads"
        except Exception as failure:
            note = f"the calibration ended early and was not written: {failure}"
        _LOG.error("%s", note)
        error.add_note(note)

    def _name(self, layer: int) -> str:
        return f"layer {layer} ({self._layers[layer]})"

    def _names(self, layers: Iterable[int] | None = None) -> str:
        return "; ".join(map(self._name, self._layers if layers is None else layers))

    def _require_layer(self, layer: Any) -> int:
        layer = integer("layer", layer)
        if layer not in self._layers:
            raise ValueError(
                "layer: expected an attention layer of this stage, one of "
                f"{listed(list(self._layers)) or 'none'}, got {layer}"
            )
        return layer

    def _require_directory(
        self, directory: str | os.PathLike[str] | None
    ) -> str | os.PathLike[str]:
        directory = self._directory if directory is None else directory
        if directory is None:
            raise ValueError("directory: expected a folder, here or in the constructor, got None")
        require_path("directory", directory)
        return directory

    def _take(self, layer: int, update: Callable[[Any], jax.Array]) -> None:
        with self._lock:
            zeros = np.zeros((3, self._identity.local_heads), np.float32)
            result = update(self._maxima.get(layer, zeros))
            # Concrete arguments inside jax.jit are traced all the same.
            _require_concrete("observe", result)
            self._maxima[layer] = result


def _require_concrete(name: str, x: Any) -> None:
    if checks.is_traced(x.array if isinstance(x, HeadSlice) else x):
        raise TypeError(
            f"{name}: expected a concrete array, got a traced one; observe outside jax.jit, "
            "jax.vmap and the like, where values exist"
        )


@jax.jit
def _max_with_values(
    seen: jax.Array,
    q: jax.Array | HeadSlice,
    k: jax.Array | HeadSlice,
    v: jax.Array | HeadSlice,
    num_tokens: jax.Array | None,
) -> jax.Array:
    return jnp.maximum(seen, jnp.stack([_amax(as_array(x), num_tokens) for x in (q, k, v)]))


@jax.jit
def _max_with_maxima(seen: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    maxima = jnp.stack([q, k, v])
    # A negative maximum is somebody's mistake: it is made to stick, as a NaN is.
    return jnp.maximum(seen, jnp.where(maxima >= 0, maxima, jnp.inf))


def _amax(x: jax.Array, num_tokens: jax.Array | None) -> jax.Array:
    """float32 [H]: largest |x| of each head; infinity where a NaN is among the values.

    A NaN cannot be left to the maximum: compiled for a CPU, that of XLA loses it in some shapes.
    """
    magnitude = jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.asarray(jnp.inf, x.dtype))
    if num_tokens is not None:
        counted = jnp.arange(x.shape[0]) < num_tokens
        magnitude = jnp.where(counted[:, None, None], magnitude, jnp.zeros((), x.dtype))
    return jnp.max(magnitude, axis=(0, 2), initial=0).astype(jnp.float32)
