"""Opening a log that the job itself could have replaced, and bounding it while a rank goes on writing."""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from pathlib import Path

PUNCH_HOLE = 0x02 | 0x01  # linux/falloc.h: FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
BLOCK = 4096
HEAD_SHARE = 4  # a quarter of the bound stays from the start, half from the end

_libc = ctypes.CDLL(None, use_errno=True)


def run_folder(logs: Path) -> str | None:
    """The folder that torchrun made for its run: the first below `logs`, and none is there before it."""
    with contextlib.suppress(OSError), os.scandir(logs) as entries:
        folders = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
        return min(folders, key=lambda entry: entry.stat(follow_symlinks=False).st_ctime_ns).name if folders else None
    return None


def open_log(logs: Path, path: tuple[str, ...], owners: frozenset[int]) -> int | None:
    """A descriptor of logs/path for reading and writing; None when there is none, or what is there is no log.

    No link is followed on the way, a FIFO or a device is not waited for, and the file is a regular one with no second
    name, of one of `owners`.
    """
    with contextlib.ExitStack() as opened:
        try:
            folder = os.open(logs, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            opened.callback(os.close, folder)
            for name in path[:-1]:
                folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
                opened.callback(os.close, folder)
            descriptor = os.open(path[-1], os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        except OSError:
            return None
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid in owners:
            return descriptor
        os.close(descriptor)
        return None


def cap(descriptor: int, most: int) -> None:
    """Give the middle of a log back to the disk once it takes more than `most` bytes; its writers notice nothing.

    The file keeps its length, so a rank goes on where it was; a line at the start of the hole says what is missing.
    """
    found = os.fstat(descriptor)
    if found.st_blocks * 512 <= most:
        return
    start = most // HEAD_SHARE // BLOCK * BLOCK
    end = (found.st_size - most // 2) // BLOCK * BLOCK
    if end - start <= BLOCK:
        return
    if _libc.fallocate(descriptor, PUNCH_HOLE, ctypes.c_int64(start), ctypes.c_int64(end - start)) != 0:
        os.ftruncate(descriptor, 0)  # a file system without holes: what comes next is all there is
        start, end = 0, found.st_size
    notice = f"\n[{end - start:,} bytes were removed here: the limit of a log is {most:,} bytes]\n"
    os.pwrite(descriptor, notice.encode(), start)
