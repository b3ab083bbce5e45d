"""Logs of a bounded size: what has grown past the bound is moved aside while its writer goes on. And what a line tells:
of which request it is, and whether it has a traceback."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from contracts.logs import build_json_formatter
from jobs.core.request_id import current

LOG_BYTES = 5_000_000
REQUESTS = "meshboard.requests"


def with_reference(record: logging.LogRecord) -> bool:
    """A filter: of which request the line is."""
    record.request_id = current()
    record.__dict__.pop("request", None)  # Django's own: as text it has the whole address, what follows `?` too
    return True


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


def logging_settings(form: str) -> dict[str, Any]:
    """Django's LOGGING: lines to read, or "json": an object each, and one of each request answered."""
    text = {"format": "%(asctime)s %(levelname)s %(name)s %(message)s"}
    formatters = {"text": text, "json": build_json_formatter("request_id")}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {form: formatters[form]},
        "filters": {
            "reference": {"()": "django.utils.log.CallbackFilter", "callback": with_reference},
            "refusals": {"()": "django.utils.log.CallbackFilter", "callback": without_refusals},
        },
        "handlers": {
            "console": {
                "class": "logging.StreamHandler",
                "formatter": form,
                "filters": ["reference", "refusals"],
            }
        },
        "root": {"handlers": ["console"], "level": "INFO"},
        "loggers": {
            "axes": {"level": "WARNING"},
            REQUESTS: {"level": "INFO" if form == "json" else "WARNING"},
        },
    }
