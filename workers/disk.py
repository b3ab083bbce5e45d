"""How a disk says that it takes no more, and how we say it: the host, the folder, the bytes that it needs and has.

Files that are whole or not there.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


class DiskFullError(OSError):
    """A file of ours was not taken whole. `needed`: its bytes."""

    needed = 0


def find_disk_full_error(error: BaseException | None) -> OSError | None:
    """The disk's own word in an error, or in what led to it: torch tells of it in words of its writer's."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
            return error
        error = error.__cause__ or error.__context__
    return None


def format_disk_full(host: str, full: OSError, folder: Path, needs: str = "") -> str:
    """In words; `folder`: where a write was, which names no file. `needs`: what is known of it."""
    return f"No disk space on {host}: {full.strerror}: {full.filename or folder}{needs}{format_free_bytes(folder)}"


def format_start_failure(host: str, error: Exception, folder: Path) -> str:
    """Why an attempt never ran, of which `folder` holds the files."""
    if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
        needed = error.needed if isinstance(error, DiskFullError) else 0
        return format_disk_full(host, error, folder, f" needs {needed:,} bytes" if needed else "")
    text = f"{error}: '{folder}'" if isinstance(error, OSError) and error.filename is None else str(error)
    return f"Not started on {host}: {text}"


def format_free_bytes(folder: Path) -> str:
    try:
        return f", {shutil.disk_usage(_standing(folder)).free:,} bytes are free"
    except OSError:
        return ""


def _standing(path: Path) -> Path:
    """The nearest folder that there is: of one that could not be made, the one it lies in."""
    return next(one for one in (path, *path.parents) if one.exists())


@contextmanager
def open_draft(target: Path) -> Iterator[Path]:
    """A path beside `target` to write to: it gets `target`'s name at the end, and is removed on any exception.

    A killed process leaves its draft, which the next to write the same file overwrites.
    """
    draft = target.with_name(f".{target.name}.new")
    try:
        yield draft
        draft.replace(target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
