# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The text that the demo reads: a file, or the project's own text files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxfp8.cli import CommandError

PACKAGE = Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True)
class Text:
    """Some text, as bytes: a byte is a token, so that any file will do.

    Attributes:
      name: where it came from, for the report.
      data: the bytes.
    """

    name: str
    data: bytes


def read_text(file: str | None, at_most: int) -> Text:
    """A file's bytes, or the project's own text where no file is named.

    Args:
      file: its path, or None.
      at_most: how many bytes are wanted; the rest of a longer text is left unread.

    Raises:
      CommandError: the file cannot be read, or is empty.
    """
    if file is None:
        return _own_text(at_most)
    try:
        with open(file, "rb") as stream:
            data = stream.read(at_most)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CommandError(f"--text {file}: cannot be read: {reason}") from None
    if not data:
        raise CommandError(f"--text {file}: the file is empty")
    return Text(file, data)


def _own_text(at_most: int) -> Text:
    """The documents and sources of the project; without its repository, the installed sources."""
    root = PACKAGE.parent
    files = sorted(PACKAGE.rglob("*.py"))
    if (root / "pyproject.toml").is_file() and (root / "LICENSE").is_file():
        files = [*sorted(root.glob("*.md")), root / "LICENSE", *files]
    data = b"\n".join(file.read_bytes() for file in files)
    return Text("the text files of jaxfp8 itself", data[:at_most])
