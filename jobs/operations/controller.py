"""The controller: stages in a row, again and again; one that fails holds up no other."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from django.db import connection
from redis.exceptions import RedisError

from jobs.core.redis_client import connect
from jobs.operations.metrics.otlp import Otlp
from jobs.operations.prune import prune_if_due
from jobs.people.notifications.postman import Postman
from jobs.queue.engines import engines
from jobs.queue.engines.base import Engine
from jobs.queue.hosts.redis_access import ADVICE, WORDS, Access, Claim
from jobs.queue.inbound.silence import Listening, tell_of_silence
from jobs.queue.inbound.streams import drain, wait_for_event
from jobs.queue.termination import Idle, apply_rules
from jobs.queue.work_lease import Troubles, WorkLease, away, of_database

log = logging.getLogger(__name__)

TICK_S = 1.0
SHORTEST_TICK_S = 0.2  # however much there is to hear
LONGEST_PAUSE_S = 5.0  # between tries while the database or Redis is away


class Controller:
    """Works while it holds the lease. Killed anywhere, the next one goes on from what is in the database."""

    def __init__(self) -> None:
        self._lease = WorkLease()
        self._claim = Claim()
        self._listening = Listening()
        self._troubles = Troubles()
        self._access = Access()
        self._idle = Idle()
        self._postman = Postman()
        self._otlp = Otlp()
        self._client = connect()
        self._engines = engines(self._client, self._listening)
        self._waits_for, self._away = "", False

    def run(self, stop: threading.Event) -> None:
        """Until told to stop."""
        failures = 0
        try:
            while not stop.is_set():
                began, self._away = time.monotonic(), False
                self.turn()
                failures = failures + 1 if self._away else 0
                if self._away:
                    stop.wait(min(LONGEST_PAUSE_S, TICK_S / 4 * 2 ** min(failures, 10)))
                else:
                    self._wait(began, stop)
        finally:
            self._stage("stop", lambda: self._claim.release(self._lease.holder))
            self._stage("stop", self._lease.release)
            for engine in self._engines:
                self._stage("stop", engine.close)
            self._stage("stop", self._postman.take_in)
            self._stage("stop", self._postman.close)
            self._stage("stop", self._otlp.close)
            connection.close()
            self._client.close()
            self._claim.close()

    def turn(self) -> None:
        """One tick, or none while another controller works."""
        if not self._stage("lease", self._take_lease):
            return
        if self._waits_for:
            self._stage("deliveries", self._postman.take_in)
            return
        self.tick()

    def _take_lease(self) -> None:
        before, self._waits_for = self._waits_for, self._who_works()
        if self._waits_for not in ("", before):
            level = logging.WARNING if self._waits_for.startswith(WORDS) else logging.INFO
            log.log(level, "Waiting: %s", self._waits_for)
        if before and not self._waits_for:
            log.info("The other controller has ended. Starting")

    def _who_works(self) -> str:
        """Instead of us; empty where it is our turn."""
        if not self._lease.hold():
            return f"another controller runs ({self._lease.holder_now()})"
        try:
            other = self._claim.hold(self._lease.holder, self._lease.taken_from)
        except RedisError:  # the stages that need it say so
            return ""
        return f"{WORDS} ({other}); {ADVICE}" if other else ""

    def tick(self) -> bool:
        """Every stage once; True when all went well."""
        went_well = [
            self._stage("events", self._listen),
            self._stage("rules", apply_rules),
            self._stage("idle", lambda: self._idle.end(self._client)),
            self._stage("access", lambda: self._access.keep(self._client)),
            self._stage("silence", tell_of_silence),
        ]
        for engine in self._engines:
            went_well += [self._stage(f"{engine.name}: {what}", work) for what, work in _steps(engine)]
        went_well += [
            self._stage("deliveries", self._postman.turn),
            self._stage("otlp", self._otlp.turn),
            self._stage("prune", lambda: prune_if_due(self._client)),
        ]
        return all(went_well) and self._stage("lease", self._lease.ticked)

    def _listen(self) -> None:
        drain(self._client)
        self._listening.heard()

    def _stage(self, name: str, work: Callable[[], object]) -> bool:
        try:
            work()
        except Exception as error:
            self._troubles.tell(name, error)
            self._away |= away(error)
            if of_database(error):
                connection.close()  # the next use opens another
            return False
        return True

    def _wait(self, began: float, stop: threading.Event) -> None:
        """At most until the next tick is due; less when a host has something to say."""
        stop.wait(max(0.0, SHORTEST_TICK_S - (time.monotonic() - began)))
        left = TICK_S - (time.monotonic() - began)
        if left <= 0 or stop.is_set():
            return
        if self._waits_for or not self._stage("events", lambda: wait_for_event(self._client, left)):
            stop.wait(left)


def _steps(engine: Engine) -> list[tuple[str, Callable[[], None]]]:
    """In the order in which one pass of an engine serves the next."""
    return [
        ("place", engine.place),
        ("observe", engine.observe),
        ("cancel", engine.cancel),
        ("start", engine.start),
    ]
