# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Which device is which target, and which FP8 format it speaks."""

from __future__ import annotations

import types

import jax
import pytest

import jaxfp8


def device(platform, kind, **more):
    return types.SimpleNamespace(platform=platform, device_kind=kind, **more)


@pytest.mark.parametrize(
    "given, arch, fmt",
    [
        (device("cpu", "cpu"), "cpu", jaxfp8.E4M3FNUZ),
        (device("gpu", "gfx942"), "gfx942", jaxfp8.E4M3FNUZ),
        (device("gpu", "gfx942:sramecc+:xnack-"), "gfx942", jaxfp8.E4M3FNUZ),
        (device("gpu", "AMD Instinct MI300X", compute_capability="gfx942"), "gfx942",
         jaxfp8.E4M3FNUZ),
        (device("gpu", "gfx950"), "gfx950", jaxfp8.E4M3FN),
        (device("gpu", "gfx90a"), "gfx90a", None),
        (device("gpu", "NVIDIA H200", compute_capability="9.0"), "sm90", jaxfp8.E4M3FN),
        (device("gpu", "NVIDIA A100", compute_capability="8.0"), "sm80", None),
        (device("tpu", "TPU v5"), "tpu", None),
    ],
)  # fmt: skip
def test_detection(given, arch, fmt):
    target = jaxfp8.detect_target(given)
    assert (target.arch, target.fp8_format) == (arch, fmt)
    for candidate in (jaxfp8.E4M3FNUZ, jaxfp8.E4M3FN):
        assert target.speaks(candidate) == (arch == "cpu" or candidate == fmt)


def test_this_process():
    assert jaxfp8.detect_target() == jaxfp8.detect_target(jax.devices()[0])


def test_formats():
    import numpy as np

    for fmt in (jaxfp8.E4M3FNUZ, jaxfp8.E4M3FN):
        values = np.arange(256, dtype=np.uint8).view(fmt.dtype).astype(np.float64)
        assert np.nanmax(values) == fmt.max
        assert fmt.name == fmt.dtype.name == str(fmt)
