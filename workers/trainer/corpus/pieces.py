"""Documents of any length as pieces of bounded length, cut where no tokenizer in use joins anything."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

PIECE_CHARS = 2**16
# After a line end or before a space that stands alone: GPT-2's, GPT-4's and Llama 3's patterns split there as well,
# whatever is around it. Beside other white space they would not: they take runs of it together.
CUTS = (re.compile(r".*\S\n(?=\S)", re.DOTALL), re.compile(r".*\S(?= \S)", re.DOTALL))


class Piece(NamedTuple):
    """A part of a document. `last`: the document ends with it."""

    text: str
    last: bool


def pieces(blocks: Iterable[str]) -> Iterator[Piece]:
    """One document, however it came in blocks, in pieces of at most PIECE_CHARS characters."""
    rest = ""
    for block in blocks:
        rest += block
        while len(rest) > PIECE_CHARS:
            end = _cut(rest)
            yield Piece(rest[:end], last=False)
            rest = rest[end:]
    yield Piece(rest, last=True)


def blocks(text: str) -> Iterator[str]:
    """A long text bit by bit, so that cutting it never copies all of the rest."""
    return (text[start : start + PIECE_CHARS] for start in range(0, len(text), PIECE_CHARS))


def _cut(text: str) -> int:
    """Where to cut `text`, longer than a piece: looks at one character beyond it."""
    for pattern in CUTS:
        if found := pattern.match(text, 0, PIECE_CHARS + 1):
            return found.end()
    return PIECE_CHARS
