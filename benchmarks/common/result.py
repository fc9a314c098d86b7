# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The one schema of results: a JSON object a line.

A line holds the fields of `Result`; what follows from them (`tflops`, `gb_per_s`,
`fraction_of_ceiling`, `refcheck`, `ok`); and beside them whatever else the program that wrote it
has to say (`details`).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Check:
    """A figure that must not pass a limit.

    Attributes:
      name: what it is.
      value: what was seen.
      limit: the largest value that is right; None where it is only reported.
    """

    name: str
    value: float
    limit: float | None

    @property
    def ok(self) -> bool:
        """Whether the value is within the limit; NaN never is."""
        return self.limit is None or self.value <= self.limit


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """What the device sustains at best, measured in the same run (ceilings.py).

    Attributes:
      name: "copy", "bf16 matmul" or "fp8 matmul".
      per_second: bytes, or FLOPs, a second.
      by: what reached it.
    """

    name: str
    per_second: float
    by: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What one implementation did in one case.

    Attributes:
      benchmark: the program's name.
      what: what was measured: "attention", "quantize", "model", ...
      case: the case's name, where the program has several.
      shape: sizes, by name.
      dtype: of the operands: "bf16", "float8_e4m3fn", ...
      backend: a backend of the library, or a peer.
      device: what it ran on.
      versions: of Python and the libraries in use.
      command: the command line.
      median_ms: of one launch, over the repetitions; None where no time was measured.
      quartiles_ms: the first and the third, likewise.
      repetitions: how many measurements those are of.
      bytes: that a launch must read and write; None where it says nothing.
      flops: that a launch must do, a multiplication and an addition counted as two.
      ceiling: what `bytes` or `flops` a second are to be compared with.
      errors: against a reference, with the largest allowed; none where --norefcheck was given.
      bounds: other figures that the program was asked to keep.
      unavailable: why there is no measurement, in words.
      details: what else there is to say; keys that are none of the fields.
    """

    benchmark: str
    what: str
    case: str = ""
    shape: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dtype: str = ""
    backend: str = ""
    device: str
    versions: Mapping[str, str]
    command: str
    median_ms: float | None = None
    quartiles_ms: tuple[float, float] | None = None
    repetitions: int = 0
    bytes: int | None = None
    flops: int | None = None
    ceiling: Ceiling | None = None
    errors: tuple[Check, ...] = ()
    bounds: tuple[Check, ...] = ()
    unavailable: str | None = None
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        clash = sorted(set(self.details) & (_FIELDS | _DERIVED))
        if clash:
            raise ValueError(f"details: {', '.join(clash)}: expected keys that are no fields")

    @property
    def tflops(self) -> float | None:
        """10^12 FLOPs a second."""
        return _rate(self.flops, self.median_ms, 1e12)

    @property
    def gb_per_s(self) -> float | None:
        """10^9 bytes a second."""
        return _rate(self.bytes, self.median_ms, 1e9)

    @property
    def fraction_of_ceiling(self) -> float | None:
        """The rate over the ceiling's."""
        if self.ceiling is None:
            return None
        amount = self.bytes if self.ceiling.name == "copy" else self.flops
        return _rate(amount, self.median_ms, self.ceiling.per_second)

    @property
    def refcheck(self) -> str:
        """ "passed", "failed", or "off" where nothing was compared."""
        if not self.errors:
            return "off"
        return "passed" if all(check.ok for check in self.errors) else "failed"

    @property
    def ok(self) -> bool:
        """Whether every error and every bound is within its limit."""
        return all(check.ok for check in (*self.errors, *self.bounds))

    def to_json(self) -> str:
        """The result as one line, without its end. NaN and infinities become null."""
        fields = {name: value for name, value in dataclasses.asdict(self).items() if value != ""}
        details = fields.pop("details")
        derived = {name: getattr(self, name) for name in sorted(_DERIVED)}
        return json.dumps(_finite({**fields, **derived, **details}), allow_nan=False)


