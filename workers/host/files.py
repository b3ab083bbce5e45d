"""Small JSON files between the processes of a host. Writers replace the whole file, and readers do not trust it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

from workers.disk import DISK_FULL_ERRNOS, DiskFullError

MAX_JSON_BYTES = 2 * 2**20  # of a file to read, as contracts.codec.MAX_EXIT_REPORT_BYTES


class BadFileError(ValueError):
    """A file with invalid type, size, or content."""


def write_json(path: Path, value: object) -> None:
    """Write a file and rename it, so that a reader sees all of it or none.

    Raises:
        DiskFullError: the disk is full. The partial file is removed.
    """
    draft, body = path.with_name(f".{path.name}.{os.getpid()}"), json.dumps(value).encode()
    try:
        with draft.open("wb") as out:
            out.write(body)
            out.flush()
            os.fsync(out.fileno())
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        full = DiskFullError(error.errno, error.strerror, str(path))
        full.needed = len(body)
        raise full from error


def read_json(path: Path) -> Any:
    """Return the value in a file, or None if the file does not exist.

    Raises:
        BadFileError: the file is not regular, is larger than MAX_JSON_BYTES, or is not JSON.
        OSError: the file cannot be read now.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENOTDIR):  # a link, a socket, or a file as the folder
            raise BadFileError(f"{path.name}: {error.strerror}") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # reading a FIFO would block
        os.close(descriptor)
        raise BadFileError(f"{path.name} is not a regular file")
    with open(descriptor, "rb") as file:
        body = file.read(MAX_JSON_BYTES + 1)
    if len(body) > MAX_JSON_BYTES:
        raise BadFileError(f"{path.name} is larger than {MAX_JSON_BYTES:,} bytes")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadFileError(f"{path.name} is not JSON: {error}") from None


def remove_path(path: Path) -> None:
    """Remove a file, a link, or a folder with its content."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
