# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the files in golden/, with NumPy, json and the safetensors package and nothing of jaxfp8.

They stand for what other programs write. They are committed and not to be written anew: a reader
that needs other files has broken the contract. Usage: python make_golden.py FOLDER
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

LAYERS = (3, 7)
IDENTITY = {
    "model": "moonshotai/Kimi-K3",
    "revision": "0123456789abcdef0123456789abcdef01234567",
    "checkpoint_id": "sha256:" + "5a" * 32,
    "calibration_id": "books-2026-01",
    "fp8_dtype": "float8_e4m3fnuz",
    "cache_mode": "bf16_latent_cache",
}
NUMBERS = {"tp_size": 2, "pp_size": 2, "local_heads": 3, "qk_head_dim": 192, "v_head_dim": 128}


def main(folder: Path) -> None:
    maxima = {
        f"layers.{layer}.{qkv}": np.float32(1 + layer + 16 * column) + np.arange(6, dtype="f4") / 8
        for layer in LAYERS
        for column, qkv in enumerate("qkv")
    }
    descales = {
        f"{name}_descale": amax * np.float32(1.125) / np.float32(240)
        for name, amax in maxima.items()
    }
    metadata = {
        **IDENTITY,
        **{name: str(value) for name, value in NUMBERS.items()},
        "margin": "1.125",
        "num_layers": "2",
        "calibration_shards": "4",
    }
    save_file(descales, folder / "schema1.safetensors", metadata | {"schema": "1"})
    tensors = descales | {f"{name}_amax": amax for name, amax in maxima.items()}
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].astype("<f4").tobytes())
    more = {"schema": "2", "layers": "3,7", "fp8_max": "240", "created_by": "make_golden.py"}
    more["content_sha256"] = digest.hexdigest()
    save_file(tensors, folder / "schema2.safetensors", metadata | more)
    for pp, prefix in ((0, ""), (1, "kimi-k3-")):
        for tp in range(2):
            layers = {
                str(layer): {
                    "runtime_name": f"model.layers.{layer}.self_attn.attn",
                    **{
                        f"{qkv}_amax": maxima[f"layers.{layer}.{qkv}"][3 * tp : 3 * tp + 3].tolist()
                        for qkv in "qkv"
                    },
                }
                for layer in LAYERS
                if pp == 0
            }
            shard = {"schema": 1, **IDENTITY, **NUMBERS, "margin": 1.125, "pp_rank": pp}
            path = folder / f"{prefix}fp8-scales-pp{pp:02d}-tp{tp:02d}.json"
            path.write_text(json.dumps(shard | {"tp_rank": tp, "layers": layers}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
