# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Merging the shards of all ranks into one artifact."""

from __future__ import annotations

import collections
import os
from collections.abc import Iterable, Mapping

import numpy as np

from jaxfp8 import __version__
from jaxfp8.scales.arguments import require, require_path
from jaxfp8.scales.artifact import ScaleArtifact, descale_from_amax
from jaxfp8.scales.errors import ScaleArtifactError, listed, shown
from jaxfp8.scales.identity import values_of
from jaxfp8.scales.shard import RankShard, ranks_in_name


def merge_folder(folder: str | os.PathLike[str]) -> ScaleArtifact:
    """Merges the shards in a folder; files that are not named like shards are left alone.

    Raises:
      ScaleArtifactError: the folder cannot be read, a shard is malformed, or the shards do not
        make an artifact; all problems are listed.
      TypeError: folder is not a path.
    """
    require_path("folder", folder)
    try:
        names = sorted(name for name in os.listdir(folder) if ranks_in_name(name))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ScaleArtifactError(folder, [f"cannot be read: {reason}"]) from error
    shards: dict[str, RankShard] = {}
    problems: list[str] = []
    for name in names:
        try:
            shards[name] = RankShard.read(os.path.join(folder, name))
        except ScaleArtifactError as error:
            problems += [f"{name}: {problem}" for problem in error.problems]
    if problems:
        raise ScaleArtifactError(folder, problems)
    return _merge(shards, os.fspath(folder))


def merge_shards(shards: Iterable[RankShard]) -> ScaleArtifact:
    """Merges the shards of all ranks, in any order.

    Raises:
      ScaleArtifactError: they do not make an artifact; all problems are listed.
      TypeError: they are not RankShards.
    """
    require("shards", shards, Iterable, "RankShards")
    shards = list(shards)
    for shard in shards:
        require("shards", shard, RankShard, "RankShards")
    return _merge({f"shard {i}": shard for i, shard in enumerate(shards)}, "shards")


def _merge(shards: Mapping[str, RankShard], source: str) -> ScaleArtifact:
    if not shards:
        raise ScaleArtifactError(
            source, ["no shards: expected files named fp8-scales-pp..-tp...json"]
        )
    identity = next(iter(shards.values())).identity
    problems = _identity_problems(shards)
    if len({(s.identity.tp_size, s.identity.pp_size) for s in shards.values()}) == 1:
        problems += _rank_problems(shards)
    problems += _layer_problems(shards)
    if problems:
        raise ScaleArtifactError(source, problems)

    by_rank = {(shard.pp_rank, shard.tp_rank): shard for shard in shards.values()}
    stage_of = {index: shard.pp_rank for shard in shards.values() for index in shard.layers}
    layers = tuple(sorted(stage_of))
    if not layers:
        raise ScaleArtifactError(source, ["empty result: no shard has an attention layer"])
    amax = np.empty((len(layers), 3, identity.tp_size * identity.local_heads), np.float32)
    for row, index in enumerate(layers):
        ranks = [by_rank[stage_of[index], tp].layers[index] for tp in range(identity.tp_size)]
        for column, name in enumerate(("q", "k", "v")):
            amax[row, column] = np.concatenate([getattr(rank, name) for rank in ranks])
    descale = descale_from_amax(amax, identity.fmt, margin=identity.margin)
    overflow = [layers[row] for row in np.flatnonzero(~np.isfinite(descale).all(axis=(1, 2)))]
    if overflow:
        raise ScaleArtifactError(
            source, [f"the margin takes the maxima of layers {listed(overflow)} past float32"]
        )
    return ScaleArtifact(
        identity=identity,
        layers=layers,
        descale=descale,
        amax=amax,
        runtime_names=tuple(
            by_rank[stage_of[index], 0].layers[index].runtime_name for index in layers
        ),
        created_by=f"jaxfp8 {__version__}",
    )


def _identity_problems(shards: Mapping[str, RankShard]) -> list[str]:
    """The fields in which shards differ, with who says what."""
    problems = []
    said: dict[str, dict[object, list[str]]] = collections.defaultdict(dict)
    for name, shard in shards.items():
        for field, value in values_of(shard.identity).items():
            said[field].setdefault(value, []).append(name)
    for field, values in said.items():
        if len(values) > 1:
            versions = "; ".join(
                f"{shown(value)} in {listed(names)}" for value, names in values.items()
            )
            problems.append(f"{field}: the shards differ: {versions}")
    return problems


def _rank_problems(shards: Mapping[str, RankShard]) -> list[str]:
    """Ranks that are missing or there twice."""
    identity = next(iter(shards.values())).identity
    names: dict[tuple[int, int], list[str]] = collections.defaultdict(list)
    for name, shard in shards.items():
        names[shard.pp_rank, shard.tp_rank].append(name)
    problems = [
        f"pp_rank {pp} tp_rank {tp}: {len(doubled)} shards: {listed(doubled)}"
        for (pp, tp), doubled in sorted(names.items())
        if len(doubled) > 1
    ]
    count = identity.pp_size * identity.tp_size
    if len(names) < count:
        missing = [
            f"pp_rank {rank // identity.tp_size} tp_rank {rank % identity.tp_size}"
            # The shards that are there bound how far one must look for a few missing ones.
            for rank in range(min(count, len(names) + 9))
            if divmod(rank, identity.tp_size) not in names
        ]
        problems.append(
            f"{count - len(names)} of {count} shards missing: {', '.join(missing[:8])}"
            + (", ..." if count - len(names) > 8 else "")
        )
    return problems


def _layer_problems(shards: Mapping[str, RankShard]) -> list[str]:
    """Layers in two stages, ranks of a stage that differ, names that are not unique."""
    problems = []
    stages: dict[int, dict[int, list[str]]] = collections.defaultdict(dict)
    runtime_names: dict[int, dict[str, list[str]]] = collections.defaultdict(dict)
    layers_of_stage: dict[int, dict[tuple[int, ...], list[str]]] = collections.defaultdict(dict)
    for name, shard in shards.items():
        layers_of_stage[shard.pp_rank].setdefault(tuple(shard.layers), []).append(name)
        for index, layer in shard.layers.items():
            stages[index].setdefault(shard.pp_rank, []).append(name)
            runtime_names[index].setdefault(layer.runtime_name, []).append(name)
    for index, owners in sorted(stages.items()):
        if len(owners) > 1:
            problems.append(f"layer {index}: in two stages, pp_rank {listed(sorted(owners))}")
    for pp_rank, versions in sorted(layers_of_stage.items()):
        if len(versions) > 1:
            texts = [
                f"{listed(layers) or 'none'} in {listed(who)}" for layers, who in versions.items()
            ]
            problems.append(
                f"pp_rank {pp_rank}: its ranks have different layers: {'; '.join(texts)}"
            )
    layer_of_name: dict[str, int] = {}
    for index, names in sorted(runtime_names.items()):
        if len(names) > 1:
            problems.append(
                f"layer {index}: the shards call it differently: {listed(sorted(names))}"
            )
        for name in names:
            if layer_of_name.setdefault(name, index) != index:
                problems.append(
                    f"runtime_name {shown(name)}: used by layers {layer_of_name[name]} and {index}"
                )
    return problems
