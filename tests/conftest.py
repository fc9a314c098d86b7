# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Eight virtual CPU devices, for shard_map; set before JAX starts its backend."""

import jax

# The first interpreted kernel would, and what is imported with it makes jax.jit forget all that it
# has compiled.
import jax.experimental.pallas.tpu

jax.config.update("jax_num_cpu_devices", 8)
