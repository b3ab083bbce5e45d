"""What is asked for and is not there, or not for whoever asks: told alike.

A disk of the board's that takes no more: how that is known, and said.
"""

from __future__ import annotations

import errno
import os

from django.http import Http404


class MissingError(Http404):
    """`what`: one word, by which REST finds the parameter of the address. `text`: a message other than the default."""

    def __init__(self, what: str, text: str = "") -> None:
        super().__init__(text or f"no such {what}")
        self.what = what


FULL = (errno.ENOSPC, errno.EDQUOT)
WORDS = "The disk of the board is full."


def is_full(error: BaseException | None) -> bool:
    """Of an error of ours, or of a library that has the system's words for it."""
    if isinstance(error, OSError):
        return error.errno in FULL
    return any(os.strerror(number) in str(error) for number in FULL)
