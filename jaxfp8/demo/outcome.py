# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""What a pass is judged by: its errors against the exact attention, and the words it reads."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxfp8.demo import layer as mla
from jaxfp8.demo.exact import Bounds, ExactAttention
from jaxfp8.demo.needles import Needle
from jaxfp8.demo.passes import Pass


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A pass and its errors.

    Attributes:
      name: of the pass.
      result: what came out.
      clipped: the part of all Q, K and V values that lies beyond the range of static scales, for
        which the bounds do not allow; 0 without static scales.
      bounds: what the errors must not exceed.
      relative_error: |out - exact| / |exact|, over all heads, tokens and channels.
      lse_error: the largest |lse - exact|.
      head_errors: float64 [H], the relative error of each head.
      error_map: float64 [H, Tq], the relative error of each head and new token.
      needles: what was to be read.
      words: what was read for each needle.
    """

    name: str
    result: Pass
    clipped: float
    bounds: Bounds
    relative_error: float
    lse_error: float
    head_errors: np.ndarray
    error_map: np.ndarray
    needles: tuple[Needle, ...]
    words: tuple[bytes, ...]

    @property
    def num_found(self) -> int:
        """How many needles were read as they were planted."""
        return sum(
            word == needle.word for needle, word in zip(self.needles, self.words, strict=True)
        )

    @property
    def failures(self) -> list[str]:
        """One line for each thing that is not as it should be."""
        lines = [
            f"needle at {needle.depth} % lost: planted {shown(needle.word)}, read {shown(word)}"
            for needle, word in zip(self.needles, self.words, strict=True)
            if word != needle.word
        ]
        # Written so that a NaN fails.
        if not self.relative_error <= self.bounds.relative:
            lines.append(
                f"relative error {self.relative_error:.3g} passes the bound "
                f"{self.bounds.relative:.3g}{self._remark}"
            )
        if not self.lse_error <= self.bounds.lse:
            lines.append(
                f"LSE error {self.lse_error:.3g} passes the bound {self.bounds.lse:.3g}"
                f"{self._remark}"
            )
        return lines

    @property
    def _remark(self) -> str:
        if not self.clipped:
            return ""
        return (
            f" ({self.clipped:.2%} of the values are clipped: they pass the range of the "
            "calibration, whose text is unlike this one)"
        )


def judge(
    name: str,
    result: Pass,
    clipped: float,
    bounds: Bounds,
    exact: ExactAttention,
    layer: mla.Layer,
    hidden: np.ndarray,
    needles: tuple[Needle, ...],
) -> Outcome:
    """Compares a pass with the exact attention, and reads the needles from its output.

    Args:
      name: of the pass.
      result: what came out.
      clipped: the part of the values that static scales clip.
      bounds: what the errors must not exceed.
      exact: what should have come out.
      layer: the layer.
      hidden: float32 [Tq, HIDDEN], of the new tokens.
      needles: what to read.
    """
    # float64 [H, Tq, Dv]
    difference = np.asarray(result.out, np.float64).transpose(1, 0, 2) - exact.out
    return Outcome(
        name,
        result,
        clipped,
        bounds,
        relative_error=float(np.linalg.norm(difference) / np.linalg.norm(exact.out)),
        lse_error=float(np.abs(result.lse - exact.lse).max()),
        head_errors=np.linalg.norm(difference, axis=(1, 2))
        / np.linalg.norm(exact.out, axis=(1, 2)),
        error_map=np.linalg.norm(difference, axis=2) / np.linalg.norm(exact.out, axis=2),
        needles=needles,
        words=tuple(read_word(layer, hidden, result.out, needle) for needle in needles),
    )


def read_word(layer: mla.Layer, hidden: np.ndarray, out: np.ndarray, needle: Needle) -> bytes:
    """The word that the layer's output spells where it should spell the needle's.

    For each letter, the layer's output is compared with what it would be if attention had found
    just one token, for each of the 256 that could come next; the nearest of them is read.

    Args:
      layer: the layer.
      hidden: float32 [Tq, HIDDEN], of the new tokens.
      out: bfloat16 [Tq, H, Dv], the attention output.
      needle: says where to read.
    """
    at = hidden[needle.queries]
    candidates = layer.supposing(at).reshape(-1, mla.HIDDEN)
    _, values = mla.keys_and_values(
        layer.weights, mla.latents(layer.weights, jnp.asarray(candidates))
    )
    gates = jnp.asarray(np.repeat(at, 256, axis=0))
    expected = np.asarray(mla.gated_output(layer.weights, gates, values))
    expected = expected.reshape(len(at), 256, mla.HIDDEN)
    got = np.asarray(mla.gated_output(layer.weights, at, out[needle.queries]))
    distance = np.linalg.norm(expected - got[:, None], axis=2)
    return distance.argmin(axis=1).astype(np.uint8).tobytes()


def shown(word: bytes) -> str:
    """A word for a message; bytes that do not print are escaped."""
    return word.decode("latin-1") if word.isalnum() and word.isascii() else ascii(word)[1:]
