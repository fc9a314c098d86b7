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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from safetensors import SafetensorError, safe_open

from jaxfp8.models.arguments import check_config, check_layers, check_tp_rank
from jaxfp8.models.config import MlaConfig
from jaxfp8.models.weights import HEAD_AXIS, MlaWeights, weight_shapes
from jaxfp8.scales.arguments import require, require_path
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
    layers: Iterable[int],
    *,
    prefix: str = "model.layers",
    tp_rank: int = 0,
    tp_size: int = 1,
    device: jax.Device | jax.sharding.Sharding | None = None,
) -> dict[int, MlaWeights]:
    """The MLA weights of some layers, of one tensor-parallel rank's heads.

    Layer i consists of the tensors {prefix}.{i}.self_attn.NAME.weight, bfloat16, NAME being
    q_a_proj, q_a_layernorm, q_b_proj, kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj, o_proj and,
    with an output gate, g_proj.

    Args:
      path: a safetensors file; or a folder with model.safetensors.index.json and the files that it
        names, or with *.safetensors files alone.
      config: the layers'.
      layers: 0-based indices, distinct, at least one.
      prefix: what the tensors' names begin with, before the layer's index. That of a language model
        within a multimodal one is often "language_model.model.layers".
      tp_rank: the rank.
      tp_size: number of ranks; divides config.num_heads.
      device: where the weights are put; None is JAX's default device.

    Returns:
      The weights by layer.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: layers are not as above, tp_size does not divide the heads, or there is no such
        rank.
      CheckpointError: tensors are missing, misshapen or of another dtype, self_attn of a layer
        holds others, or files cannot be read. All of that is listed, and no weight has been read.
    """
    require_path("path", path)
    check_config(config)
    heads = config.local_heads(tp_size)
    first = check_tp_rank(tp_rank, tp_size) * heads
    if device is not None:
        kinds = (jax.Device, jax.sharding.Sharding)
        require("device", device, kinds, "a jax.Device, a Sharding or None")
    attention = _attention_names(prefix, check_layers(layers))
    with contextlib.ExitStack() as stack:
        tensors = _Tensors(Path(path), tuple(attention.values()), stack)
        for name in attention.values():
            _check_layer(tensors, config, name)
        if tensors.problems:
            raise CheckpointError(path, tensors.problems)
        loaded = {}
        for layer, attention_name in attention.items():
            weights: dict[str, Any] = {"g_proj": None}
            for name, shape in weight_shapes(config, heads).items():
                stored = tensors.slice_of(_tensor_name(attention_name, name))
                part = stored[_heads(name, shape, first)].reshape(shape)
                weights[name] = jax.device_put(part, device)
            loaded[layer] = MlaWeights(**weights)
    return loaded


class _Tensors:
    """The tensors of the layers' self_attn, wherever they lie, and what is wrong with the files."""

    def __init__(self, path: Path, prefixes: tuple[str, ...], stack: contextlib.ExitStack) -> None:
        self.problems: list[str] = []
        self._stack = stack
        self._prefixes = prefixes
        self._files: dict[str, Any] = {}
        # The file of each tensor of the layers.
        self._file_of: dict[str, str] = {}
        # Tensors that an index names; where one is in no file, a problem says why.
        self._indexed: set[str] = set()
        # False where any tensor may be in a file that cannot be read.
        self._all_known = True
        if (index := path / _INDEX).is_file():
            self._read_index(index)
        elif path.is_dir():
            names = sorted(file.name for file in path.glob("*.safetensors"))
            if not names:
                self.problems.append(f"expected {_INDEX} or *.safetensors files")
                self._all_known = False
            for name in names:
                self._all_known &= self._add_file(path / name)
        else:
            self._all_known = self._add_file(path)

    def named(self, prefix: str) -> Iterator[str]:
        """The names of tensors that begin so."""
        return (name for name in self._file_of if name.startswith(prefix))

    def missing(self, names: Collection[str]) -> list[str]:
        """Those of the names that are nowhere, in so far as files could be read."""
        return sorted(set(names) - self._file_of.keys() - self._indexed) if self._all_known else []

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
            self._all_known = False
            return
        wanted = {
            name: file for name, file in weight_map.items() if name.startswith(self._prefixes)
        }
        if bad := sorted({shown(file) for file in wanted.values() if not _is_file_name(file)}):
            self.problems.append(f"{path.name}: expected file names, got {listed(bad)}")
        files = {name: file for name, file in wanted.items() if _is_file_name(file)}
        for file in sorted(set(files.values())):
            self._add_file(path.parent / file)
        for name, file in files.items():
            if file in self._files and self._file_of.get(name) != file:
                self.problems.append(f"{name}: not in {file}, where {path.name} has it")
        self._indexed = set(wanted)

    def _add_file(self, path: Path) -> bool:
        """Takes a file's tensors in; whether it can be read."""
        try:
            file = self._stack.enter_context(safe_open(path, framework="numpy"))
        except (OSError, SafetensorError) as error:
            self.problems.append(f"{path.name}: cannot be read: {error}")
            return False
        self._files[path.name] = file
        for name in file.keys():  # noqa: SIM118 - not a mapping
            if not name.startswith(self._prefixes):
                continue
            if name in self._file_of:
                self.problems.append(f"{name}: in {self._file_of[name]} and in {path.name}")
            self._file_of[name] = path.name
        return True


def _is_file_name(value: object) -> bool:
    """Whether it names a file in the folder itself."""
    if not isinstance(value, str) or value in ("", ".", ".."):
        return False
    # What cannot be printed (NUL, half of a surrogate pair) cannot be opened either.
    return value.isprintable() and value == os.path.basename(value)


def _check_layer(tensors: _Tensors, config: MlaConfig, attention: str) -> None:
    expected = {
        _tensor_name(attention, name): _stored_shape(name, shape)
        for name, shape in weight_shapes(config, config.num_heads).items()
    }
    found = set(tensors.named(attention))
    if missing := tensors.missing(expected):
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


def _attention_names(prefix: str, layers: Iterable[int]) -> dict[int, str]:
    """What the names of each layer's tensors begin with."""
    require("prefix", prefix, str, "the name before a layer's index")
    if not prefix or prefix.endswith("."):
        raise ValueError(
            f"prefix: expected a name such as 'model.layers', without a dot at its end, got "
            f"{prefix!r}"
        )
    return {layer: f"{prefix}.{layer}.self_attn." for layer in layers}


def _tensor_name(attention: str, weight: str) -> str:
    stored = "kv_a_proj_with_mqa" if weight == "kv_a_proj" else weight
    return f"{attention}{stored}.weight"


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
