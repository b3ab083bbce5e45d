"""Logs of a bounded size: what has grown past the bound is moved aside while its writer goes on."""

from __future__ import annotations

import os
from pathlib import Path

LOG_BYTES = 5_000_000
_CHUNK_BYTES = 1 << 20


def bound(log: Path, limit_bytes: int = LOG_BYTES) -> None:
    """Empty a log larger than `limit_bytes`; its last `limit_bytes` become `NAME.log.1`, in place of those before.

    Copied and cut, not renamed: the writer keeps its file, so it needs no signal and survives us. It must append
    (O_APPEND). Lines that it writes between our last read and the cut, some microseconds, are lost.
    """
    if not log.exists() or log.stat().st_size <= limit_bytes:
        return
    draft = log.with_name(log.name + ".new")
    with log.open("rb+") as source, draft.open("wb") as kept:
        source.seek(-limit_bytes, os.SEEK_END)
        while chunk := source.read(_CHUNK_BYTES):
            kept.write(chunk)
        source.truncate(0)
    draft.replace(log.with_name(log.name + ".1"))
