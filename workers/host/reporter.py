"""Tells the controller, again and again, what this host is and what it runs."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import secrets
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import redis
from redis.exceptions import RedisError

from contracts.codec import encode_event
from contracts.control import VERSION, AttemptReport, HostEvent
from contracts.logs import LOG_ANSWER_TTL_S
from contracts.names import events_stream, log_key
from contracts.security import build_signed_entry, prepend_signature
from workers.host.attempts import attempts
from workers.host.ends import Ends
from workers.host.facts.gauge import Gauge
from workers.host.settings import HostSettings
from workers.host.watch import Watch, told_of

log = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
SCAN_S = 1.0
SAY_AGAIN_S = 60.0
REMOVED = (
    "The board does not know this host. The host was removed, or Redis was emptied. Running jobs continue. "
    "If the host was removed, stop this worker, or join again with a new token."
)
ALIVE = "alive"  # touched in the run directory at each scan: a container's health check looks at its age
EVENTS_KEPT = 20_000  # entries of this host's events
EVENTS_BYTES = 64 * 2**20  # of these: where they are more, nobody reads them, and exit reports wait
EXITS_BYTES = 4 * 2**20  # of exit reports in one heartbeat


class Reporter:
    """A thread that looks at the attempts each second and sends a `HostEvent` every 5 s, sooner on a change.

    It outlives whatever an attempt's files or Redis do to it. Should it end all the same, so does the worker's
    process, for a silent worker that still takes orders is worse than one that is started again.
    """

    def __init__(self, settings: HostSettings, note: str = "") -> None:
        self._settings, self._note = settings, note
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._device_name, self._memory_bytes = device(settings)
        self._redis = redis.Redis.from_url(settings.redis_url, socket_timeout=5, socket_connect_timeout=2)
        self._events = events_stream(settings.name)
        self.ends = Ends()
        self._watch = Watch(settings.run_dir, self._redis, self.ends)
        self._gauge = Gauge(settings, self.now)
        self._incarnation, self._sequence = secrets.token_hex(8), 0
        self._began: float | None = None
        self._said = ("", 0.0)  # of what keeps it from reporting: the words, and when
        self._exits_sent: dict[tuple[str, int], int] = {}  # by attempt, the heartbeat that last had its exit report
        self._thread = threading.Thread(target=self._run, name="host-reporter", daemon=True)

    def start(self) -> None:
        self._settings.run_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        self._gauge.start()
        self._thread.start()

    def wake(self) -> None:
        """Something changed: report now."""
        self._wake.set()

    def stop(self) -> None:
        self._stopped.set()
        self._gauge.stop()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(5)

    def now(self) -> float:
        """Unix seconds by Redis' clock, which all hosts share. Raises RedisError."""
        told: Any = self._redis.time()
        return float(told[0] + told[1] / 1e6)

    def answer(self, question: str, body: bytes) -> None:
        """Put an answer where the board waits for it, for a while. Raises RedisError."""
        key = log_key(self._settings.name, question)
        sent = self._redis.pipeline()
        sent.rpush(key, prepend_signature(self._settings.signing_key, body))
        sent.pexpire(key, int(LOG_ANSWER_TTL_S * 1000))
        sent.execute()

    def _run(self) -> None:
        try:
            due = 0.0
            while not self._stopped.is_set():
                due = self._turn(due)
                self._alive()
                self._wake.wait(SCAN_S)
        finally:
            if not self._stopped.is_set():
                log.critical("the reporter ended, so this worker stops")
                os._exit(1)

    def _alive(self) -> None:
        with contextlib.suppress(OSError):  # a full disk is told elsewhere, and is no death
            (self._settings.run_dir / ALIVE).touch()

    def _turn(self, due: float) -> float:
        """One look, and a heartbeat when it is due; returns when the next one is."""
        changed = False
        try:
            changed = self._watch.look()
        except Exception:
            log.exception("cannot check the attempts")
        if not (changed or self._wake.is_set() or time.monotonic() >= due):
            return due
        try:
            self._wake.clear()
            self._send()
        except RedisError as error:
            self._say_why(error)
        except Exception:
            log.exception("cannot report to the controller")
        else:
            self._said = ("", 0.0)
            return time.monotonic() + HEARTBEAT_S
        return 0.0

    def _say_why(self, error: RedisError) -> None:
        """Once a minute while it stays the same."""
        words = REMOVED if isinstance(error, redis.AuthenticationError) else str(error)
        last, at = self._said
        if words == last and time.monotonic() - at < SAY_AGAIN_S:
            return
        self._said = (words, time.monotonic())
        log.warning("cannot report to the controller: %s", words)

    def _send(self) -> None:
        if self._began is None:
            self._began = self.now()
        self._sequence += 1
        event = HostEvent(
            kind="host",
            v=VERSION,
            host=self._settings.name,
            boot_id=boot_id(),
            incarnation=self._incarnation,
            began=self._began,
            sequence=self._sequence,
            time=time.time(),
            slots=self._settings.slots,
            device=self._settings.device,
            device_name=self._device_name,
            memory_bytes=self._memory_bytes,
            address=self._settings.address,
            attempts=self._bounded(self._attempts()),
        )
        if self._note:
            event["note"] = self._note
        if (use := self._gauge.use()) is not None:
            event["use"] = use
        if (facts := self._gauge.facts()) is not None:
            event["facts"] = facts
        signed: Any = build_signed_entry(self._settings.signing_key, encode_event(event))
        self._redis.xadd(self._events, signed, maxlen=EVENTS_KEPT, approximate=True)

    def _attempts(self) -> list[AttemptReport]:
        unwritten = self.ends.told()
        on_disk = [told_of(found) for found in attempts(self._settings.run_dir) if found not in unwritten]
        return [*on_disk, *unwritten.values()]

    def _bounded(self, reports: list[AttemptReport]) -> list[AttemptReport]:
        """All attempts, with as many exit reports as fit; what waited longest goes first."""
        exited = [report for report in reports if "exit" in report]
        room = EXITS_BYTES if exited and self._events_bytes() < EVENTS_BYTES else 0
        sent = {(r["job"], r["attempt"]): self._exits_sent.get((r["job"], r["attempt"]), 0) for r in exited}
        for report in sorted(exited, key=lambda r: sent[r["job"], r["attempt"]]):
            room -= len(json.dumps(report["exit"]))
            if room < 0:
                del report["exit"]
            else:
                sent[report["job"], report["attempt"]] = self._sequence
        self._exits_sent = sent
        return reports

    def _events_bytes(self) -> int:
        told: Any = self._redis.memory_usage(self._events)
        return int(told or 0)


def boot_id() -> str:
    """Another after each start of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def device(settings: HostSettings) -> tuple[str, int]:
    """Name of the device, and memory bytes per slot."""
    if settings.device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
        listed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
        name, _, mebibytes = listed[0].rpartition(",")
        return name.strip()[:200], int(mebibytes) * 2**20
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{platform.machine()} CPU, {os.cpu_count()} cores", total // settings.slots
