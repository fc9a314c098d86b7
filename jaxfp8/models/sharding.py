# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Where an MLA layer lies on a mesh of devices: weights, scales and latent cache.

Two axes of the mesh take part. Along `tp` (tensor parallel) each device has the weights and the
scales of its own heads; along `cp` (context parallel) each has its own part of the latent cache. So
a device holds 1 / tp of what has heads and 1 / cp of the cache, whose latents all heads share.

    sharding = MlaSharding(jax.make_mesh((8, 2), ("tp", "cp")))
    model = load_sharded_layers(checkpoint, config, layers, sharding)
    scales = shard_scales(artifact, layers, sharding)
    caches = {layer: empty_sharded_cache(config, capacity, sharding) for layer in layers}

With `jax.distributed` the mesh spans the devices of all processes, every process runs the same
program, and each reads only what its own devices hold: of a checkpoint the slices of its ranks'
heads, of an artifact their scales.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxfp8 import checks
from jaxfp8.models.arguments import check_config, check_layers, check_number
from jaxfp8.models.checkpoint import load_layers
from jaxfp8.models.config import MlaConfig
from jaxfp8.models.weights import HEAD_AXIS, MlaWeights, weight_shapes
from jaxfp8.scales.arguments import require
from jaxfp8.scales.artifact import ScaleArtifact
from jaxfp8.scales.errors import listed
from jaxfp8.scales.layer_scales import LayerScales


@dataclasses.dataclass(frozen=True)
class MlaSharding:
    """A mesh, and which of its axes are the tensor-parallel and the context-parallel one.

    Either may have size 1. Along other axes of the mesh, devices do the same work.

    Attributes:
      mesh: the devices.
      tp: name of the axis that the heads are spread over.
      cp: name of the axis that the context is spread over.

    Raises:
      TypeError: mesh is not a Mesh of devices.
      ValueError: the mesh has no such axes, or they are the same.
    """

    mesh: Mesh
    tp: str = "tp"
    cp: str = "cp"

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh):
            raise TypeError(f"mesh: expected a jax.sharding.Mesh, got {type(self.mesh).__name__}")
        for name in ("tp", "cp"):
            if getattr(self, name) not in self.mesh.axis_names:
                raise ValueError(
                    f"{name}: expected an axis of the mesh, one of "
                    f"{listed(self.mesh.axis_names)}, got {getattr(self, name)!r}"
                )
        if self.tp == self.cp:
            raise ValueError(f"cp: expected another axis than tp, got {self.cp!r} for both")

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks."""
        return int(self.mesh.shape[self.tp])

    @property
    def cp_size(self) -> int:
        """Parts that the context is spread over."""
        return int(self.mesh.shape[self.cp])

    @property
    def cache_spec(self) -> PartitionSpec:
        """Of the cache [cp_size * capacity, latent_dim]: part after part."""
        return PartitionSpec(self.cp)

    @property
    def scales_spec(self) -> LayerScales:
        """Of a layer's scales, float32 [H]."""
        by_head = PartitionSpec(self.tp)
        return LayerScales(by_head, by_head, by_head)

    def weights_spec(self, config: MlaConfig) -> MlaWeights:
        """Of a layer's weights, of all heads."""
        specs: dict[str, Any] = dict.fromkeys(
            weight_shapes(config, config.num_heads), PartitionSpec()
        )
        for name in specs.keys() & HEAD_AXIS.keys():
            specs[name] = PartitionSpec(*[None] * HEAD_AXIS[name], self.tp)
        return MlaWeights(**{"g_proj": None, **specs})

    def named(self, spec: PartitionSpec) -> NamedSharding:
        """The spec on this mesh, as jax.device_put and jax.jit take it."""
        return NamedSharding(self.mesh, spec)

    def local_devices(self) -> dict[int, list[jax.Device]]:
        """This process's devices by tensor-parallel rank, for the ranks that it has any of."""
        axis = self.mesh.axis_names.index(self.tp)
        process = jax.process_index()
        devices = {
            rank: [device for device in held.flat if device.process_index == process]
            for rank, held in enumerate(np.moveaxis(self.mesh.devices, axis, 0))
        }
        return {rank: held for rank, held in devices.items() if held}


def check_placed(
    sharding: MlaSharding,
    config: MlaConfig,
    weights: MlaWeights,
    cache: Any,
    scales: LayerScales | None,
) -> None:
    """ValueError unless all arrays that a mesh has parts of lie on it, where they have to.

    That is on a mesh with axes of type Explicit, as `jax.make_mesh` makes them; on one with axes of
    type Auto, JAX moves arrays to where they are needed. Of a traced array only its place along
    Explicit axes is known, and compared.
    """
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return
    spec = sharding.weights_spec(config)
    given = [(f"weights.{n}", getattr(weights, n), getattr(spec, n)) for n in sorted(HEAD_AXIS)]
    given.append(("cache", cache, sharding.cache_spec))
    if scales is not None:
        names = [f"scales.{name}" for name in "qkv"]
        given += zip(names, scales, sharding.scales_spec, strict=True)
    away = [
        (name, its_spec)
        for name, x, its_spec in given
        if x is not None and not _lies_on(sharding.mesh, its_spec, x)
    ]
    if away:
        name, its_spec = away[0]
        places = _PLACES[name.partition(".")[0]]
        raise ValueError(
            f"{name}: expected an array that lies on the mesh in parts, {its_spec}, got another; "
            f"make it with {places}, or place it with jax.device_put(x, sharding.named(spec)). "
            f"Not so placed: {', '.join(name for name, _ in away)}"
        )


