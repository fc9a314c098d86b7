# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""When a prefill runs in FP8, and why it does not. Imports no JAX."""

from __future__ import annotations

import collections
import dataclasses
import logging
import os
import threading
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np

from jaxfp8.scales.arguments import plain, require
from jaxfp8.scales.artifact import ScaleArtifact
from jaxfp8.scales.identity import Deployment

_LOG = logging.getLogger(__name__)
# One for all policies, so that a policy itself can be copied and pickled.
_COUNTS_LOCK = threading.Lock()

PREFILL_VARIABLE = "JAXFP8_PREFILL"
SCALES_VARIABLE = "JAXFP8_SCALES"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillRequest:
    """What is known of a prefill call before it runs.

    Attributes:
      context_tokens: cached tokens of the longest sequence of the batch, the new ones not counted.
      num_heads: heads of this rank.
      qk_head_dim: head dim of Q and K.
      v_head_dim: head dim of V.
      dtype: dtype of Q, K and V, a name or anything that np.dtype takes.
      arch: what the device calls itself, as `jaxfp8.detect_target().arch`.

    Raises:
      ValueError: a number that is none.
    """

    context_tokens: int
    num_heads: int
    qk_head_dim: int
    v_head_dim: int
    dtype: Any
    arch: str

    def __post_init__(self) -> None:
        for name in ("context_tokens", "num_heads", "qk_head_dim", "v_head_dim"):
            value = plain(getattr(self, name))
            if type(value) is not int or value < 0:
                raise ValueError(f"{name}: expected an integer >= 0, got {value!r}")


@dataclasses.dataclass(frozen=True)
class Decision:
    """Which path a prefill takes.

    Attributes:
      path: "fp8" or "bf16".
      reason: why, in a sentence that is the same for all requests refused for the same reason.
    """

    path: Literal["fp8", "bf16"]
    reason: str


