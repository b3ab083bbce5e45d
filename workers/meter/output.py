"""What a rank prints goes to a file, whose disk may be full: then lines are lost, and no rank dies of it."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from typing_extensions import Buffer

from workers.full import FULL


class Sturdy(io.RawIOBase):
    """A descriptor to write to. What a full disk does not take is counted, and told where it takes some again."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor, self._lost = descriptor, 0
        self.name = f"<{name}>"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Buffer, /) -> int:
        told = bytes(data)
        if (
            self._lost
            and self._put(f"\n[{self._lost:,} bytes of output are missing: the disk was full]\n".encode()) == 0
        ):
            self._lost = 0
        self._lost += self._put(told)
        return len(told)

    def _put(self, told: bytes) -> int:
        """How many of these bytes found no room."""
        left = memoryview(told)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            if error.errno not in FULL:
                raise
        return len(left)


def outlive_a_full_disk() -> None:
    """From here on what this process prints cannot end it for want of room."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # it was closed before Python began
            continue
        stream.flush()
        raw: Any = Sturdy(stream.fileno(), name)  # unbuffered, as `python -u` has it
        told: Any = io.TextIOWrapper(raw, encoding=stream.encoding, errors=stream.errors, write_through=True)
        told.mode = "w"
        setattr(sys, name, told)
