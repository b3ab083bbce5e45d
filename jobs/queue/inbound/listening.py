"""Since when hosts are heard, and why they may not be: silence while nobody listened is not their own."""

from __future__ import annotations

import time
from datetime import datetime, timedelta

from django.utils import timezone

from jobs.models import HOST_SILENT_AFTER

GAP = timedelta(seconds=10)


class Listening:
    """What the controller knows of its own ears."""

    def __init__(self) -> None:
        self._since = self._last = timezone.now()
        self._last_tick = time.monotonic()

    def heard(self) -> None:
        """Every event there is has been taken in."""
        if self._deaf():
            self._since = timezone.now()
        self._last, self._last_tick = timezone.now(), time.monotonic()

    @property
    def since(self) -> datetime:
        """From when on a host's silence is its own; now, while nothing can be heard."""
        return timezone.now() if self._deaf() else self._since

    def trouble(self) -> str:
        """Why a host may be well and yet not heard of; empty where there is no such reason."""
        if self._deaf():
            return f"the controller has had no connection to Redis since {self._last:%Y-%m-%d %H:%M:%S} UTC"
        if timezone.now() - self._since <= HOST_SILENT_AFTER:
            return f"the controller reconnected to Redis only at {self._since:%Y-%m-%d %H:%M:%S} UTC"
        return ""

    def _deaf(self) -> bool:
        """By both clocks: while a machine sleeps one of them may stand still, and the other may be set."""
        return time.monotonic() - self._last_tick > GAP.total_seconds() or abs(timezone.now() - self._last) > GAP
