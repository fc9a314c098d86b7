# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Shards: what one rank saw in a calibration, as a JSON file."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxfp8.scales.arguments import plain, require
from jaxfp8.scales.errors import ScaleArtifactError, listed, shown
from jaxfp8.scales.fields import CHECKS, not_layer_index, problems_in
from jaxfp8.scales.files import make_folder, read_regular_file, write_atomically
from jaxfp8.scales.identity import Identity, values_of
from jaxfp8.scales.record import Record
from jaxfp8.scales.safetensors_file import parse_json

MAX_SHARD_BYTES = 64 << 20
_FILE_NAME = re.compile(r"(?:kimi-k3-)?fp8-scales-pp([0-9]{2,5})-tp([0-9]{2,5})\.json")
_IDENTITY_FIELDS = tuple(field.name for field in dataclasses.fields(Identity))


@dataclasses.dataclass(frozen=True, eq=False)
class LayerAmax(Record):
    """The largest absolute values that one rank saw in one attention layer.

    Attributes:
      runtime_name: what the serving stack calls the attention layer; scales are exported under it.
      q, k, v: float32 [local_heads], finite and > 0. Any sequence or array; kept as a read-only
        array.

    Raises:
      ValueError: a name or maxima that are malformed; all problems are named.
    """

    runtime_name: str
    q: npt.NDArray[np.float32]
    k: npt.NDArray[np.float32]
    v: npt.NDArray[np.float32]

    def __post_init__(self) -> None:
        problems = []
        if CHECKS["model"](self.runtime_name):
            problems.append(
                f"runtime_name: expected a non-empty printable string, got "
                f"{shown(self.runtime_name)}"
            )
        for name in ("q", "k", "v"):
            try:
                with np.errstate(over="ignore"):  # becomes infinity, refused below
                    array = np.array(getattr(self, name), np.float32)
            except (TypeError, ValueError):
                problems.append(f"{name}_amax: expected numbers, got {shown(getattr(self, name))}")
                continue
            array.flags.writeable = False
            object.__setattr__(self, name, array)
            if array.ndim != 1 or array.shape != np.shape(self.q):
                problems.append(
                    f"{name}_amax: expected one float a head, as many as q_amax, got shape "
                    f"{list(array.shape)}"
                )
            elif not (ok := np.isfinite(array) & (array > 0)).all():
                problems.append(
                    f"{name}_amax: expected finite values > 0, got "
                    f"{listed([f'{array[head]} for head {head}' for head in np.flatnonzero(~ok)])}"
                )
        if problems:
            raise ValueError("; ".join(problems))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RankShard(Record):
    """What one rank saw in a calibration.

    Attributes:
      identity: what the calibration was made of and for.
      tp_rank: tensor-parallel rank; its heads are the tp_rank-th local_heads of the model.
      pp_rank: pipeline stage.
      layers: the maxima of each attention layer of the stage, by the model's 0-based layer index;
        empty for a stage that has none.

    Raises:
      TypeError: identity is not an Identity, or layers not a mapping to LayerAmax.
      ValueError: values that do not fit each other; all of them are named.
    """

    identity: Identity
    tp_rank: int
    pp_rank: int
    layers: Mapping[int, LayerAmax]

    def __post_init__(self) -> None:
        require("identity", self.identity, Identity, "an Identity")
        require("layers", self.layers, Mapping, "LayerAmax by layer index")
        problems = []
        for name, size in (("tp_rank", self.identity.tp_size), ("pp_rank", self.identity.pp_size)):
            rank = plain(getattr(self, name))
            object.__setattr__(self, name, rank)
            if type(rank) is not int or not 0 <= rank < size:
                problems.append(f"{name}: expected an integer from 0 to {size - 1}, got {rank!r}")
        heads = self.identity.local_heads
        layers = {plain(index): layer for index, layer in self.layers.items()}
        for index, layer in layers.items():
            require("layers", layer, LayerAmax, f"a LayerAmax for layer {index}")
            if expected := not_layer_index(index):
                problems.append(f"layers: expected {expected}, got {shown(index)}")
            if len(layer.q) != heads:
                problems.append(
                    f"layer {index}: expected maxima of {heads} heads (local_heads), got "
                    f"{len(layer.q)}"
                )
        if problems:
            raise ValueError("; ".join(problems))
        ordered = dict(sorted(layers.items()))
        object.__setattr__(self, "layers", types.MappingProxyType(ordered))

    @property
    def file_name(self) -> str:
        """The name of its file."""
        return f"fp8-scales-pp{self.pp_rank:02d}-tp{self.tp_rank:02d}.json"

    def to_json(self) -> str:
        """The contents of its file."""
        document: dict[str, Any] = {
            "schema": 1,
            **values_of(self.identity),
            "tp_rank": self.tp_rank,
            "pp_rank": self.pp_rank,
            "layers": {
                str(index): {
                    "runtime_name": layer.runtime_name,
                    "q_amax": layer.q.tolist(),
                    "k_amax": layer.k.tolist(),
                    "v_amax": layer.v.tolist(),
                }
                for index, layer in self.layers.items()
            },
        }
        return json.dumps(document, indent=1) + "\n"

    def save(self, folder: str | os.PathLike[str]) -> str:
        """Writes the shard into a folder, atomically and durably, and returns its path.

        A shard of the same rank that is there is replaced. The folder is made if it is missing.

        Raises:
          OSError: it could not be written; what was there is unchanged.
        """
        return self.save_as(folder, self.file_name)

    def save_as(self, folder: str | os.PathLike[str], file_name: str) -> str:
        """As `save`, under another name, which a merge of the folder leaves out."""
        make_folder(folder)
        path = os.path.join(folder, file_name)
        write_atomically(path, self.to_json().encode())
        return path

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> RankShard:
        """Reads a shard; its name, where it is that of a shard, must agree with what it says.

        Raises:
          ScaleArtifactError: it cannot be read or is malformed; all problems are listed.
        """
        data = read_regular_file(path, MAX_SHARD_BYTES)
        shard = cls.from_json(data, os.fspath(path))
        named = ranks_in_name(os.path.basename(path))
        if named and named != (shard.pp_rank, shard.tp_rank):
            raise ScaleArtifactError(
                path,
                [
                    f"the file's name says pp_rank {named[0]} and tp_rank {named[1]}, its contents"
                    f" pp_rank {shard.pp_rank} and tp_rank {shard.tp_rank}"
                ],
            )
        return shard

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "shard") -> RankShard:
        """Parses the contents of a shard's file.

        Args:
          text: the contents.
          source: what to call it in an error.

        Raises:
          ScaleArtifactError: it is malformed; all problems are listed.
          TypeError: text is neither a string nor bytes.
        """
        require("text", text, (str, bytes), "a string or bytes")
        try:
            document = parse_json(text.encode() if isinstance(text, str) else text)
        except ValueError as error:
            raise ScaleArtifactError(source, [f"not sound JSON: {error}"]) from None
        if not isinstance(document, dict):
            raise ScaleArtifactError(source, ["expected a JSON object"])
        problems: list[str] = []
        if type(document.get("schema")) is not int or document["schema"] != 1:
            problems.append(f"schema: expected 1, got {shown(document.get('schema'))}")
        names = (*_IDENTITY_FIELDS, "tp_rank", "pp_rank", "layers")
        problems += [f"{name}: missing" for name in names if name not in document]
        fields = {name: document[name] for name in _IDENTITY_FIELDS if name in document}
        problems += problems_in(fields)
        layers = _read_layers(document.get("layers", {}), problems)
        if problems:
            raise ScaleArtifactError(source, problems)
        try:
            return cls(
                identity=Identity(**fields),
                tp_rank=document["tp_rank"],
                pp_rank=document["pp_rank"],
                layers=layers,
            )
        except ValueError as error:
            raise ScaleArtifactError(source, [str(error)]) from None


