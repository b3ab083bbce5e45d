"""Run the stages of the controller in each tick. A stage that fails does not stop the others."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from django.db import connection
from redis.exceptions import RedisError

from jobs.core.redis_client import connect
from jobs.operations.metrics.export import OtlpExporter
from jobs.operations.prune import prune_if_due
from jobs.people.notifications.delivery_worker import DeliveryWorker
from jobs.queue.engines import Engine, create_engines
from jobs.queue.hosts.redis_access import OTHER_BOARD_ADVICE, OTHER_BOARD_MESSAGE, RedisClaim, RedisUsers
from jobs.queue.inbound.reconcile import EventReception, check_external_runs
from jobs.queue.inbound.streams import read_events, wait_for_event
from jobs.queue.termination import IdleWatch, apply_rules
from jobs.queue.work_lease import StageErrors, WorkLease, is_database_error, is_outage

log = logging.getLogger(__name__)

TICK_S = 1.0
MIN_TICK_S = 0.2
MAX_PAUSE_S = 5.0  # between tries without the database or Redis


class Controller:
    """Runs the stages while it holds the lease. After a crash, another controller continues from the database."""

    def __init__(self) -> None:
        self._lease = WorkLease()
        self._claim = RedisClaim()
        self._listening = EventReception()
        self._troubles = StageErrors()
        self._access = RedisUsers()
        self._idle = IdleWatch()
        self._postman = DeliveryWorker()
        self._otlp = OtlpExporter()
        self._client = connect()
        self._engines = create_engines(self._client, self._listening)
        self._waits_for, self._away = "", False

    def run(self, stop: threading.Event) -> None:
        """Run until `stop` is set."""
        failures = 0
        try:
            while not stop.is_set():
                began, self._away = time.monotonic(), False
                self.run_once()
                failures = failures + 1 if self._away else 0
                if self._away:
                    stop.wait(min(MAX_PAUSE_S, TICK_S / 4 * 2 ** min(failures, 10)))
                else:
                    self._wait(began, stop)
        finally:
            self._run_stage("stop", lambda: self._claim.release(self._lease.holder))
            self._run_stage("stop", self._lease.release)
            for engine in self._engines:
                self._run_stage("stop", engine.close)
            self._run_stage("stop", self._postman.store_results)
            self._run_stage("stop", self._postman.close)
            self._run_stage("stop", self._otlp.close)
            connection.close()
            self._client.close()
            self._claim.close()

    def run_once(self) -> None:
        """Run one tick, or none while another controller works."""
        if not self._run_stage("lease", self._take_lease):
            return
        if self._waits_for:
            self._run_stage("deliveries", self._postman.store_results)
            return
        self.tick()

    def _take_lease(self) -> None:
        before, self._waits_for = self._waits_for, self._find_other_controller()
        if self._waits_for not in ("", before):
            level = logging.WARNING if self._waits_for.startswith(OTHER_BOARD_MESSAGE) else logging.INFO
            log.log(level, "Waiting: %s", self._waits_for)
        if before and not self._waits_for:
            log.info("The other controller has ended. Starting")

    def _find_other_controller(self) -> str:
        if not self._lease.hold():
            return f"another controller runs ({self._lease.get_last_holder()})"
        try:
            other = self._claim.hold(self._lease.holder, self._lease.previous_holder)
        except RedisError:  # the stages that need Redis report the error
            return ""
        return f"{OTHER_BOARD_MESSAGE} ({other}); {OTHER_BOARD_ADVICE}" if other else ""

    def tick(self) -> bool:
        """Run each stage once. Return whether all succeeded."""
        results = [
            self._run_stage("events", self._process_events),
            self._run_stage("rules", apply_rules),
            self._run_stage("idle", lambda: self._idle.stop_idle_runs(self._client)),
            self._run_stage("access", lambda: self._access.sync(self._client)),
            self._run_stage("silence", check_external_runs),
        ]
        for engine in self._engines:
            results += [self._run_stage(f"{engine.name}: {what}", work) for what, work in _steps(engine)]
        results += [
            self._run_stage("deliveries", self._postman.run_once),
            self._run_stage("otlp", self._otlp.turn),
            self._run_stage("prune", lambda: prune_if_due(self._client)),
        ]
        return all(results) and self._run_stage("lease", self._lease.record_tick)

    def _process_events(self) -> None:
        read_events(self._client)
        self._listening.record_pass()

    def _run_stage(self, name: str, work: Callable[[], object]) -> bool:
        try:
            work()
        except Exception as error:
            self._troubles.report(name, error)
            self._away |= is_outage(error)
            if is_database_error(error):
                connection.close()  # the next use reconnects
            return False
        return True

    def _wait(self, began: float, stop: threading.Event) -> None:
        """Wait until the next tick is due or a host sends an event."""
        stop.wait(max(0.0, MIN_TICK_S - (time.monotonic() - began)))
        left = TICK_S - (time.monotonic() - began)
        if left <= 0 or stop.is_set():
            return
        if self._waits_for or not self._run_stage("events", lambda: wait_for_event(self._client, left)):
            stop.wait(left)


def _steps(engine: Engine) -> list[tuple[str, Callable[[], None]]]:
    """Return the stages of an engine in the order in which each one needs the one before."""
    return [
        ("place", engine.place),
        ("observe", engine.observe),
        ("cancel", engine.cancel),
        ("start", engine.start),
    ]
