"""Select the process that works, and limit the log lines about repeated errors."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time

import kombu.exceptions
from django.db import Error
from django.utils import timezone

from jobs.core.errors import DISK_FULL_MESSAGE, is_disk_full
from jobs.models import Lease
from jobs.queue.inbound.event_handlers import is_transient

log = logging.getLogger(__name__)

CONTROLLER = "controller"
TAKEOVER_AFTER_S = 5.0
MAX_TICK_AGE_S = 30.0
LOG_INTERVAL_S = 60.0  # per kind of error
MAX_ERROR_KINDS = 100


class WorkLease:
    """A lease that its holder renews by increasing `beats` in the database.

    A process that sees no change for `TAKEOVER_AFTER_S` by its own clock takes the lease, so no clocks are compared.
    """

    def __init__(self, name: str = CONTROLLER) -> None:
        self._name = name
        self.holder = f"{socket.gethostname()[:150]} process {os.getpid()} {secrets.token_hex(4)}"
        self.previous_holder = ""
        self._seen: tuple[str, int] | None = None
        self._since = 0.0

    def hold(self) -> bool:
        """Take or renew the lease. Return False while another process holds the lease."""
        row, _ = Lease.objects.get_or_create(name=self._name)
        now = time.monotonic()
        if (row.holder, row.beats) != self._seen:
            self._seen, self._since = (row.holder, row.beats), now
        if row.holder not in ("", self.holder) and now - self._since < TAKEOVER_AFTER_S:
            return False
        unchanged = Lease.objects.filter(name=self._name, holder=row.holder, beats=row.beats)
        if unchanged.update(holder=self.holder, beats=row.beats + 1) != 1:
            return False
        if row.holder != self.holder:
            self.previous_holder = row.holder
        return True

    def get_last_holder(self) -> str:
        return self._seen[0] if self._seen else ""

    def record_tick(self) -> None:
        """Record the end of a complete tick."""
        Lease.objects.filter(name=self._name, holder=self.holder).update(ticked=timezone.now())

    def release(self) -> None:
        """Give up the lease, so another process starts at once."""
        Lease.objects.filter(name=self._name, holder=self.holder).update(holder="")


def explain_unhealthy(name: str = CONTROLLER) -> str:
    """Return why a process is unhealthy, or an empty text if it recently completed a tick."""
    ticked = Lease.objects.filter(name=name).values_list("ticked", flat=True).first()
    if ticked is None:
        return f"No {name} has completed a tick yet."
    age_s = (timezone.now() - ticked).total_seconds()
    if age_s <= MAX_TICK_AGE_S:
        return ""
    return f"The last complete tick ended {age_s:.0f} s ago. The limit is {MAX_TICK_AGE_S:.0f} s."


class StageErrors:
    """Log the errors of stages, at most once per interval for each stage, type, and line of code."""

    def __init__(self) -> None:
        self._logged: dict[tuple[str, str, int], float] = {}
        self._counts: dict[tuple[str, str, int], int] = {}

    def report(self, stage: str, error: Exception) -> bool:
        """Log an error unless it was logged within the interval, and return whether it was logged now."""
        kind = (stage, type(error).__qualname__, _get_line(error))
        self._counts[kind] = self._counts.get(kind, 0) + 1
        now = time.monotonic()
        if now - self._logged.get(kind, -LOG_INTERVAL_S) < LOG_INTERVAL_S:
            return False
        times = f" ({self._counts.pop(kind)} times since the last log line)" if kind in self._logged else ""
        if len(self._logged) >= MAX_ERROR_KINDS:
            self._logged.clear()
            self._counts.clear()
        self._logged[kind] = now
        self._counts.pop(kind, None)
        if is_outage(error):
            log.warning("Stage %s cannot continue%s: %s", stage, times, error)
        elif is_disk_full(error):
            log.warning("Stage %s cannot continue%s: %s: %s", stage, times, DISK_FULL_MESSAGE, error)
        else:
            log.error("Stage %s failed%s", stage, times, exc_info=error)
        return True


def is_outage(error: Exception) -> bool:
    """Return whether the database or Redis is unavailable, locked, full, or read-only."""
    return is_transient(error) or isinstance(error, kombu.exceptions.OperationalError)


def is_database_error(error: Exception) -> bool:
    """Return whether the database connection should be closed."""
    return isinstance(error, Error)


def _get_line(error: Exception) -> int:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_lineno if trace is not None else 0