def ranks_in_name(file_name: str) -> tuple[int, int] | None:
    """(pp_rank, tp_rank) of a shard's file name; None where it is not the name of a shard."""
    match = _FILE_NAME.fullmatch(file_name)
    return (int(match[1]), int(match[2])) if match else None


def _read_layers(entries: object, problems: list[str]) -> dict[int, LayerAmax]:
    layers: dict[int, LayerAmax] = {}
    if not isinstance(entries, dict):
        problems.append(f"layers: expected an object, got {shown(entries)}")
        return layers
    for key, entry in entries.items():
        if not re.fullmatch(r"0|[1-9][0-9]{0,9}", key):
            problems.append(f"layers: expected a layer index, got {shown(key)}")
            continue
        if not isinstance(entry, dict):
            problems.append(f"layer {key}: expected an object, got {shown(entry)}")
            continue
        maxima: dict[str, Any] = {name: entry.get(f"{name}_amax") for name in ("q", "k", "v")}
        bad = [name for name, values in maxima.items() if not _are_numbers(values)]
        if bad:
            problems += [
                f"layer {key}: {name}_amax: expected a list of numbers, got {shown(maxima[name])}"
                for name in bad
            ]
            continue
        try:
            layers[int(key)] = LayerAmax(runtime_name=entry.get("runtime_name", ""), **maxima)
        except ValueError as error:
            problems.append(f"layer {key}: {error}")
    return layers


def _are_numbers(values: object) -> bool:
    return isinstance(values, list) and all(type(value) in (int, float) for value in values)
