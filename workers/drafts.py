"""Files that are whole or not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def draft_of(target: Path) -> Iterator[Path]:
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