@dataclasses.dataclass(frozen=True)
class PrefillPolicy:
    """Chooses between FP8 and BF16 for each prefill. Off unless it is switched on.

    `select` never fails. What can be known to be wrong before the first request is an error here:
    with an artifact, a deployment that it does not fit, or that the bounds below would never
    admit, is refused rather than run in BF16 without a word.

    Attributes:
      enabled: whether FP8 is used at all.
      min_context: cached tokens from which on FP8 is used.
      archs: devices that it is used on.
      dtypes: dtypes of the inputs that it is used for; kept by their names.
      head_dims: pairs (qk_head_dim, v_head_dim) that it is used for.
      artifact: the static scales; None quantizes dynamically.
      deployment: the model that is served; needed with an artifact.
      arch: the device that it is served on; needed with an artifact.
      counts: how many requests were decided for each reason, by the reason's text. A copy.

    Raises:
      ScaleArtifactError: the artifact does not fit the deployment; all mismatches are listed.
      ValueError, TypeError: a bound that makes no sense; an artifact, deployment or device that is
        none, whether FP8 is on or off; a deployment or device that the policy would never admit,
        or that is needed and missing.

    Example:
      >>> import jaxfp8
      >>> policy = jaxfp8.PrefillPolicy(enabled=True)
      >>> request = jaxfp8.PrefillRequest(
      ...     context_tokens=1000, num_heads=12, qk_head_dim=192, v_head_dim=128,
      ...     dtype="bfloat16", arch="gfx942",
      ... )
      >>> policy.select(request)
      Decision(path='bf16', reason='cached context is shorter than 786432 tokens (min_context)')
    """

    enabled: bool = False
    _: dataclasses.KW_ONLY
    min_context: int = 786_432
    archs: tuple[str, ...] = ("gfx942",)
    dtypes: tuple[str, ...] = ("bfloat16",)
    head_dims: tuple[tuple[int, int], ...] = ((192, 128),)
    artifact: ScaleArtifact | None = None
    deployment: Deployment | None = None
    arch: str | None = None
    _counts: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise TypeError(f"enabled: expected True or False, got {self.enabled!r}")
        object.__setattr__(self, "min_context", plain(self.min_context))
        if type(self.min_context) is not int or self.min_context < 0:
            raise ValueError(f"min_context: expected a number of tokens, got {self.min_context!r}")
        for name in ("archs", "dtypes", "head_dims"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Iterable):
                raise TypeError(f"{name}: expected a tuple, got {value!r}")
            object.__setattr__(self, name, tuple(value))
            if not getattr(self, name):
                raise ValueError(f"{name}: expected at least one, got none; enabled=False is off")
        object.__setattr__(self, "dtypes", tuple(map(_dtype_name, self.dtypes)))
        if not all(isinstance(arch, str) for arch in self.archs):
            raise TypeError(f"archs: expected names of devices, got {self.archs!r}")
        if not all(type(dims) is tuple and len(dims) == 2 for dims in self.head_dims):
            raise TypeError(
                f"head_dims: expected pairs (qk_head_dim, v_head_dim), got {self.head_dims!r}"
            )
        for name, kind in (("artifact", ScaleArtifact), ("deployment", Deployment), ("arch", str)):
            value = getattr(self, name)
            if not (value is None or isinstance(value, kind)):
                raise TypeError(f"{name}: expected a {kind.__name__} or None, got {type(value)}")
        if self.enabled and self.artifact is not None:
            self._require_servable(self.artifact)

    def _require_servable(self, artifact: ScaleArtifact) -> None:
        if self.deployment is None or self.arch is None:
            missing = "deployment" if self.deployment is None else "arch"
            raise ValueError(f"{missing}: needed to tell whether the artifact can be used")
        artifact.check(self.deployment)
        dims = (artifact.identity.qk_head_dim, artifact.identity.v_head_dim)
        if self.arch not in self.archs:
            raise ValueError(
                f"arch: expected one of {', '.join(self.archs)} (archs), where this policy uses "
                f"FP8, got {self.arch!r}: the artifact would never be used"
            )
        if dims not in self.head_dims:
            raise ValueError(
                f"deployment: expected head dims among {list(self.head_dims)} (head_dims), got "
                f"{dims}: the artifact would never be used"
            )
        # Not above: this module must be importable without JAX. Nothing is started by it.
        from jaxfp8.targets import target_of_arch

        if not target_of_arch(self.arch).speaks(artifact.fmt):
            raise ValueError(
                f"artifact: expected scales for {target_of_arch(self.arch).fp8_format}, the FP8 "
                f"format of {self.arch}, got {artifact.fmt}"
            )

    @classmethod
    def from_env(
        cls,
        *,
        deployment: Deployment | None = None,
        arch: str | None = None,
        environ: Mapping[str, str] | None = None,
        **bounds: Any,
    ) -> PrefillPolicy:
        """The policy that the environment asks for.

        JAXFP8_PREFILL=1 switches FP8 on ("0", empty or unset leave it off), JAXFP8_SCALES names
        the artifact, which is read only when FP8 is on. No other variable is read.

        Args:
          deployment: the model that is served; needed with JAXFP8_SCALES.
          arch: the device that it is served on; needed with JAXFP8_SCALES.
          environ: the environment; None takes that of the process.
          **bounds: other attributes of the policy.

        Raises:
          ValueError: JAXFP8_PREFILL is something else; or as the constructor.
          ScaleArtifactError: the artifact cannot be read, is not sound, or does not fit.
        """
        environ = os.environ if environ is None else environ
        switch = environ.get(PREFILL_VARIABLE, "")
        if switch not in ("", "0", "1"):
            raise ValueError(f"{PREFILL_VARIABLE}: expected 1, 0 or nothing, got {switch!r}")
        enabled = switch == "1"
        path = environ.get(SCALES_VARIABLE, "")
        artifact = None
        if enabled and path:
            if deployment is None:
                raise ValueError(
                    f"deployment: needed to tell whether {SCALES_VARIABLE}={path} can be used"
                )
            artifact = ScaleArtifact.load(path, deployment)
        return cls(enabled=enabled, artifact=artifact, deployment=deployment, arch=arch, **bounds)

    @property
    def counts(self) -> dict[str, int]:
        """How many requests were decided for each reason."""
        with _COUNTS_LOCK:
            return dict(self._counts)

    def select(self, request: PrefillRequest) -> Decision:
        """The path of one request. Never fails; a reason is logged when it first occurs.

        Raises:
          TypeError: request is not a PrefillRequest.
        """
        require("request", request, PrefillRequest, "a PrefillRequest")
        refusal = self._refusal(request)
        if refusal is not None:
            decision = Decision("bf16", refusal)
        else:
            scales = "dynamic" if self.artifact is None else "static"
            decision = Decision("fp8", f"cached context reaches min_context, {scales} scales")
        with _COUNTS_LOCK:
            self._counts[decision.reason] += 1
            first = self._counts[decision.reason] == 1
        if first:
            _LOG.info("prefill in %s: %s", decision.path, decision.reason)
        return decision

    def _refusal(self, request: PrefillRequest) -> str | None:
        """Why a request is not served in FP8; the most lasting reason first."""
        if not self.enabled:
            return f"FP8 prefill is off ({PREFILL_VARIABLE}=1 or enabled=True switches it on)"
        if request.arch not in self.archs:
            return f"device {request.arch} is not one of {', '.join(self.archs)} (archs)"
        dtype = _dtype_name(request.dtype)
        if dtype not in self.dtypes:
            return f"inputs are {dtype}, not {' or '.join(self.dtypes)} (dtypes)"
        dims = (request.qk_head_dim, request.v_head_dim)
        if dims not in self.head_dims:
            return f"head dims {dims} are not among {list(self.head_dims)} (head_dims)"
        if self.artifact is not None:
            if request.arch != self.arch:
                return f"device {request.arch} is not the artifact's, {self.arch} (arch)"
            identity = self.artifact.identity
            if dims != (identity.qk_head_dim, identity.v_head_dim):
                return (
                    f"head dims {dims} are not those of the artifact, "
                    f"{(identity.qk_head_dim, identity.v_head_dim)}"
                )
            if request.num_heads != identity.local_heads:
                return (
                    f"{request.num_heads} heads are not the {identity.local_heads} a rank that "
                    "the artifact has scales for"
                )
        if request.context_tokens < self.min_context:
            return f"cached context is shorter than {self.min_context} tokens (min_context)"
        return None


def _dtype_name(dtype: Any) -> str:
    if isinstance(dtype, str):
        return dtype
    if dtype is None:  # which NumPy takes for float64
        return "None"
    try:
        return np.dtype(dtype).name
    except (TypeError, ValueError):
        return str(dtype).removeprefix("torch.")
