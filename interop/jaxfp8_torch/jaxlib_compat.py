# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The two functions of jaxlib under jax.dlpack, whose Python costs ten times what they do.

They are not public. Where a version lacks them, `available` says so and the callers go through
jax.dlpack: a little later, with the same results.
"""

from __future__ import annotations

from typing import Any

import jax
from jaxlib import _jax

_to_array = getattr(_jax, "dlpack_managed_tensor_to_buffer", None)
_from_array = getattr(_jax, "buffer_to_dlpack_managed_tensor", None)


def available() -> bool:
    """Whether the functions below can be called."""
    return _to_array is not None and _from_array is not None


def external_stream(device: jax.Device) -> int | None:
    """A stream of a GPU on which JAX takes events from outside, as a pointer.

    None where there is none to be had: without the functions above, or from a plugin that does not
    say (jax.dlpack then orders the work by itself).
    """
    if not available():
        return None
    try:
        stream: int = device.get_stream_for_external_ready_events()
    except jax.errors.JaxRuntimeError as error:
        if "UNIMPLEMENTED" not in str(error):
            raise
        return None
    return stream


def array_of_dlpack(
    capsule: Any, device: jax.Device, device_type: int, stream: int | None = None
) -> jax.Array:
    """An array on the memory of a DLPack capsule.

    Args:
      capsule: used up.
      device: where the memory is.
      device_type: DLPack's number for its kind.
      stream: the array is ready when what is now queued on this stream is done; None: it is.
    """
    assert _to_array is not None
    array: jax.Array = _to_array(capsule, device, stream, None, device_type)
    return array


def dlpack_of_array(x: jax.Array, stream: int) -> Any:
    """A DLPack capsule of an array on one GPU; what is queued on the stream from now on waits for
    the array. (Without a stream, the host would wait.)
    """
    assert _from_array is not None
    return _from_array(x, stream=stream)
