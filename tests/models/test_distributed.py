# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""A pass over the devices of two processes (jax.distributed), against one process."""

from __future__ import annotations

import numpy as np
import pytest

from jaxfp8.models.sharding import MlaSharding, shard_scales
from tests.models.builders import save_checkpoint
from tests.models.prefill_rank import PROCESSES
from tests.models.processes import run_processes
from tests.models.sharded_case import (
    CAPACITY,
    LAYER,
    artifact_of,
    fp8_case,
    mesh_of,
    run_sharded,
)  # fmt: skip
from tests.tolerances import relative_error


@pytest.mark.slow
def test_two_processes_give_what_one_gives(tmp_path):
    """From a checkpoint and an artifact, each process reading the slices of its ranks."""
    case = fp8_case()
    artifact = artifact_of(case, tp_size=2)
    (tmp_path / "checkpoint").mkdir()
    save_checkpoint(tmp_path / "checkpoint", {LAYER: case.weights}, files=2)
    artifact.save(tmp_path / "scales.safetensors")
    run_processes("tests.models.prefill_rank", PROCESSES, tmp_path)

    sharding = MlaSharding(mesh_of(2, 2))
    one = run_sharded(
        case, sharding, precision="fp8", new_tokens_precision="fp8",
        scales=shard_scales(artifact, [LAYER], sharding)[LAYER],
    )  # fmt: skip
    expected = np.asarray(one.cache).view(np.uint16).reshape(2, CAPACITY, -1)
    for rank in range(PROCESSES):
        with np.load(tmp_path / f"{rank}.npz") as left:
            # The same program, and sums of two: nothing has another order.
            assert relative_error(left["out"], np.asarray(one.out, np.float64)) < 2.0**-20
            for part in (0, 1):
                np.testing.assert_array_equal(left[f"part{part}"], expected[part])
