# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Sound identities, shards and artifacts, and files with one thing wrong.

The topology is 2 tensor-parallel ranks of 3 heads and 2 pipeline stages, the second one without an
attention layer.
"""

import json
from typing import Any

import numpy as np

from jaxfp8.scales import (
    Identity,
    LayerAmax,
    RankShard,
    ScaleArtifact,
    merge_shards,
)
from jaxfp8.scales.safetensors_file import content_sha256

LAYERS = (3, 7)
TP, PP, HEADS = 2, 2, 3


def identity(**changes: Any) -> Identity:
    values: dict[str, Any] = {
        "model": "moonshotai/Kimi-K3",
        "revision": "0123456789abcdef0123456789abcdef01234567",
        "checkpoint_id": "sha256:" + "5a" * 32,
        "calibration_id": "books-2026-01",
        "tp_size": TP,
        "pp_size": PP,
        "fp8_dtype": "float8_e4m3fnuz",
        "local_heads": HEADS,
        "qk_head_dim": 192,
        "v_head_dim": 128,
        "margin": 1.125,
        "cache_mode": "bf16_latent_cache",
    }
    return Identity(**(values | changes))


def runtime_name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


def amax(layer: int, column: int, head: int) -> float:
    """The maximum of a head in global order, column 0, 1, 2 for q, k, v: exact in float32."""
    return 1.0 + layer + 16 * column + head / 8


def shard(pp_rank: int, tp_rank: int, *, layers: Any = None, **changes: Any) -> RankShard:
    if layers is None:
        layers = LAYERS if pp_rank == 0 else ()
    made = identity(**changes)
    heads = [tp_rank * made.local_heads + i for i in range(made.local_heads)]
    return RankShard(
        identity=made,
        tp_rank=tp_rank,
        pp_rank=pp_rank,
        layers={
            layer: LayerAmax(
                runtime_name(layer), *([amax(layer, c, h) for h in heads] for c in range(3))
            )
            for layer in layers
        },
    )


def shards(**changes: Any) -> list[RankShard]:
    made = identity(**changes)
    return [shard(pp, tp, **changes) for pp in range(made.pp_size) for tp in range(made.tp_size)]


def artifact(**changes: Any) -> ScaleArtifact:
    return merge_shards(shards(**changes))


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and tensor bytes of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(header: dict[str, Any], tensors: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + tensors


def edit_metadata(data: bytes, **changes: str | None) -> bytes:
    """The file with metadata changed; None removes a key."""
    header, tensors = split(data)
    metadata = header["__metadata__"] | changes
    header["__metadata__"] = {key: value for key, value in metadata.items() if value is not None}
    return join(header, tensors)


def edit_tensors(data: bytes, *, rehash: bool = True, **changes: Any) -> bytes:
    """The file with tensors changed or added (arrays) or removed (None), its hash made to fit.

    Names are given with "__" for ".".
    """
    header, payload = split(data)
    metadata = header.pop("__metadata__")
    contents: dict[str, tuple[str, list[int], bytes]] = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        contents[name] = (entry["dtype"], entry["shape"], payload[start:stop])
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            del contents[name]
        else:
            kind = {"float32": "F32", "float64": "F64", "float16": "F16"}[value.dtype.name]
            contents[name] = (kind, list(value.shape), value.tobytes())
    if rehash and "content_sha256" in metadata:
        metadata["content_sha256"] = content_sha256((n, c[2]) for n, c in contents.items())
    made: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, (dtype, shape, raw) in contents.items():
        made[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(raw)]}
        offset += len(raw)
    return join(made, b"".join(raw for _, _, raw in contents.values()))


def schema_1(data: bytes) -> bytes:
    """A schema 2 file as the schema 1 file of the same scales."""
    names = [f"layers__{layer}__{qkv}_amax" for layer in LAYERS for qkv in "qkv"]
    data = edit_tensors(data, **dict.fromkeys(names))
    gone = ("layers", "fp8_max", "content_sha256", "created_by", "runtime_names")
    return edit_metadata(data, schema="1", **dict.fromkeys(gone))


def ones(count: int = TP * HEADS) -> np.ndarray:
    return np.ones(count, np.float32)
