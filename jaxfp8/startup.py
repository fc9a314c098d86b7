# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Starting JAX from the command line."""

from __future__ import annotations

import logging


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.messages.append(_on_one_line(error or record.getMessage()))


def start_jax() -> list[str]:
    """Starts JAX's backends.

    Returns:
      What JAX and its plugins had to say, a line each. On a machine without an AMD GPU the ROCm
      plugin, say, is in order and yet logs a traceback, which has no place in a program's output.

    Raises:
      RuntimeError: no backend can be started, for instance none of those in JAX_PLATFORMS; its
        message is one line.
    """
    import jax

    collector = _Collector()
    logger = logging.getLogger("jax")
    propagated = logger.propagate
    logger.addHandler(collector)
    logger.propagate = False
    try:
        jax.devices()
    except RuntimeError as error:
        reasons = [_on_one_line(error), *collector.messages]
        raise RuntimeError("; ".join(reasons)) from None
    finally:
        logger.removeHandler(collector)
        logger.propagate = propagated
    return collector.messages


def _on_one_line(message: object) -> str:
    return " ".join(str(message).split())
