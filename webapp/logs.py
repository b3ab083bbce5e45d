"""Logs of a bounded size: what has grown past the bound is moved aside while its writer goes on. And
which of them tell a traceback."""

from __future__ import annotations

import logging
import os
from pathlib import Path

LOG_BYTES = 5_000_000


def without_refusals(record: logging.LogRecord) -> bool:
    """A filter: that somebody was refused is one line, and no error of ours with a traceback."""
    if getattr(record, "status_code", 500) < 500:
        record.exc_info = None
    return True


def bound(log: Path, limit_bytes: int = LOG_BYTES) -> None:
    """Empty a log larger than `limit_bytes`; its last `limit_bytes` become `NAME.log.1`, in place of those before.

    Copied and cut, not renamed: the writer keeps its file, so it needs no signal and survives us. It must append
    (O_APPEND). Lines that it writes between our reading and the cut, some microseconds, are lost.
    """
    if not log.exists() or log.stat().st_size <= limit_bytes:
        return
    with log.open("rb+") as source:
        source.seek(-limit_bytes, os.SEEK_END)
        end = source.read()[-limit_bytes:]
        source.truncate(0)
    draft = log.with_name(log.name + ".new")
    draft.write_bytes(end)
    draft.replace(log.with_name(log.name + ".1"))
