# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The Pallas Triton kernels in interpret mode: slow, on any device, for tests."""

from jaxfp8.ops.attention.pallas_triton import PallasTritonBackend

BACKEND = PallasTritonBackend(name="interpret", interpret=True)
