"""Log formats, request IDs in logs, and log files of a limited size."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from contracts.logs import build_json_formatter
from jobs.core.errors import get_request_id

MAX_LOG_BYTES = 5_000_000
REQUEST_LOGGER = "meshboard.requests"


def add_request_id(record: logging.LogRecord) -> bool:
    """Log filter: add the request ID, and drop fields that JSON lines would contain."""
    record.request_id = get_request_id()
    record.__dict__.pop("request", None)  # Django's text of a request has the query
    record.__dict__.pop("color_message", None)  # uvicorn's second text of a message, with ANSI codes
    return True


def drop_client_error_traceback(record: logging.LogRecord) -> bool:
    """Log filter: drop the traceback of a rejected request."""
    if getattr(record, "status_code", 500) < 500:
        record.exc_info = None
    return True


def truncate_log(log: Path, limit_bytes: int = MAX_LOG_BYTES) -> None:
    """Empty a log larger than `limit_bytes`, and move its end to `NAME.log.1`.

    The file is copied and truncated, so the writer needs no signal. It must append (O_APPEND). Lines that it writes
    between the copy and the truncation are lost.
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


def build_logging_settings(form: str, level: str = "info") -> dict[str, Any]:
    """Return the setting LOGGING. With "json", each line is an object, and each request is logged."""
    text = {"format": "%(asctime)s %(levelname)s %(name)s %(message)s"}
    formatters = {"text": text, "json": build_json_formatter("request_id")}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {form: formatters[form]},
        "filters": {
            "reference": {"()": "django.utils.log.CallbackFilter", "callback": add_request_id},
            "refusals": {"()": "django.utils.log.CallbackFilter", "callback": drop_client_error_traceback},
        },
        "handlers": {
            "console": {
                "class": "logging.StreamHandler",
                "formatter": form,
                "filters": ["reference", "refusals"],
            }
        },
        "root": {"handlers": ["console"], "level": level.upper()},
        "loggers": {
            "axes": {"level": "WARNING"},
            REQUEST_LOGGER: {"level": "INFO" if form == "json" else "WARNING"},
        },
    }
