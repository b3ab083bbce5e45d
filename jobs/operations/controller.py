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
from jobs.queue.engines import Engine, create_engines
from jobs.queue.hosts.redis_access import OTHER_BOARD_ADVICE, OTHER_BOARD_MESSAGE, RedisClaim, RedisUsers
from jobs.queue.inbound.reconcile import EventReception, check_external_runs
from jobs.queue.inbound.streams import read_events, wait_for_event
from jobs.queue.termination import IdleWatch, apply_rules
from jobs.queue.work_lease import StageErrors, WorkLease, is_database_error, is_outage

log = logging.getLogger(__name__)

TICK_S = 1.0
SHORTEST_TICK_S = 0.2  # however much there is to hear
LONGEST_PAUSE_S = 5.0  # between tries while the database or Redis is away


class Controller:
    """Works while it holds the lease. Killed anywhere, the next one goes on from what is in the database."""

    def __init__(self) -> None:
        self._lease = WorkLease()
        self._claim = RedisClaim()
        self._listening = EventReception()
        self._troubles = StageErrors()
        self._access = RedisUsers()
        self._idle = IdleWatch()
        self._postman = Postman()
        self._otlp = Otlp()
        self._client = connect()
        self._engines = create_engines(self._client, self._listening)
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
            level = logging.WARNING if self._waits_for.startswith(OTHER_BOARD_MESSAGE) else logging.INFO
            log.log(level, "Waiting: %s", self._waits_for)
        if before and not self._waits_for:
            log.info("The other controller has ended. Starting")

    def _who_works(self) -> str:
        """Instead of us; empty where it is our turn."""
        if not self._lease.hold():
            return f"another controller runs ({self._lease.get_last_holder()})"
        try:
            other = self._claim.hold(self._lease.holder, self._lease.previous_holder)
        except RedisError:  # the stages that need it say so
            return ""
        return f"{OTHER_BOARD_MESSAGE} ({other}); {OTHER_BOARD_ADVICE}" if other else ""

    def tick(self) -> bool:
        """Every stage once; True when all went well."""
        went_well = [
            self._stage("events", self._listen),
            self._stage("rules", apply_rules),
            self._stage("idle", lambda: self._idle.stop_idle_runs(self._client)),
            self._stage("access", lambda: self._access.sync(self._client)),
            self._stage("silence", check_external_runs),
        ]
        for engine in self._engines:
            went_well += [self._stage(f"{engine.name}: {what}", work) for what, work in _steps(engine)]
        went_well += [
            self._stage("deliveries", self._postman.turn),
            self._stage("otlp", self._otlp.turn),
            self._stage("prune", lambda: prune_if_due(self._client)),
        ]
        return all(went_well) and self._stage("lease", self._lease.record_tick)

    def _listen(self) -> None:
        read_events(self._client)
        self._listening.record_pass()

    def _stage(self, name: str, work: Callable[[], object]) -> bool:
        try:
            work()
        except Exception as error:
            self._troubles.report(name, error)
            self._away |= is_outage(error)
            if is_database_error(error):
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
