# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""MLA weights from a Hugging Face checkpoint: safetensors, one file or many with an index.

Of a checkpoint of a terabyte, a rank of eight needs an eighth of the projections that have heads
and nothing of most files. Headers are checked first, of all layers asked for; then the slices of
the rank's heads are read and nothing else.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from safetensors import SafetensorError, safe_open

from jaxfp8.models.config import MlaConfig
from jaxfp8.models.weights import HEAD_AXIS, MlaWeights, weight_shapes
from jaxfp8.scales.errors import listed, shown
from jaxfp8.scales.files import read_regular_file
from jaxfp8.scales.safetensors_file import parse_json

_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 256 << 20
_DTYPE = "BF16"


class CheckpointError(ValueError):
    """A checkpoint that the layers cannot be read from, with everything that is wrong with it.

    Attributes:
      source: the file or folder.
      problems: one line for each thing that is wrong.
    """

    def __init__(self, source: str | os.PathLike[str], problems: Sequence[str]) -> None:
        self.source = os.fspath(source)
        self.problems = tuple(problems)
        count = "" if len(self.problems) == 1 else f"{len(self.problems)} problems: "
        super().__init__(f"{self.source!r}: {count}{'; '.join(self.problems)}")

    def __reduce__(self) -> tuple[type[CheckpointError], tuple[str, tuple[str, ...]]]:
        return type(self), (self.source, self.problems)


def load_layers(
    path: str | os.PathLike[str],
    config: MlaConfig,
    layers: Sequence[int],
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    device: jax.Device | jax.sharding.Sharding | None = None,
) -> dict[int, MlaWeights]:
    """The MLA weights of some layers, of one tensor-parallel rank's heads.

    Layer i consists of the tensors model.layers.{i}.self_attn.NAME.weight, bfloat16, NAME being
    q_a_proj, q_a_layernorm, q_b_proj, kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj, o_proj and,
    with an output gate, g_proj.

    Args:
      path: a safetensors file; or a folder with model.safetensors.index.json and the files that it
        names, or with *.safetensors files alone.
      config: the layers'.
      layers: 0-based indices.
      tp_rank: the rank.
      tp_size: number of ranks; divides config.num_heads.
      device: where the weights are put; None is JAX's default device.

    Returns:
      The weights by layer.

    Raises:
      ValueError: tp_size does not divide the heads, or there is no such rank.
      CheckpointError: tensors are missing, misshapen or of another dtype, self_attn of a layer
        holds others, or files cannot be read. All of that is listed, and no weight has been read.
    """
    heads = config.local_heads(tp_size)
    if not 0 <= tp_rank < tp_size:
        raise ValueError(f"tp_rank: expected 0 to {tp_size - 1}, got {tp_rank}")
    first = tp_rank * heads
    with contextlib.ExitStack() as stack:
        tensors = _Tensors(Path(path), layers, stack)
        for layer in layers:
            _check_layer(tensors, config, layer)
        if tensors.problems:
            raise CheckpointError(path, tensors.problems)
        loaded = {}
        for layer in layers:
            weights: dict[str, Any] = {"g_proj": None}
            for name, shape in weight_shapes(config, heads).items():
                part = tensors.slice_of(_tensor_name(layer, name))[_heads(name, shape, first)]
                weights[name] = jax.device_put(part.reshape(shape), device)
            loaded[layer] = MlaWeights(**weights)
    return loaded


