# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The scale artifact: the descales of a whole model, and what they were made for."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxfp8.formats import FORMATS, MIN_DESCALE, Fp8Format
from jaxfp8.scales import fields, safetensors_file
from jaxfp8.scales.arguments import integer, plain, require
from jaxfp8.scales.errors import ScaleArtifactError, listed, shown
from jaxfp8.scales.files import read_regular_file, write_atomically
from jaxfp8.scales.identity import Deployment, Identity, values_of
from jaxfp8.scales.layer_scales import LayerScales
from jaxfp8.scales.record import Record

_KINDS = {"1": ("descale",), "2": ("descale", "amax")}
"""The tensors that a layer has in each schema, for each of q, k and v."""
_TENSOR_NAME = re.compile(r"layers\.(0|[1-9][0-9]{0,9})\.[qkv]_(?:descale|amax)")
_IDENTITY_FIELDS = tuple(field.name for field in dataclasses.fields(Identity))
_REQUIRED = {
    "1": (*_IDENTITY_FIELDS, "num_layers", "calibration_shards"),
    "2": (
        *_IDENTITY_FIELDS,
        *("num_layers", "calibration_shards", "layers", "fp8_max", "content_sha256"),
        "created_by",
    ),
}
_SCHEMA_1_MAX = 240.0
_OPTIONAL = ("calibration_tp_size", "calibration_pp_size")
# Descales follow from maxima by a multiplication and a division in float32, in whatever order the
# writer chose: a few units in the last place, and nothing that would matter.
_DESCALE_RTOL = 1e-6


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ScaleArtifact(Record):
    """The calibrated descales of every attention layer of a model.

    One that exists is sound: the constructor and the readers refuse anything else. Whether it
    fits a deployment is another question, which `load` and `check` answer.

    Attributes:
      identity: what the scales were made of and for.
      layers: 0-based indices of the layers, ascending.
      descale: float32 [len(layers), 3, heads], q, k and v, in global head order
        (heads = tp_size * local_heads); finite and > 0. Read-only.
      amax: the maxima that the descales follow from, shaped like them; None where they are not
        known (schema 1). Read-only.
      runtime_names: what the serving stack calls each layer; None where it is not known.
      created_by: the program that made it; None where it is not known.
      calibration_tp_size, calibration_pp_size: the topology that it was calibrated on, where it
        has been retargeted since; else None.

    Raises:
      TypeError: identity is not an Identity, layers or runtime_names not a sequence, or descale or
        amax not numbers.
      ValueError: values that do not fit each other.

    Example:
      >>> import dataclasses
      >>> from jaxfp8.scales import Identity, LayerAmax, RankShard, ScaleArtifact, merge_shards
      >>> identity = Identity(
      ...     model="example", revision="0123abc", checkpoint_id="example", calibration_id="books",
      ...     tp_size=1, pp_size=1, fp8_dtype="float8_e4m3fnuz", local_heads=2,
      ...     qk_head_dim=192, v_head_dim=128, margin=1.0,
      ... )
      >>> amax = LayerAmax("layers.3.attn", q=[240, 120], k=[60, 30], v=[15, 7.5])
      >>> shard = RankShard(identity=identity, tp_rank=0, pp_rank=0, layers={3: amax})
      >>> artifact = merge_shards([shard])
      >>> artifact.save("scales.safetensors")
      >>> ScaleArtifact.load("scales.safetensors", artifact.deployment).layer(3).k.tolist()
      [0.25, 0.125]

      For a model that it does not fit, it is refused:

      >>> served = dataclasses.replace(artifact.deployment, tp_size=2, layers=(3, 7))
      >>> ScaleArtifact.load("scales.safetensors", served)
      Traceback (most recent call last):
      jaxfp8.scales.errors.ScaleArtifactError: 'scales.safetensors': 2 problems: tp_size: expected
      2, got 1; layers: no scales for 7, which the deployment has
    """

    identity: Identity
    layers: tuple[int, ...]
    descale: npt.NDArray[np.float32]
    amax: npt.NDArray[np.float32] | None = None
    runtime_names: tuple[str, ...] | None = None
    created_by: str | None = None
    calibration_tp_size: int | None = None
    calibration_pp_size: int | None = None

    def __post_init__(self) -> None:
        require("identity", self.identity, Identity, "an Identity")
        for name in ("layers", "runtime_names"):
            value = getattr(self, name)
            if isinstance(value, Sequence) and not isinstance(value, str):
                object.__setattr__(self, name, tuple(map(plain, value)))
            elif name == "layers" or value is not None:
                raise TypeError(f"{name}: expected a tuple, got {type(value).__name__}")
        problems = fields.problems_in(
            {"layers": self.layers}
            | {
                name: value
                for name in ("created_by", *_OPTIONAL)
                if (value := getattr(self, name)) is not None
            }
        )
        if (self.calibration_tp_size is None) != (self.calibration_pp_size is None):
            problems.append("calibration_tp_size and calibration_pp_size: expected both or neither")
        shape = (len(self.layers), 3, self.num_heads)
        for name in ("descale", "amax"):
            array = getattr(self, name)
            if array is None and name == "amax":
                continue
            try:
                array = np.array(array, np.float32)
            except (TypeError, ValueError):
                raise TypeError(f"{name}: expected numbers, got {type(array).__name__}") from None
            array.flags.writeable = False
            object.__setattr__(self, name, array)
            if array.shape != shape:
                problems.append(f"{name}: expected shape {shape}, got {array.shape}")
            elif not (np.isfinite(array) & (array > 0)).all():
                problems.append(f"{name}: expected finite values > 0")
        if not problems:
            problems += self._inconsistent_layers()
        if self.runtime_names is not None:
            problems += _runtime_name_problems(self.runtime_names, self.layers)
        if self.schema == "2" and self.created_by is None:
            problems.append("created_by: expected the name of the program that made it")
        problems += _maximum_problems(self.schema, self.fmt)
        if problems:
            raise ValueError("; ".join(problems))

    def _inconsistent_layers(self) -> list[str]:
        if self.amax is None:
            return []
        expected = descale_from_amax(self.amax, self.fmt, margin=self.identity.margin)
        good = np.isclose(self.descale, expected, rtol=_DESCALE_RTOL, atol=0).all(axis=(1, 2))
        wrong = [self.layers[row] for row in np.flatnonzero(~good)]
        if not wrong:
            return []
        return [
            f"layers {listed(wrong)}: the descales do not follow from the maxima, margin "
            f"{self.identity.margin} and {self.fmt} maximum {self.fmt.max:g}"
        ]

    @property
    def fmt(self) -> Fp8Format:
        """The FP8 format that the scales are for."""
        return self.identity.fmt

    @property
    def schema(self) -> str:
        """The schema that it is written in: "2", or "1" where there are no maxima."""
        return "1" if self.amax is None else "2"

    @property
    def num_heads(self) -> int:
        """Heads of the whole model, those of all ranks."""
        return self.identity.tp_size * self.identity.local_heads

    @property
    def deployment(self) -> Deployment:
        """The deployment that it fits."""
        values: dict[str, Any] = values_of(self.identity) | {"layers": self.layers}
        del values["calibration_id"], values["margin"]
        return Deployment(**values)

    @property
    def content_sha256(self) -> str:
        """Hex SHA-256 over name, then little-endian bytes, of every tensor in name order."""
        return safetensors_file.content_sha256(
            (name, safetensors_file.little_endian(array)) for name, array in self._tensors().items()
        )

    def layer(self, index: int, *, tp_rank: int | None = None) -> LayerScales:
        """The descales of one layer, as float32 NumPy arrays [H], ready for the device.

        Args:
          index: the model's 0-based layer index.
          tp_rank: the rank whose local_heads heads are wanted; None gives all heads of the model,
            for a caller whose arrays are global.

        Raises:
          TypeError: an argument is not an integer.
          ValueError: there is no such layer or rank.
        """
        index = integer("index", index)
        if index not in self.layers:
            raise ValueError(
                f"index: expected a calibrated layer, one of {listed(self.layers)}, got {index}"
            )
        rows = self.descale[self.layers.index(index)]
        if tp_rank is not None:
            tp_rank = integer("tp_rank", tp_rank)
            size, heads = self.identity.tp_size, self.identity.local_heads
            if not 0 <= tp_rank < size:
                raise ValueError(f"tp_rank: expected 0 to {size - 1}, got {tp_rank}")
            rows = rows[:, tp_rank * heads : (tp_rank + 1) * heads]
        return LayerScales(*rows)

    def mismatches(self, deployment: Deployment) -> list[str]:
        """One line for each way in which it does not fit a deployment; empty if it fits.

        Raises:
          TypeError: deployment is not a Deployment.
        """
        require("deployment", deployment, Deployment, "a Deployment")
        return self.differences(values_of(deployment))

    def differences(self, expected: Mapping[str, object]) -> list[str]:
        """As `mismatches`, against some of a Deployment's fields by name."""
        _require_deployment_fields(expected)
        return fields.differences(expected, values_of(self.identity) | {"layers": self.layers})

    def check(self, deployment: Deployment) -> None:
        """Refuses an artifact that does not fit.

        Raises:
          ScaleArtifactError: it does not fit; all mismatches are listed.
          TypeError: deployment is not a Deployment.
        """
        if problems := self.mismatches(deployment):
            raise ScaleArtifactError("artifact", problems)

    @classmethod
    def load(cls, path: str | os.PathLike[str], deployment: Deployment) -> ScaleArtifact:
        """Reads an artifact for a deployment.

        Raises:
          ScaleArtifactError: it cannot be read, is not sound, or does not fit the deployment;
            all problems are listed.
          TypeError: deployment is not a Deployment.
        """
        if not isinstance(deployment, Deployment):
            raise TypeError(
                f"deployment: expected a Deployment, got {type(deployment).__name__}; "
                "ScaleArtifact.read reads an artifact without comparing it with anything"
            )
        return cls.read(path, expected=values_of(deployment))

    @classmethod
    def read(
        cls, path: str | os.PathLike[str], *, expected: Mapping[str, object] | None = None
    ) -> ScaleArtifact:
        """Reads an artifact for inspection: its own soundness is checked, its fit is not.

        Args:
          path: the file itself, no symbolic link to it.
          expected: fields of a Deployment by name, which are compared too.

        Raises:
          ScaleArtifactError: it cannot be read, is not sound, or differs from what was expected;
            all problems are listed.
          ValueError: a name in `expected` is not that of a field.
        """
        data = read_regular_file(path, safetensors_file.MAX_FILE_BYTES)
        return cls.from_bytes(data, source=os.fspath(path), expected=expected)

    @classmethod
    def from_bytes(
        cls,
        data: bytes,
        *,
        source: str = "artifact",
        expected: Mapping[str, object] | None = None,
    ) -> ScaleArtifact:
        """Parses the bytes of an artifact's file: as `read`, with `source` to name it in errors."""
        require("data", data, bytes, "bytes")
        return _parse(data, source, {} if expected is None else expected)

    def to_bytes(self) -> bytes:
        """The bytes of its file: equal artifacts give equal bytes."""
        identity = values_of(self.identity)
        shards = (self.calibration_tp_size or self.identity.tp_size) * (
            self.calibration_pp_size or self.identity.pp_size
        )
        metadata: dict[str, object] = {
            "schema": self.schema,
            **identity,
            "num_layers": len(self.layers),
            "calibration_shards": shards,
        }
        if self.schema == "2":
            metadata |= {
                "layers": self.layers,
                "fp8_max": self.fmt.max,
                "content_sha256": self.content_sha256,
            }
        for name in ("created_by", *_OPTIONAL):
            if getattr(self, name) is not None:
                metadata[name] = getattr(self, name)
        if self.runtime_names is not None:
            names = {str(i): name for i, name in zip(self.layers, self.runtime_names, strict=True)}
            metadata["runtime_names"] = json.dumps(names, ensure_ascii=False)
        return safetensors_file.serialize(
            self._tensors(), {key: fields.to_text(value) for key, value in metadata.items()}
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the artifact, atomically and durably; a file that is there is replaced.

        Raises:
          OSError: it could not be written (also where the path is a symbolic link or anything
            but a regular file); what was there is unchanged.
        """
        write_atomically(path, self.to_bytes())

    def _tensors(self) -> dict[str, npt.NDArray[np.float32]]:
        return {
            f"layers.{index}.{qkv}_{kind}": array[row, column]
            for kind, array in (("descale", self.descale), ("amax", self.amax))
            if array is not None
            for row, index in enumerate(self.layers)
            for column, qkv in enumerate("qkv")
        }


def descale_from_amax(
    amax: npt.NDArray[np.float32], fmt: Fp8Format, *, margin: float
) -> npt.NDArray[np.float32]:
    """max(amax * margin / fmt.max, MIN_DESCALE) in float32, as jaxfp8.descale_from_amax."""
    with np.errstate(over="ignore"):  # becomes infinity, which no artifact may hold
        scaled = amax * np.float32(margin) / np.float32(fmt.max)
    return np.maximum(scaled, np.float32(MIN_DESCALE))


def _require_deployment_fields(expected: Mapping[str, object]) -> None:
    """A misspelt field would otherwise be compared with nothing."""
    require("expected", expected, Mapping, "values by field of Deployment")
    names = {field.name for field in dataclasses.fields(Deployment)}
    if unknown := [name for name in expected if name not in names]:
        raise ValueError(f"expected: expected fields of Deployment, got {listed(unknown)}")


def _parse(data: bytes, source: str, expected: Mapping[str, object]) -> ScaleArtifact:
    _require_deployment_fields(expected)
    file = safetensors_file.parse(data, source)
    problems: list[str] = []
    schema = file.metadata.get("schema")
    if schema not in _KINDS:
        problems.append(f"schema: expected 1 or 2, got {shown(schema)}")
    values = _read_metadata(file.metadata, schema or "", problems)
    if "layers" not in values:  # schema 1 does not list them, so that the tensors' names must
        found = {int(match[1]) for match in map(_TENSOR_NAME.fullmatch, file.tensors) if match}
        if not fields.problems_in({"layers": tuple(sorted(found))}):
            values["layers"] = tuple(sorted(found))
        elif "layers" not in file.metadata:
            problems.append("layers: no tensor is named as in layers.0.q_descale")
    problems += fields.differences(expected, values)
    arrays: dict[str, npt.NDArray[np.float32]] = {}
    if schema in _KINDS:
        problems += _count_problems(values)
        arrays = _read_tensors(file.tensors, values, _KINDS[schema], problems)
        stated = file.metadata.get("content_sha256")
        actual = safetensors_file.content_sha256((n, t.data) for n, t in file.tensors.items())
        if stated is not None and stated != actual:
            problems.append(f"content_sha256: expected {shown(stated)}, the tensors give {actual}")
    runtime_names = _read_runtime_names(file.metadata, values, problems)
    if problems:
        raise ScaleArtifactError(source, problems)
    try:
        return ScaleArtifact(
            identity=Identity(**{name: values[name] for name in _IDENTITY_FIELDS}),
            layers=values["layers"],
            descale=arrays["descale"],
            amax=arrays.get("amax"),
            runtime_names=runtime_names,
            created_by=values.get("created_by"),
            calibration_tp_size=values.get("calibration_tp_size"),
            calibration_pp_size=values.get("calibration_pp_size"),
        )
    except ValueError as error:
        raise ScaleArtifactError(source, [str(error)]) from None


def _read_metadata(metadata: Mapping[str, str], schema: str, problems: list[str]) -> dict[str, Any]:
    """The fields that are there and hold what they may, by name."""
    required = _REQUIRED.get(schema, _REQUIRED["2"])
    missing = [name for name in required if name not in metadata]
    if missing:
        problems.append(f"metadata missing: {', '.join(missing)}")
    values: dict[str, Any] = {}
    for name, text in metadata.items():
        if name in fields.CHECKS:
            value = fields.from_text(name, text)
            if wrong := fields.problems_in({name: value}):
                problems += wrong
            else:
                values[name] = value
    fmt = FORMATS.get(values.get("fp8_dtype", ""))
    if fmt:
        problems += _maximum_problems(schema, fmt)
    if fmt and "fp8_max" in metadata and metadata["fp8_max"] not in (f"{fmt.max:g}", str(fmt.max)):
        problems.append(
            f"fp8_max: expected {fmt.max:g}, the maximum of {fmt}, got {shown(metadata['fp8_max'])}"
        )
    return values


def _maximum_problems(schema: str, fmt: Fp8Format) -> list[str]:
    """Schema 1 does not say the maximum that its descales are for: it is always the same."""
    if schema != "1" or fmt.max == _SCHEMA_1_MAX:
        return []
    return [
        f"fp8_dtype: expected a format of maximum {_SCHEMA_1_MAX:g}, which schema 1 is for, got "
        f"{fmt} of maximum {fmt.max:g}"
    ]


def _count_problems(values: Mapping[str, Any]) -> list[str]:
    """Counts in the metadata that disagree with what they count."""
    problems = []
    if {"num_layers", "layers"} <= values.keys() and values["num_layers"] != len(values["layers"]):
        problems.append(
            f"num_layers: expected {len(values['layers'])}, the number of layers, got "
            f"{values['num_layers']}"
        )
    topology = [
        values.get(f"calibration_{name}", values.get(name)) for name in ("tp_size", "pp_size")
    ]
    shards = values.get("calibration_shards")
    if None not in (*topology, shards) and shards != topology[0] * topology[1]:
        problems.append(
            f"calibration_shards: expected {topology[0] * topology[1]}, one for each rank, got "
            f"{shards}"
        )
    return problems


def _read_tensors(
    tensors: Mapping[str, safetensors_file.TensorInfo],
    values: Mapping[str, Any],
    kinds: Sequence[str],
    problems: list[str],
) -> dict[str, npt.NDArray[np.float32]]:
    """The arrays of a ScaleArtifact by name; none, with problems said, where tensors are wrong."""
    if not {"layers", "tp_size", "local_heads"} <= values.keys():
        return {}  # nothing to hold the tensors against; why has been said
    heads = values["tp_size"] * values["local_heads"]
    rows: dict[str, list[list[npt.NDArray[np.float32]]]] = {kind: [] for kind in kinds}
    missing, misshapen, bad = [], [], []
    wanted = set()
    for index in values["layers"]:
        for kind in kinds:
            row = []
            for qkv in "qkv":
                name = f"layers.{index}.{qkv}_{kind}"
                wanted.add(name)
                tensor = tensors.get(name)
                if tensor is None:
                    missing.append(name)
                elif tensor.dtype != "F32" or tensor.shape != (heads,):
                    misshapen.append(f"{name} ({tensor.dtype} {list(tensor.shape)})")
                else:
                    row.append(tensor.float32())
            rows[kind].append(row)
    if extra := sorted(tensors.keys() - wanted):
        problems.append(f"tensors not expected: {listed([shown(name) for name in extra])}")
    if missing:
        problems.append(f"tensors missing: {listed(missing)}")
    if misshapen:
        problems.append(f"tensors expected to be F32 [{heads}], got {listed(misshapen)}")
    if missing or misshapen:
        return {}
    arrays = {kind: np.array(row, np.float32) for kind, row in rows.items()}
    for kind, array in arrays.items():
        for row, column in np.argwhere(~(np.isfinite(array) & (array > 0)).all(axis=2)):
            bad.append(f"layers.{values['layers'][row]}.{'qkv'[column]}_{kind}")
    if bad:
        problems.append(f"tensors expected to be finite and > 0, and are not: {listed(bad)}")
    return arrays


def _read_runtime_names(
    metadata: Mapping[str, str], values: Mapping[str, Any], problems: list[str]
) -> tuple[str, ...] | None:
    if "runtime_names" not in metadata or "layers" not in values:
        return None
    try:
        names = safetensors_file.parse_json(metadata["runtime_names"].encode())
    except ValueError as error:
        problems.append(f"runtime_names: not sound JSON: {error}")
        return None
    if not isinstance(names, dict) or set(names) != {str(index) for index in values["layers"]}:
        problems.append(f"runtime_names: expected a name for each layer, got {shown(names)}")
        return None
    ordered = tuple(names[str(index)] for index in values["layers"])
    problems += _runtime_name_problems(ordered, values["layers"])
    return ordered


def _runtime_name_problems(names: Sequence[object], layers: Sequence[int]) -> list[str]:
    if len(names) != len(layers) or any(fields.CHECKS["model"](name) for name in names):
        return [f"runtime_names: expected a printable string for each layer, got {shown(names)}"]
    if len(set(names)) != len(names):
        return [f"runtime_names: expected a different one for each layer, got {shown(names)}"]
    return []
