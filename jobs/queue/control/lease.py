"""One process works, another waits: a row that whoever works moves on, by conditional update."""

from __future__ import annotations

import os
import secrets
import socket
import time

from django.utils import timezone

from jobs.models import Lease

NAME = "controller"
LASTS_S = 5.0
FRESH_S = 30.0


class WorkLease:
    """Held by moving `beats`. Who sees it stand still for `LASTS_S` of its own time takes it: no clock is compared."""

    def __init__(self, name: str = NAME) -> None:
        """`name` of the work: the controller's, unless told otherwise."""
        self._name = name
        self.holder = f"{socket.gethostname()[:150]} process {os.getpid()} {secrets.token_hex(4)}"
        self.taken_from = ""  # whoever held it before us
        self._seen: tuple[str, int] | None = None
        self._since = 0.0

    def hold(self) -> bool:
        """Take the lease or keep it; False while another process holds it."""
        row, _ = Lease.objects.get_or_create(name=self._name)
        now = time.monotonic()
        if (row.holder, row.beats) != self._seen:
            self._seen, self._since = (row.holder, row.beats), now
        if row.holder not in ("", self.holder) and now - self._since < LASTS_S:
            return False
        mine = Lease.objects.filter(name=self._name, holder=row.holder, beats=row.beats)
        if mine.update(holder=self.holder, beats=row.beats + 1) != 1:
            return False
        if row.holder != self.holder:
            self.taken_from = row.holder
        return True

    def holder_now(self) -> str:
        """Whoever was last seen to hold it."""
        return self._seen[0] if self._seen else ""

    def ticked(self) -> None:
        """A whole tick went well."""
        Lease.objects.filter(name=self._name, holder=self.holder).update(ticked=timezone.now())

    def release(self) -> None:
        """Let another process start at once."""
        Lease.objects.filter(name=self._name, holder=self.holder).update(holder="")


def unhealthy(name: str = NAME) -> str:
    """Why the process is not well, empty when its last whole tick is at most `FRESH_S` old."""
    ticked = Lease.objects.filter(name=name).values_list("ticked", flat=True).first()
    if ticked is None:
        return f"No {name} has completed a tick yet."
    age = (timezone.now() - ticked).total_seconds()
    return "" if age <= FRESH_S else f"The last complete tick ended {age:.0f} s ago. The limit is {FRESH_S:.0f} s."
