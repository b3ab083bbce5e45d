"""The host worker's own log: lines to read, or with MESHBOARD_LOG_FORMAT=json an object each, as the board's."""

from __future__ import annotations

import logging
import logging.config
import os
from typing import cast

from contracts.logs import LogFormat, build_json_formatter
from workers.host.settings import SettingError

NAME = "MESHBOARD_LOG_FORMAT"


def log_format() -> LogFormat:
    """
    Raises:
        SettingError: it is none.
    """
    told = os.environ.get(NAME) or "text"
    if told not in ("text", "json"):
        raise SettingError(f"{NAME} is {told[:40]!r}. Use text or json.")
    return cast(LogFormat, told)


def write_json(**_named: object) -> None:
    """Every logger's lines, Celery's and Python's warnings too, on standard error."""
    logging.captureWarnings(True)
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"json": build_json_formatter()},
            "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "json"}},
            "root": {"handlers": ["console"], "level": "INFO"},
        }
    )
