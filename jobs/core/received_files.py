"""Receive a file in parts. A client can resume, and each request is small."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from jobs.core.errors import DISK_FULL_MESSAGE

MAX_PART_BYTES = 512 * 2**10  # per request


class PartError(ValueError):
    """A part does not fit to the received bytes. `field` is the wrong parameter."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def append_part(path: Path, offset: int, part: bytes, size: int) -> int:
    """Append a part to an existing file, and return the number of received bytes.

    A client can repeat its last part, because the response to the first request may be lost.

    Args:
        size: Announced size of the file.

    Raises:
        PartError: The part does not begin at the end of the file, or exceeds the announced size.
        FileNotFoundError: The file does not accept parts.
        OSError: The disk is full. The file is unchanged.
    """
    with open(os.open(path, os.O_RDWR), "r+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # a client may send a part again while it is written
        end = file.seek(0, os.SEEK_END)
        if part and end == offset + len(part):
            file.seek(offset)
            if file.read(len(part)) == part:
                return end
        if end != offset:
            raise PartError("offset", f"`offset` is {offset}, but the file has {end} bytes so far. Use this number.")
        if offset + len(part) > size:
            received = offset + len(part)
            raise PartError(
                "size", f"The file has {received} bytes, but its announced size is {size} bytes. Start a new upload."
            )
        if file.write(part) < len(part):  # the disk is full
            file.truncate(offset)
            raise OSError(errno.ENOSPC, DISK_FULL_MESSAGE)
    return offset + len(part)
