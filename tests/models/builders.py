# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Layers, checkpoints and batches that the tests of jaxfp8.models share."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxfp8.models import SMALL, MlaConfig, MlaWeights
from jaxfp8.models.weights import weight_shapes

TINY = dataclasses.replace(SMALL, hidden_size=96, num_heads=4, q_lora_rank=48, kv_lora_rank=64)
"""Real head dims, so that the FP8 path is that of the model; all else as small as it gets."""


def tiny_weights(seed: int = 0, config: MlaConfig = TINY) -> MlaWeights:
    """As random_weights, but NumPy arrays: to draw and to slice them compiles nothing."""
    rng = np.random.default_rng(seed)
    drawn = {}
    for name, shape in weight_shapes(config, config.num_heads).items():
        noise = rng.standard_normal(shape)
        if name.endswith("layernorm"):
            weight = 1 + noise / 8
        else:
            weight = noise * (shape[1] * shape[2] if name == "o_proj" else shape[-1]) ** -0.5
        drawn[name] = weight.astype(ml_dtypes.bfloat16)
    return MlaWeights(**{"g_proj": None, **drawn})


def checkpoint_tensors(weights: MlaWeights) -> dict[str, np.ndarray]:
    """The weights as a Hugging Face checkpoint has them: names without prefix, [out, in]."""
    w = {name: np.asarray(x) for name, x in weights._asdict().items() if x is not None}
    tensors = {
        "q_a_proj": w["q_a_proj"],
        "q_a_layernorm": w["q_a_layernorm"],
        "q_b_proj": w["q_b_proj"].reshape(-1, w["q_b_proj"].shape[2]),
        "kv_a_proj_with_mqa": w["kv_a_proj"],
        "kv_a_layernorm": w["kv_a_layernorm"],
        "kv_b_proj": w["kv_b_proj"].reshape(-1, w["kv_b_proj"].shape[2]),
        "o_proj": w["o_proj"].reshape(w["o_proj"].shape[0], -1),
    }
    if "g_proj" in w:
        tensors["g_proj"] = w["g_proj"].reshape(-1, w["g_proj"].shape[2])
    return tensors


def hidden_states(
    rng: np.random.Generator, lengths: Sequence[int], config: MlaConfig = TINY
) -> list[np.ndarray]:
    """bfloat16 [T, hidden_size] of each sequence, of unit variance with a few large channels."""
    scale = np.ones(config.hidden_size)
    scale[rng.integers(config.hidden_size, size=3)] = 4
    return [
        (rng.standard_normal((length, config.hidden_size)) * scale).astype(ml_dtypes.bfloat16)
        for length in lengths
    ]


def named_tensors(layer: int, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors by their full names."""
    prefix = f"model.layers.{layer}.self_attn"
    return {f"{prefix}.{name}.weight": x for name, x in tensors.items()}


def save_checkpoint(folder: Path, layers: Mapping[int, MlaWeights], files: int = 1) -> None:
    """A Hugging Face checkpoint of some layers, in several files with an index, or in one."""
    tensors: dict[str, np.ndarray] = {}
    for layer, weights in layers.items():
        tensors |= named_tensors(layer, checkpoint_tensors(weights))
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    names = [f"model-{i + 1:05d}-of-{files:05d}.safetensors" for i in range(files)]
    weight_map = {name: names[i % files] for i, name in enumerate(tensors)}
    for file in names:
        held = {name: tensors[name] for name, its in weight_map.items() if its == file}
        save_file(held, folder / file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
