"""Atomic file writes, and errors of a full disk."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


class DiskFullError(OSError):
    """A file did not fit on the disk. `needed` is its size in bytes."""

    needed = 0


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
