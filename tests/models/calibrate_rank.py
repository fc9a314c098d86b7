# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""One tensor-parallel rank of a calibration, as a process: python calibrate_rank.py RANK PORT DIR.

DIR holds `checkpoint/` and `prompts.npy` (bfloat16 bits [T, hidden_size] of two prompts). The rank
reads the weights of its heads, runs the prompts through both layers while a Calibrator watches, and
writes its shard into DIR/shards. Between the layers the ranks add up their outputs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from jax.experimental import multihost_utils

import jaxfp8
from jaxfp8 import scales
from jaxfp8.models import calibrate_layer, load_layers
from tests.models.builders import TINY

TP_SIZE = 2
LAYERS = (3, 7)
CU_SEQLENS = np.array([0, 40, 60], np.int32)
IDENTITY = scales.Identity(
    model="tiny",
    revision="0123456789abcdef",
    checkpoint_id="tiny",
    calibration_id="two prompts",
    tp_size=TP_SIZE,
    pp_size=1,
    fp8_dtype=jaxfp8.E4M3FNUZ.name,
    local_heads=TINY.num_heads // TP_SIZE,
    qk_head_dim=TINY.qk_head_dim,
    v_head_dim=TINY.v_head_dim,
    margin=1.0,
)


def main(rank: int, port: int, folder: Path) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", TP_SIZE, rank)
    model = load_layers(folder / "checkpoint", TINY, LAYERS, tp_rank=rank, tp_size=TP_SIZE)
    hidden = np.load(folder / "prompts.npy").view(ml_dtypes.bfloat16)
    names = {layer: f"model.layers.{layer}.self_attn" for layer in LAYERS}
    with jaxfp8.Calibrator(
        IDENTITY, tp_rank=rank, pp_rank=0, layers=names, directory=folder / "shards"
    ) as calibrator:
        calibrator.arm()
        for layer, weights in model.items():
            part = calibrate_layer(calibrator, layer, TINY, weights, hidden, CU_SEQLENS)
            out = multihost_utils.process_allgather(part).sum(axis=0)
            hidden = (hidden + out).astype(ml_dtypes.bfloat16)
    if rank == 0:
        np.save(folder / "hidden.npy", hidden.view(np.uint16))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
