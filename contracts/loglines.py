"""How a line of a log is written as JSON: the same by each process of ours, so that one collector reads them all."""

from __future__ import annotations

from typing import Any, Final, Literal

LogFormat = Literal["text", "json"]
FIELDS: Final = ("levelname", "name", "message")  # beside its time, and exc_info where there is a traceback
NAMES: Final = {"levelname": "level", "name": "logger"}


def json_formatter(*more: str) -> dict[str, Any]:
    """For `logging.config`: an object a line. `more`: attributes of a record that are told too."""
    return {
        "()": "pythonjsonlogger.json.JsonFormatter",
        "fmt": (*FIELDS, *more),
        "rename_fields": NAMES,
        "timestamp": True,
    }