_FIELDS = {field.name for field in dataclasses.fields(Result)}
_DERIVED = {"tflops", "gb_per_s", "fraction_of_ceiling", "refcheck", "ok"}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_check(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"name", "value", "limit"}
        and isinstance(value["name"], str)
        and all(value[x] is None or _is_number(value[x]) for x in ("value", "limit"))
    )


def _is_ceiling(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"name", "per_second", "by"}
        and isinstance(value["name"], str)
        and isinstance(value["by"], str)
        and _is_number(value["per_second"])
        and value["per_second"] > 0
    )


_Type = tuple[Callable[[Any], bool], str]


def _or_null(of: _Type) -> _Type:
    sound, expected = of
    return lambda value: value is None or sound(value), f"{expected} or null"


_TEXT: _Type = (lambda value: isinstance(value, str), "a string")
_NUMBER: _Type = (_is_number, "a number")
_COUNT: _Type = (_is_count, "an integer of at least 0")
_CHECKS: _Type = (
    lambda value: isinstance(value, list) and all(map(_is_check, value)),
    "a list of objects of name, value and limit",
)

# How many keys there are is drawn against (plots.py).
_KEYS = ("context", "tokens_k", "keys")

_TYPES: dict[str, _Type] = {
    **dict.fromkeys(("benchmark", "what", "case", "dtype", "backend", "device", "command"), _TEXT),
    "shape": (
        lambda value: (
            isinstance(value, dict) and all(_is_count(value[x]) for x in _KEYS if x in value)
        ),
        f"an object, with integers as {', '.join(_KEYS)}",
    ),
    "versions": (
        lambda value: isinstance(value, dict) and all(isinstance(x, str) for x in value.values()),
        "an object of strings",
    ),
    "median_ms": _or_null(_NUMBER),
    "quartiles_ms": _or_null(
        (
            lambda value: (
                isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))
            ),
            "a list of two numbers",
        )
    ),
    "repetitions": _COUNT,
    "bytes": _or_null(_COUNT),
    "flops": _or_null(_COUNT),
    "ceiling": _or_null((_is_ceiling, "an object of name, per_second and by")),
    "errors": _CHECKS,
    "bounds": _CHECKS,
    "unavailable": _or_null(_TEXT),
}


def from_json(line: str) -> Result:
    """The result that a line holds.

    Raises:
      ValueError: the line is no JSON object, lacks a field, or has one of another type.
    """
    data = json.loads(line)
    if not isinstance(data, dict):
        raise ValueError(f"expected a JSON object, got {type(data).__name__}")
    fields = {name: data[name] for name in _FIELDS - {"details"} if name in data}
    for name, value in fields.items():
        sound, expected = _TYPES[name]
        if not sound(value):
            raise ValueError(f"{name}: expected {expected}, got {json.dumps(value)[:80]}")
    for name in ("errors", "bounds"):
        fields[name] = tuple(
            Check(check["name"], _number(check["value"]), check["limit"])
            for check in fields.get(name, ())
        )
    if fields.get("ceiling"):
        fields["ceiling"] = Ceiling(**fields["ceiling"])
    if fields.get("quartiles_ms"):
        fields["quartiles_ms"] = tuple(fields["quartiles_ms"])
    details = {name: data[name] for name in data if name not in _FIELDS | _DERIVED}
    try:
        return Result(**fields, details=details)
    except TypeError as error:
        raise ValueError(f"not a result: {error}") from None


def read(path: Path) -> list[Result]:
    """The results of a file.

    Raises:
      OSError: it cannot be read.
      ValueError: a line is not a result; the message says which.
    """
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        raise ValueError(f"{path}: expected lines of JSON, got what is no text") from None
    results = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            results.append(from_json(line))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
    return results


def _rate(amount: int | None, milliseconds: float | None, unit: float) -> float | None:
    return amount / (milliseconds * 1e-3) / unit if amount and milliseconds else None


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
