"""What goes wrong again and again is told once a minute, with how often."""

from __future__ import annotations

import logging
import time

import kombu.exceptions
from django.db import Error

from jobs.core.errors import WORDS, is_full
from jobs.queue.inbound.deadletters import passes

log = logging.getLogger(__name__)

QUIET_S = 60.0
MOST = 100  # kinds of trouble remembered


class Troubles:
    """Errors of the controller's stages, by kind: the stage, the type, and the line that raised it."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, str, int], float] = {}
        self._since: dict[tuple[str, str, int], int] = {}

    def tell(self, stage: str, error: Exception) -> bool:
        """Log it, unless the same was logged within a minute; True when it was logged."""
        kind = (stage, type(error).__qualname__, _line(error))
        self._since[kind] = self._since.get(kind, 0) + 1
        now = time.monotonic()
        if now - self._told.get(kind, -QUIET_S) < QUIET_S:
            return False
        times = f" ({self._since.pop(kind)} times since the last log line)" if kind in self._told else ""
        if len(self._told) >= MOST:
            self._told.clear()
            self._since.clear()
        self._told[kind] = now
        self._since.pop(kind, None)
        if away(error):
            log.warning("Stage %s cannot continue%s: %s", stage, times, error)
        elif is_full(error):
            log.warning("Stage %s cannot continue%s: %s: %s", stage, times, WORDS, error)
        else:
            log.error("Stage %s failed%s", stage, times, exc_info=error)
        return True


def away(error: Exception) -> bool:
    """The database or Redis is not there, locked or full: nothing is wrong with us."""
    return passes(error) or isinstance(error, kombu.exceptions.OperationalError)


def of_database(error: Exception) -> bool:
    """Whether the connection to the database should not be used again."""
    return isinstance(error, Error)


def _line(error: Exception) -> int:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_lineno if trace is not None else 0