class _Tensors:
    """The tensors of the layers' self_attn, wherever they lie, and what is wrong with the files."""

    def __init__(self, path: Path, layers: Sequence[int], stack: contextlib.ExitStack) -> None:
        self.problems: list[str] = []
        self._stack = stack
        self._prefixes = tuple(_prefix(layer) for layer in layers)
        self._files: dict[str, Any] = {}
        # The file of each tensor of the layers.
        self._file_of: dict[str, str] = {}
        if (index := path / _INDEX).is_file():
            self._read_index(index)
        elif path.is_dir():
            names = sorted(file.name for file in path.glob("*.safetensors"))
            if not names:
                self.problems.append(f"expected {_INDEX} or *.safetensors files")
            for name in names:
                self._add_file(path / name)
        else:
            self._add_file(path)

    def named(self, prefix: str) -> Iterator[str]:
        """The names of tensors that begin so."""
        return (name for name in self._file_of if name.startswith(prefix))

    def slice_of(self, name: str) -> Any:
        """A tensor to be sliced, which reads no more than the slice."""
        return self._files[self._file_of[name]].get_slice(name)

    def _read_index(self, path: Path) -> None:
        try:
            index = parse_json(read_regular_file(path, _MAX_INDEX_BYTES, follow_link=True))
            weight_map = index.get("weight_map") if isinstance(index, dict) else None
            if not isinstance(weight_map, Mapping):
                raise ValueError("expected an object with a weight_map")
        except (OSError, ValueError) as error:
            self.problems.append(f"{path.name}: {error}")
            return
        wanted = {
            name: file for name, file in weight_map.items() if name.startswith(self._prefixes)
        }
        for file in sorted(set(map(str, wanted.values()))):
            if file != os.path.basename(file):
                self.problems.append(f"{path.name}: expected file names, got {shown(file)}")
            else:
                self._add_file(path.parent / file)
        for name, file in wanted.items():
            if file in self._files and self._file_of.get(name) != file:
                self.problems.append(f"{name}: not in {file}, where {path.name} has it")

    def _add_file(self, path: Path) -> None:
        try:
            file = self._stack.enter_context(safe_open(path, framework="numpy"))
        except (OSError, SafetensorError) as error:
            self.problems.append(f"{path.name}: cannot be read: {error}")
            return
        self._files[path.name] = file
        for name in file.keys():  # noqa: SIM118 - not a mapping
            if not name.startswith(self._prefixes):
                continue
            if name in self._file_of:
                self.problems.append(f"{name}: in {self._file_of[name]} and in {path.name}")
            self._file_of[name] = path.name


def _check_layer(tensors: _Tensors, config: MlaConfig, layer: int) -> None:
    expected = {
        _tensor_name(layer, name): _stored_shape(name, shape)
        for name, shape in weight_shapes(config, config.num_heads).items()
    }
    found = set(tensors.named(_prefix(layer)))
    if missing := sorted(expected.keys() - found):
        tensors.problems.append(f"missing: {listed(missing)}")
    if extra := sorted(found - expected.keys()):
        tensors.problems.append(f"not part of the layer: {listed(extra)}")
    for name in sorted(expected.keys() & found):
        tensor = tensors.slice_of(name)
        if tensor.get_shape() != list(expected[name]):
            tensors.problems.append(
                f"{name}: expected shape {list(expected[name])}, got {tensor.get_shape()}"
            )
        if tensor.get_dtype() != _DTYPE:
            tensors.problems.append(f"{name}: expected dtype {_DTYPE}, got {tensor.get_dtype()}")


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}.self_attn."


def _tensor_name(layer: int, weight: str) -> str:
    stored = "kv_a_proj_with_mqa" if weight == "kv_a_proj" else weight
    return f"{_prefix(layer)}{stored}.weight"


def _stored_shape(weight: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a weight as the checkpoint has it: [out, in], the heads not split off."""
    if weight not in HEAD_AXIS:
        return shape
    axis = HEAD_AXIS[weight]
    return (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


def _heads(weight: str, shape: tuple[int, ...], first: int) -> tuple[slice, ...]:
    """Where the heads of a rank, beginning with `first`, lie in the stored weight.

    Args:
      weight: its name.
      shape: that of the rank's weight, the heads split off.
      first: the rank's first head.
    """
    if weight not in HEAD_AXIS:
        return (slice(None),)
    axis = HEAD_AXIS[weight]
    heads, width = shape[axis : axis + 2]
    return (*[slice(None)] * axis, slice(first * width, (first + heads) * width))