_PLACES = {
    "weights": "load_sharded_layers",
    "cache": "empty_sharded_cache",
    "scales": "shard_scales",
}
"""Which function makes what."""


def _lies_on(mesh: Mesh, spec: PartitionSpec, x: Any) -> bool:
    """Whether x is a JAX array with that sharding, as far as that is known."""
    axes = set(mesh.axis_names)
    if checks.is_traced(x):
        held = jax.typeof(x).sharding
        types = zip(mesh.axis_names, mesh.axis_types, strict=True)
        axes = {name for name, its_type in types if its_type == AxisType.Explicit}
    else:
        held = x.sharding if isinstance(x, jax.Array) else None
        if not isinstance(held, NamedSharding) or held.mesh != mesh:
            return False
    return _axes_by_dim(held.spec, x.ndim, axes) == _axes_by_dim(spec, x.ndim, axes)


def _axes_by_dim(spec: PartitionSpec, ndim: int, axes: set[str]) -> list[list[str]]:
    """Which of the axes each dimension of an array is spread over."""
    dims = [*spec, *[None] * (ndim - len(spec))]
    return [
        [name for name in (dim if isinstance(dim, tuple) else (dim,)) if name in axes]
        for dim in dims
    ]


def load_sharded_layers(
    path: str | PathLike[str],
    config: MlaConfig,
    layers: Iterable[int],
    sharding: MlaSharding,
    *,
    prefix: str = "model.layers",
) -> dict[int, MlaWeights]:
    """The MLA weights of some layers from a checkpoint, each device with those of its heads.

    A process reads the slices of the ranks that its devices have, each once.

    Args:
      path, config, layers, prefix: as in `load_layers`.
      sharding: the mesh.

    Returns:
      Global arrays, by layer.

    Raises:
      TypeError, CheckpointError: as `load_layers`.
      ValueError: the tensor-parallel ranks do not divide the heads; or as `load_layers`.
    """
    check_config(config)
    require("sharding", sharding, MlaSharding, "an MlaSharding")
    layers = check_layers(layers)
    config.local_heads(sharding.tp_size)
    ranks = [
        load_layers(
            path,
            config,
            layers,
            prefix=prefix,
            tp_rank=rank,
            tp_size=sharding.tp_size,
            device=_copies(devices),
        )
        for rank, devices in sharding.local_devices().items()
    ]
    shapes = weight_shapes(config, config.num_heads)
    specs = sharding.weights_spec(config)
    loaded = {}
    for layer in layers:
        weights: dict[str, Any] = {"g_proj": None}
        for name, shape in shapes.items():
            weights[name] = _global_array(
                shape, sharding.named(getattr(specs, name)),
                (getattr(rank[layer], name) for rank in ranks),
            )  # fmt: skip
        loaded[layer] = MlaWeights(**weights)
    return loaded


def shard_scales(
    artifact: ScaleArtifact, layers: Iterable[int], sharding: MlaSharding
) -> dict[int, LayerScales]:
    """The scales of some layers, each device with those of its heads.

    Args:
      artifact: loaded against the deployment that is served.
      layers: 0-based indices.
      sharding: the mesh.

    Returns:
      Global arrays, float32 [H], by layer.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: the artifact is of another tensor-parallel size, or has no such layer.
    """
    require("artifact", artifact, ScaleArtifact, "a ScaleArtifact")
    require("sharding", sharding, MlaSharding, "an MlaSharding")
    layers = check_layers(layers)
    identity = artifact.identity
    if identity.tp_size != sharding.tp_size:
        raise ValueError(
            f"artifact: expected tp_size {sharding.tp_size}, that of the mesh ({sharding.tp!r}), "
            f"got {identity.tp_size}"
        )
    shape = (identity.tp_size * identity.local_heads,)
    placed = {}
    for layer in layers:
        ranks = [
            jax.device_put(artifact.layer(layer, tp_rank=rank), _copies(devices))
            for rank, devices in sharding.local_devices().items()
        ]
        placed[layer] = LayerScales(
            *(
                _global_array(shape, sharding.named(spec), parts)
                for spec, *parts in zip(sharding.scales_spec, *ranks, strict=True)
            )
        )
    return placed


def empty_sharded_cache(config: MlaConfig, capacity: int, sharding: MlaSharding) -> jax.Array:
    """bfloat16 [cp_size * capacity, latent_dim] of zeros: a cache with nothing in any part.

    Args:
      config: the layer's.
      capacity: rows of each part.
      sharding: the mesh.

    Raises:
      TypeError, ValueError: an argument is of the wrong kind, or capacity is negative.
    """
    check_config(config)
    capacity = check_number("capacity", capacity, 0)
    require("sharding", sharding, MlaSharding, "an MlaSharding")
    zeros: Callable[[], jax.Array] = jax.jit(
        lambda: jnp.zeros((sharding.cp_size * capacity, config.latent_dim), jnp.bfloat16),
        out_shardings=sharding.named(sharding.cache_spec),
    )
    return zeros()


def _copies(devices: Sequence[jax.Device]) -> NamedSharding:
    """The same array on each of the devices."""
    return NamedSharding(Mesh(np.array(devices), ("copies",)), PartitionSpec())


def _global_array(
    shape: tuple[int, ...], sharding: NamedSharding, parts: Iterable[jax.Array]
) -> jax.Array:
    """One array of what this process's devices hold of it."""
    held = [shard.data for part in parts for shard in part.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, held)
