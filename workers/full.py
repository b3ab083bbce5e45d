"""How a disk says that it takes no more, and how we say it: the host, the folder, the bytes that it needs and has."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)


class FullError(OSError):
    """A file of ours was not taken whole. `needed`: its bytes."""

    needed = 0


def full_disk(error: BaseException | None) -> OSError | None:
    """The disk's own word in an error, or in what led to it: torch tells of it in words of its writer's."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return error
        error = error.__cause__ or error.__context__
    return None


def no_room(host: str, full: OSError, folder: Path, needs: str = "") -> str:
    """In words; `folder`: where a write was, which names no file. `needs`: what is known of it."""
    return f"No disk space on {host}: {full.strerror}: {full.filename or folder}{needs}{free_words(folder)}"


def not_started(host: str, error: Exception, folder: Path) -> str:
    """Why an attempt never ran, of which `folder` holds the files."""
    if isinstance(error, OSError) and error.errno in FULL:
        needed = error.needed if isinstance(error, FullError) else 0
        return no_room(host, error, folder, f" needs {needed:,} bytes" if needed else "")
    text = f"{error}: '{folder}'" if isinstance(error, OSError) and error.filename is None else str(error)
    return f"Not started on {host}: {text}"


def free_words(folder: Path) -> str:
    try:
        return f", {shutil.disk_usage(_standing(folder)).free:,} bytes are free"
    except OSError:
        return ""


def _standing(path: Path) -> Path:
    """The nearest folder that there is: of one that could not be made, the one it lies in."""
    return next(one for one in (path, *path.parents) if one.exists())
