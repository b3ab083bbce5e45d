"""Looks at the machine in a thread of its own: a driver that hangs must not silence the host."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from redis.exceptions import RedisError

from contracts.hosts import GpuLink, HostFacts, HostUsage
from workers.host.facts import machine, topology
from workers.host.facts import use as usage
from workers.host.facts.gpus import Gpus
from workers.host.settings import HostSettings

log = logging.getLogger(__name__)

LOOK_S = 5.0
FACTS_S = 60.0
STALE_S = 15.0  # what is older is not told as how the host fares now


class Gauge:
    """The last look. `now`: the clock that all hosts share; raises RedisError."""

    def __init__(self, settings: HostSettings, now: Callable[[], float], gpus: Gpus | None = None) -> None:
        self._settings, self._now = settings, now
        self._gpus = gpus
        self._links: list[GpuLink] | None = None
        self._facts: HostFacts | None = None
        self._facts_due = 0.0
        self._use: tuple[float, HostUsage] | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="host-gauge", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """It is not waited for: what it does may hang."""
        self._stopped.set()

    def facts(self) -> HostFacts | None:
        """Since they were last asked for; None where they were told already."""
        told, self._facts = self._facts, None
        return told

    def use(self) -> HostUsage | None:
        """None where the last look is too old."""
        if self._use is None or time.monotonic() - self._use[0] > STALE_S:
            return None
        return self._use[1]

    def look(self) -> None:
        """One look."""
        gpus = self._gpus = self._gpus if self._gpus is not None else Gpus()
        told = usage.use(gpus, self._settings)
        try:
            told["clock_offset_s"], told["round_trip_s"] = usage.clock_offset(self._now)
        except RedisError:
            log.debug("cannot compare the clock of this host with Redis")
        self._use = (time.monotonic(), told)
        if time.monotonic() >= self._facts_due:
            if self._links is None:
                self._links = topology.links() if len(gpus) > 1 else []
            self._facts = machine.facts(gpus, self._links)
            self._facts_due = time.monotonic() + FACTS_S

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self.look()
            except Exception:
                log.exception("cannot measure the machine")
            self._stopped.wait(LOOK_S)
