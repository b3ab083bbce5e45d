"""A disk of the board's that takes no more: how that is known, and said."""

from __future__ import annotations

import errno
import os

FULL = (errno.ENOSPC, errno.EDQUOT)
WORDS = "The disk of the board is full."


def is_full(error: BaseException | None) -> bool:
    """Of an error of ours, or of a library that has the system's words for it."""
    if isinstance(error, OSError):
        return error.errno in FULL
    return any(os.strerror(number) in str(error) for number in FULL)
