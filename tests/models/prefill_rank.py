# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""One of two processes that prefill a layer together: python -m ... RANK PORT DIR.

Each has two devices of a mesh of 2 x 2. DIR holds `checkpoint/` and `scales.safetensors`; a process
leaves its output, and what it has of the cache, in DIR/RANK.npz.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np

from jaxfp8 import scales
from jaxfp8.models import deployment
from jaxfp8.models.parallel import prefill_layer_sharded
from jaxfp8.models.sharding import MlaSharding, load_sharded_layers, shard_scales
from tests.models.sharded_case import CAPACITY, CONFIG, LAYER, SEGMENT, fp8_case

PROCESSES = 2
SERVED = deployment(
    CONFIG, model="tiny", revision="0123456789abcdef", checkpoint_id="tiny", tp_size=2,
    layers=(LAYER,), fp8_dtype="float8_e4m3fnuz",
)  # fmt: skip


def main(rank: int, port: int, folder: Path) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_disable_most_optimizations", True)
    jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, rank)
    (a, b), (c, d) = (
        [device for device in jax.devices() if device.process_index == process]
        for process in range(PROCESSES)
    )
    # A rank a process: it has the weights of no other.
    own = MlaSharding(jax.sharding.Mesh(np.array([[a, b], [c, d]]), ("tp", "cp")))
    assert list(own.local_devices()) == [rank]
    held = load_sharded_layers(folder / "checkpoint", CONFIG, [LAYER], own)[LAYER].q_b_proj
    assert {shard.index[0].start for shard in held.addressable_shards} == {2 * rank}

    # Here both axes go from one process to the other.
    sharding = MlaSharding(jax.sharding.Mesh(np.array([[a, c], [d, b]]), ("tp", "cp")))
    weights = load_sharded_layers(folder / "checkpoint", CONFIG, [LAYER], sharding)[LAYER]
    artifact = scales.ScaleArtifact.load(folder / "scales.safetensors", SERVED)
    case = fp8_case()
    cache = jax.make_array_from_callback(
        case.cache.shape, sharding.named(sharding.cache_spec), lambda index: case.cache[index]
    )
    out, cache = prefill_layer_sharded(
        sharding, CONFIG, weights, case.hidden, cache, case.batch, segment=SEGMENT,
        precision="fp8", new_tokens_precision="fp8",
        scales=shard_scales(artifact, [LAYER], sharding)[LAYER],
    )  # fmt: skip
    parts = {
        f"part{shard.index[0].start // CAPACITY}": np.asarray(shard.data).view(np.uint16)
        for shard in cache.addressable_shards
    }
    np.savez(folder / f"{rank}.npz", out=np.asarray(out), **parts)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
