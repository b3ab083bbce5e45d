"""One process works, another waits: a row that whoever works moves on, by conditional update.

What goes wrong again and again is told once a minute, with how often.
"""

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

CONTROLLER = "controller"
LEASE_S = 5.0
MAX_TICK_AGE_S = 30.0


class WorkLease:
    """Held by moving `beats`. Who sees it stand still for `LASTS_S` of its own time takes it: no clock is compared."""

    def __init__(self, name: str = CONTROLLER) -> None:
        """`name` of the work: the controller's, unless told otherwise."""
        self._name = name
        self.holder = f"{socket.gethostname()[:150]} process {os.getpid()} {secrets.token_hex(4)}"
        self.previous_holder = ""  # whoever held it before us
        self._seen: tuple[str, int] | None = None
        self._since = 0.0

    def hold(self) -> bool:
        """Take the lease or keep it; False while another process holds it."""
        row, _ = Lease.objects.get_or_create(name=self._name)
        now = time.monotonic()
        if (row.holder, row.beats) != self._seen:
            self._seen, self._since = (row.holder, row.beats), now
        if row.holder not in ("", self.holder) and now - self._since < LEASE_S:
            return False
        mine = Lease.objects.filter(name=self._name, holder=row.holder, beats=row.beats)
        if mine.update(holder=self.holder, beats=row.beats + 1) != 1:
            return False
        if row.holder != self.holder:
            self.previous_holder = row.holder
        return True

    def get_last_holder(self) -> str:
        """Whoever was last seen to hold it."""
        return self._seen[0] if self._seen else ""

    def record_tick(self) -> None:
        """A whole tick went well."""
        Lease.objects.filter(name=self._name, holder=self.holder).update(ticked=timezone.now())

    def release(self) -> None:
        """Let another process start at once."""
        Lease.objects.filter(name=self._name, holder=self.holder).update(holder="")


def explain_unhealthy(name: str = CONTROLLER) -> str:
    """Why the process is not well, empty when its last whole tick is at most `FRESH_S` old."""
    ticked = Lease.objects.filter(name=name).values_list("ticked", flat=True).first()
    if ticked is None:
        return f"No {name} has completed a tick yet."
    age = (timezone.now() - ticked).total_seconds()
    return (
        ""
        if age <= MAX_TICK_AGE_S
        else f"The last complete tick ended {age:.0f} s ago. The limit is {MAX_TICK_AGE_S:.0f} s."
    )


log = logging.getLogger(__name__)

QUIET_S = 60.0
MOST = 100  # kinds of trouble remembered


class StageErrors:
    """Errors of the controller's stages, by kind: the stage, the type, and the line that raised it."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, str, int], float] = {}
        self._since: dict[tuple[str, str, int], int] = {}

    def report(self, stage: str, error: Exception) -> bool:
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
        if is_outage(error):
            log.warning("Stage %s cannot continue%s: %s", stage, times, error)
        elif is_disk_full(error):
            log.warning("Stage %s cannot continue%s: %s: %s", stage, times, DISK_FULL_MESSAGE, error)
        else:
            log.error("Stage %s failed%s", stage, times, exc_info=error)
        return True


def is_outage(error: Exception) -> bool:
    """The database or Redis is not there, locked or full: nothing is wrong with us."""
    return is_transient(error) or isinstance(error, kombu.exceptions.OperationalError)


def is_database_error(error: Exception) -> bool:
    """Whether the connection to the database should not be used again."""
    return isinstance(error, Error)


def _line(error: Exception) -> int:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_lineno if trace is not None else 0
