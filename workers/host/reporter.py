"""Send heartbeats to the controller: the host, its machine, and its attempts."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import threading
import time
from typing import Any

import redis
from redis.exceptions import RedisError

from contracts.codec import encode_event
from contracts.control import VERSION, AttemptReport, HostEvent
from contracts.logs import LOG_ANSWER_TTL_S
from contracts.names import events_stream, log_key
from contracts.security import build_signed_entry, prepend_signature
from workers.host.attempt_watcher import AttemptWatcher, HostExits, read_report_or_note
from workers.host.attempts import Pruner, clean_text, iterate_unacknowledged
from workers.host.health_check import HealthCheck
from workers.host.machine import HostSampler, describe_device, get_boot_id
from workers.host.settings import HostSettings

log = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 5.0
SCAN_INTERVAL_S = 1.0
REPEAT_WARNING_S = 60.0
REMOVED_MESSAGE = (
    "The board does not know this host. The host was removed, or Redis was emptied. Running jobs continue. "
    "If the host was removed, stop this worker, or join again with a new token."
)
ALIVE_FILE = "alive"  # in the run directory; the health check of a container reads its age
MAX_EVENTS = 20_000  # entries in this host's stream
MAX_EVENTS_BYTES = 64 * 2**20  # above it no process reads the stream, and exit reports wait
MAX_EXIT_BYTES = 4 * 2**20  # of exit reports in one heartbeat


class Reporter:
    """A thread that checks the attempts every second, and sends a `HostEvent` every 5 s or on a change.

    The thread survives every error of files and Redis. If it ends anyway, it ends the worker's process, because a
    worker that accepts orders without sending heartbeats is worse than a restarted worker.
    """

    def __init__(
        self,
        settings: HostSettings,
        note: str = "",
        health: HealthCheck | None = None,
        pruner: Pruner | None = None,
        limits: str = "",
    ) -> None:
        self._settings, self._note, self._health = settings, note, health or HealthCheck(settings)
        self._pruner = pruner or Pruner(settings)
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._device_name, self._memory_bytes = describe_device(settings)
        self._redis = redis.Redis.from_url(settings.redis_url, socket_timeout=5, socket_connect_timeout=2)
        self._events = events_stream(settings.name)
        self.exits = HostExits()
        self._watcher = AttemptWatcher(settings.run_dir, self._redis, self.exits)
        self._sampler = HostSampler(settings, self.get_time, limits=limits)
        self._incarnation, self._sequence = secrets.token_hex(8), 0
        self._began: float | None = None
        self._last_warning = ("", 0.0)  # text, and when it was logged
        self._exits_sent: dict[tuple[str, int], int] = {}  # by attempt: the heartbeat that last had its exit report
        self._thread = threading.Thread(target=self._run, name="host-reporter", daemon=True)

    def start(self) -> None:
        self._settings.run_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        self._sampler.start()
        self._thread.start()

    def wake(self) -> None:
        """Send a heartbeat now."""
        self._wake.set()

    def stop(self) -> None:
        self._stopped.set()
        self._sampler.stop()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(5)

    def get_time(self) -> float:
        """Return unix seconds by Redis' clock, which all hosts share. Raises RedisError."""
        response: Any = self._redis.time()
        return float(response[0] + response[1] / 1e6)

    def send_answer(self, question: str, body: bytes) -> None:
        """Store a signed answer for the board, for LOG_ANSWER_TTL_S. Raises RedisError."""
        key = log_key(self._settings.name, question)
        pipe = self._redis.pipeline()
        pipe.rpush(key, prepend_signature(self._settings.signing_key, body))
        pipe.pexpire(key, int(LOG_ANSWER_TTL_S * 1000))
        pipe.execute()

    def _run(self) -> None:
        try:
            due = 0.0
            while not self._stopped.is_set():
                due = self._scan(due)
                with contextlib.suppress(OSError):  # a full disk does not make the host unhealthy
                    (self._settings.run_dir / ALIVE_FILE).touch()
                self._wake.wait(SCAN_INTERVAL_S)
        finally:
            if not self._stopped.is_set():
                log.critical("the reporter ended, so this worker stops")
                os._exit(1)

    def _scan(self, due: float) -> float:
        """Check the attempts, and send a heartbeat if it is due. Return when the next heartbeat is due."""
        changed = False
        try:
            changed = self._watcher.check()
        except Exception:
            log.exception("cannot check the attempts")
        if not (changed or self._wake.is_set() or time.monotonic() >= due):
            return due
        try:
            self._wake.clear()
            self._send()
        except RedisError as error:
            self._warn(error)
        except Exception:
            log.exception("cannot report to the controller")
        else:
            self._last_warning = ("", 0.0)
            return time.monotonic() + HEARTBEAT_INTERVAL_S
        return 0.0

    def _warn(self, error: RedisError) -> None:
        """Log why heartbeats fail. The same reason is logged once per REPEAT_WARNING_S."""
        text = REMOVED_MESSAGE if isinstance(error, redis.AuthenticationError) else str(error)
        last_text, logged = self._last_warning
        if text == last_text and time.monotonic() - logged < REPEAT_WARNING_S:
            return
        self._last_warning = (text, time.monotonic())
        log.warning("cannot report to the controller: %s", text)

    def _send(self) -> None:
        if self._began is None:
            self._began = self.get_time()
        self._sequence += 1
        event = HostEvent(
            kind="host",
            v=VERSION,
            host=self._settings.name,
            boot_id=get_boot_id(),
            incarnation=self._incarnation,
            began=self._began,
            sequence=self._sequence,
            time=time.time(),
            slots=self._settings.slots,
            device=self._settings.device,
            device_name=self._device_name,
            memory_bytes=self._memory_bytes,
            address=self._settings.address,
            attempts=self._limit_exits(self._read_attempts()),
        )
        if notes := [note for note in (self._pruner.problem, self._note) if note]:
            event["note"] = clean_text(" ".join(notes))
        if problem := self._health.find_problem():
            event["problem"] = problem
        if (use := self._sampler.get_usage()) is not None:
            event["use"] = use
        if (facts := self._sampler.take_facts()) is not None:
            event["facts"] = facts
        signed: Any = build_signed_entry(self._settings.signing_key, encode_event(event))
        self._redis.xadd(self._events, signed, maxlen=MAX_EVENTS, approximate=True)

    def _read_attempts(self) -> list[AttemptReport]:
        in_memory = self.exits.get_reports()
        attempts = (a for a in iterate_unacknowledged(self._settings.run_dir) if a not in in_memory)
        return [*map(read_report_or_note, attempts), *in_memory.values()]

    def _limit_exits(self, reports: list[AttemptReport]) -> list[AttemptReport]:
        """Remove exit reports that do not fit. Those that waited longest come first."""
        exited = [report for report in reports if "exit" in report]
        stream_bytes: Any = self._redis.memory_usage(self._events) if exited else None
        left_bytes = MAX_EXIT_BYTES if exited and int(stream_bytes or 0) < MAX_EVENTS_BYTES else 0
        sent = {(r["job"], r["attempt"]): self._exits_sent.get((r["job"], r["attempt"]), 0) for r in exited}
        for report in sorted(exited, key=lambda r: sent[r["job"], r["attempt"]]):
            left_bytes -= len(json.dumps(report["exit"]))
            if left_bytes < 0:
                del report["exit"]
            else:
                sent[report["job"], report["attempt"]] = self._sequence
        self._exits_sent = sent
        return reports
