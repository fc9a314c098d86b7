# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Reading files that may be anything, and writing files that must not be lost.

Shards and artifacts are not read through a symbolic link: it may point elsewhere tomorrow, and what
was checked would not be what is named. Files of a checkpoint are: a Hugging Face cache is made of
links. Writing refuses to go through one: replacing the link would surprise whoever made it, and
writing into its target would change a file that others may share.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat

from jaxfp8.scales.arguments import require_path
from jaxfp8.scales.errors import ScaleArtifactError


def read_regular_file(
    path: str | os.PathLike[str], max_bytes: int, *, follow_link: bool = False
) -> bytes:
    """The bytes of a regular file of at most max_bytes.

    Links, folders, devices, pipes and sockets are refused before they are opened (opening some of
    them blocks or has effects), and files that are too large before anything is allocated.

    Args:
      path: the file.
      max_bytes: the most it may hold.
      follow_link: whether path may be a symbolic link. The folders above it always may.

    Raises:
      ScaleArtifactError: the file cannot be read, with the reason.
      TypeError: path is not a path.
    """
    require_path("path", path)
    try:
        _require_regular(os.stat(path, follow_symlinks=follow_link), path)
        # O_NONBLOCK: should a pipe take the file's place meanwhile, the open must not hang.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        fd = os.open(path, flags if follow_link else flags | os.O_NOFOLLOW)
        try:
            status = os.fstat(fd)
            _require_regular(status, path)
            if status.st_size > max_bytes:
                raise ScaleArtifactError(
                    path, [f"size: expected at most {max_bytes} bytes, got {status.st_size}"]
                )
            with os.fdopen(fd, "rb", closefd=False) as file:
                # Not read(): a file that grows meanwhile must not be read past its bound.
                return file.read(status.st_size)
        finally:
            os.close(fd)
    except OSError as error:
        raise ScaleArtifactError(path, [f"cannot be read: {error.strerror}"]) from error
    except ScaleArtifactError:
        raise
    except ValueError as error:  # a path with a NUL in it
        raise ScaleArtifactError(path, [f"cannot be read: {error}"]) from error


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file so that a crash at any moment leaves the old file or the whole new one.

    The bytes go to a temporary file in the same folder, which is synced, renamed over the target,
    and the folder synced. A temporary file that a killed process left behind (its name starts
    with ".jaxfp8-") hinders nobody and may be deleted.

    Raises:
      OSError: the file could not be written. What was there is unchanged, unless the message says
        that the new file is in place and only its durability is in doubt.
    """
    path = os.fspath(path)
    folder, name = os.path.split(path)
    try:
        folder_fd = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            mode = _mode_of_target(name, folder_fd)
            temporary = f".jaxfp8-{secrets.token_hex(8)}.tmp"
            try:
                _write_synced(temporary, folder_fd, mode, data)
                os.replace(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
            except BaseException:
                _remove_quietly(temporary, folder_fd)
                raise
            try:
                os.fsync(folder_fd)
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"{error.strerror}: the new file is in place, but its folder could not be "
                    "synced, so a power failure may bring the old one back",
                ) from error
        finally:
            os.close(folder_fd)
    except OSError as error:
        raise OSError(error.errno, f"cannot write: {error.strerror}", path) from error


def make_folder(path: str | os.PathLike[str]) -> None:
    """Makes a folder, and those above it, durable. One that exists is fine.

    Raises:
      OSError: it cannot be made, or is not a folder.
    """
    path = os.path.abspath(path)
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    make_folder(parent)
    os.makedirs(path, exist_ok=True)  # another rank may be making it at the same moment
    parent_fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(parent_fd)
    finally:
        os.close(parent_fd)


def _require_regular(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    if stat.S_ISLNK(status.st_mode):
        kind = "a symbolic link; name the file that it points to"
    else:
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a device, pipe or socket"
    raise ScaleArtifactError(path, [f"expected a regular file, got {kind}"])


def _mode_of_target(name: str, folder_fd: int) -> int | None:
    """The permissions that the file to be replaced has; None where there is none."""
    if not name:
        raise OSError(errno.EISDIR, "expected the path of a file, got that of a folder")
    try:
        status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(status.st_mode):
        raise OSError(
            errno.ELOOP, "the path is a symbolic link; name the file that it points to instead"
        )
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EEXIST, "the path exists and is not a regular file")
    return stat.S_IMODE(status.st_mode)


def _write_synced(name: str, folder_fd: int, mode: int | None, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, 0o666, dir_fd=folder_fd)
    try:
        if mode is not None:
            os.fchmod(fd, mode)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove_quietly(name: str, folder_fd: int) -> None:
    # Never made, or unremovable: the error that brought us here matters more.
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder_fd)
