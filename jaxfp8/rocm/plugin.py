# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""XLA:ROCm on a machine without an AMD GPU: the plugin, and an MI300X described to it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import logging
import pkgutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax._src import xla_bridge
from jax._src.lib import xla_client
from jax.experimental import topologies

from jaxfp8.rocm.errors import MissingToolError
from jaxfp8.rocm.stand_ins import build_stand_ins

# What XLA asks about a device, as AMD's CDNA3 white paper and MI300X data sheet have it.
_MI300X = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 64
  shared_memory_per_block: 65536
  shared_memory_per_block_optin: 65536
  shared_memory_per_core: 65536
  threads_per_core_limit: 2048
  core_count: 304
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65536
  block_dim_limit_z: 65536
  memory_bandwidth: 5300000000000
  l2_cache_size: 4194304
  clock_rate_ghz: 2.1
  device_memory_size: 206158430208
  registers_per_core_limit: 131072
  registers_per_block_limit: 131072
  rocm_compute_capability { gcn_arch_name: "gfx942:sramecc+:xnack-" }
}
platform_name: "ROCM"
dnn_version_info { }
device_description_str: "MI300X"
"""

_PLUGIN_NAME = "rocm"


def start_on_cpu() -> None:
    """Keeps JAX from starting a GPU backend, which compilation does not need, unless the user has
    said which platforms to start."""
    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")


@functools.cache
def mi300x_mesh() -> jax.sharding.Mesh:
    """A mesh of one described MI300X, to compile for. It cannot run anything.

    JAX's own devices and default backend stay as they are.

    Raises:
      MissingToolError: the plugin is missing or of another version than jaxlib, or a library that
        it is linked against is missing and cannot be stood in for.
    """
    topology = xla_client.make_c_api_device_topology(
        _plugin_api(), "1x1x1", topology="1x1x1", target_config=_MI300X
    )
    devices = topologies.TopologyDescription(topology._make_compile_only_devices())
    return topologies.make_mesh(devices, (1,), ("device",))


@functools.cache
def _plugin_api() -> Any:
    """The PJRT C API of the plugin, loaded without being made a JAX backend."""
    # Where there is an AMD GPU, JAX's own discovery loads the plugin; it can be loaded only once.
    with _without_complaint_of_no_gpu():
        xla_bridge._discover_and_register_pjrt_plugins()
    if xla_client.pjrt_plugin_loaded(_PLUGIN_NAME):
        return xla_bridge._backend_factories[_PLUGIN_NAME].c_api
    path = find_plugin()
    with tempfile.TemporaryDirectory(prefix="jaxfp8-rocm-") as folder:
        for library in build_stand_ins(path, Path(folder)):
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        return xla_client.load_pjrt_plugin_dynamically(_PLUGIN_NAME, str(path))


@contextlib.contextmanager
def _without_complaint_of_no_gpu() -> Iterator[None]:
    """JAX logs the absence of an AMD GPU as an error with a traceback; here it is no error."""
    logger = logging.getLogger(xla_bridge.__name__)

    def keep(record: logging.LogRecord) -> bool:
        return "xla_rocm" not in record.getMessage()

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def find_plugin() -> Path:
    """The shared library of the installed ROCm plugin.

    Raises:
      MissingToolError: there is none, or its version is not that of jaxlib.
    """
    wanted = jaxlib.__version__
    advice = f"pip install jax-rocm7-pjrt=={wanted} jax-rocm7-plugin=={wanted}"
    try:
        import jax_plugins
    except ImportError:
        found = []
    else:
        found = [
            module.name
            for module in pkgutil.iter_modules(jax_plugins.__path__)
            if module.name.startswith("xla_rocm")
        ]
    libraries = [
        library
        for name in found
        for folder in jax_plugins.__path__
        if (library := Path(folder, name, "xla_rocm_plugin.so")).exists()
    ]
    if not libraries:
        raise MissingToolError(f"XLA:ROCm is missing: {advice}")
    library = libraries[-1]
    distribution = library.parent.name.replace("xla_", "jax-") + "-pjrt"
    version = importlib.metadata.version(distribution)
    if version.split(".")[:3] != wanted.split(".")[:3]:
        raise MissingToolError(
            f"{distribution} {version} does not fit jaxlib {wanted}, and would misread what it "
            f"is given: {advice}"
        )
    return library
