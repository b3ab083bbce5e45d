"""Atomic file writes, JSON files that readers do not trust, and errors of a full disk."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
# A job cannot cause these errors before its ranks start.
HOST_ERRNOS = (
    *DISK_FULL_ERRNOS,
    errno.EROFS,
    errno.EIO,
    errno.ENOMEM,
    errno.EAGAIN,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENODEV,
)
MAX_JSON_BYTES = 2 * 2**20  # of a file to read, as contracts.codec.MAX_EXIT_REPORT_BYTES


class DiskFullError(OSError):
    """A file did not fit on the disk. `needed` is its size in bytes."""

    needed = 0


def is_host_error(error: OSError) -> bool:
    """Return whether the machine causes the error, and not the spec of a job."""
    return error.errno in HOST_ERRNOS


def find_disk_full_error(error: BaseException | None) -> OSError | None:
    """Return the disk-full error in a chain of exceptions. Torch wraps it in errors of its own writer."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
            return error
        error = error.__cause__ or error.__context__
    return None


def format_disk_full(host: str, full: OSError, folder: Path, needs: str = "") -> str:
    """Format a disk-full error. `folder` is the target of a write if the error names no file."""
    return f"No disk space on {host}: {full.strerror}: {full.filename or folder}{needs}{format_free_bytes(folder)}"


def format_start_failure(host: str, error: Exception, folder: Path) -> str:
    """Format the reason why an attempt with its files in `folder` did not start."""
    if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
        needed = error.needed if isinstance(error, DiskFullError) else 0
        return format_disk_full(host, error, folder, f" needs {needed:,} bytes" if needed else "")
    text = f"{error}: '{folder}'" if isinstance(error, OSError) and error.filename is None else str(error)
    return f"Not started on {host}: {text}"


def format_free_bytes(folder: Path) -> str:
    """Format the free bytes of the disk of a folder, or of its nearest parent that exists."""
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        return f", {shutil.disk_usage(existing).free:,} bytes are free"
    except OSError:
        return ""


@contextmanager
def open_draft(target: Path) -> Iterator[Path]:
    """Yield a path in the folder of `target`, which is renamed to `target` at the end or removed on an exception.

    A killed process leaves its draft. The next writer of the file overwrites it.
    """
    draft = target.with_name(f".{target.name}.new")
    try:
        yield draft
        draft.replace(target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


class BadFileError(ValueError):
    """A file with invalid type, size, or content."""


def write_json(path: Path, value: object) -> None:
    """Write a file and rename it, so that a reader sees all of it or none. Raises DiskFullError."""
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
    """Return the value in a file, or None if the file does not exist. Raises BadFileError, OSError."""
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
