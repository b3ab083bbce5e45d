"""Small JSON files between the processes of a host: written whole, read with distrust."""

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

MOST_BYTES = 2 * 2**20  # of a file that is read: as contracts.codec.EXIT_BYTES


class BadFileError(ValueError):
    """A file that is there and cannot be what it should be; says why."""


def write_json(path: Path, value: object) -> None:
    """By rename, so that a reader sees all of it or nothing.

    Raises:
        FullError: the disk does not take all of it; nothing is left of it.
        OSError: as the disk has it.
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
            draft.unlink()  # what was taken of it leaves its room to others
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        full = DiskFullError(error.errno, error.strerror, str(path))
        full.needed = len(body)
        raise full from error


def read_json(path: Path) -> Any:
    """The file's value, None when there is no such file.

    Raises:
        BadFileError: no regular file (a FIFO would wait for ever), larger than MOST_BYTES, or no JSON.
        OSError: it cannot be read now, which says nothing of what it holds.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENOTDIR):  # a link, a socket, a file where a folder was
            raise BadFileError(f"{path.name}: {error.strerror}") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadFileError(f"{path.name} is not a regular file")
    with open(descriptor, "rb") as file:
        body = file.read(MOST_BYTES + 1)
    if len(body) > MOST_BYTES:
        raise BadFileError(f"{path.name} is larger than {MOST_BYTES:,} bytes")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadFileError(f"{path.name} is not JSON: {error}") from None


def discard(path: Path) -> None:
    """Away with it, whatever it is."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
