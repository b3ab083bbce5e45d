"""A checkpoint's files, as somebody else may have left them."""

from __future__ import annotations

import os
import stat
import zlib
from pathlib import Path

READ_BYTES = 2**20


def is_plain(name: str) -> bool:
    """Whether a file of that name lies in the folder that it is looked for in."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name and len(name) <= 255


def regular(path: str, flags: int) -> int:
    """Opens what is a file: a link could lead anywhere, a FIFO would wait for ever. Raises OSError."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a file")
    return descriptor


def read_at_most(path: Path, most: int) -> bytes:
    """
    Raises:
        OSError: it cannot be opened.
        ValueError: it has more bytes.
    """
    with open(path, "rb", opener=regular) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"the file has more than {most:,} bytes")
    return data


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    crc = 0
    with open(path, "rb", opener=regular) as file:
        while block := file.read(READ_BYTES):
            crc = zlib.crc32(block, crc)
    return crc
