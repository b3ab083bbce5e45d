"""Tells the controller, again and again, what this host is and what it runs; finds supervisors that died."""

from __future__ import annotations

import logging
import os
import platform
import secrets
import subprocess
import threading
import time
from pathlib import Path

import msgpack
import redis
from redis.exceptions import RedisError

from contracts.control import VERSION, ExitReport, HostEvent
from contracts.names import EVENTS_STREAM
from workers.host.attempts import AttemptDir, attempts, read_json, write_json
from workers.host.processes import sweep
from workers.host.settings import HostSettings

log = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
SCAN_S = 1.0
ALIVE = "alive"  # touched in the run directory at each scan: a container's health check looks at its age
START_GRACE_S = 15.0  # from the order to the supervisor's pid file


class Reporter:
    """A thread that scans the run directory each second and sends a `HostEvent` every 5 s, sooner on a change."""

    def __init__(self, settings: HostSettings) -> None:
        self._settings = settings
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._device_name, self._memory_bytes = _device(settings)
        self._redis = redis.Redis.from_url(settings.redis_url, socket_timeout=5, socket_connect_timeout=2)
        self._incarnation, self._sequence = secrets.token_hex(8), 0
        self._began: float | None = None
        self._thread = threading.Thread(target=self._run, name="host-reporter", daemon=True)

    def start(self) -> None:
        self._settings.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._thread.start()

    def wake(self) -> None:
        """Something changed: report now."""
        self._wake.set()

    def stop(self) -> None:
        self._stopped.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(5)

    def _run(self) -> None:
        due = 0.0
        while not self._stopped.is_set():
            try:
                if self.bury_the_dead() or self._wake.is_set() or time.monotonic() >= due:
                    self._wake.clear()
                    self._send()
                    due = time.monotonic() + HEARTBEAT_S
                (self._settings.run_dir / ALIVE).touch()
            except (RedisError, OSError) as error:
                log.warning("cannot report to the controller: %s", error)
            self._wake.wait(SCAN_S)

    def bury_the_dead(self) -> bool:
        """Write the exit report of every attempt whose supervisor is gone without one. True if there was any."""
        found = False
        for attempt in attempts(self._settings.run_dir):
            # In this order: a supervisor found dead has already written its report, if it ever will.
            if attempt.supervisor_alive() or attempt.exit.exists() or not _had_time(attempt):
                continue
            survivors = sweep(attempt.job, attempt.attempt)
            reason = "the supervisor died without an exit report; its ranks were ended with it"
            if survivors:
                reason = f"the supervisor died and processes {survivors} could not be ended: look at this host"
            write_json(attempt.exit, _lost(attempt, reason))
            found = True
        return found

    def _send(self) -> None:
        if self._began is None:
            self._began = self._redis.time()[0]
        self._sequence += 1
        event = HostEvent(
            kind="host",
            v=VERSION,
            host=self._settings.name,
            boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            incarnation=self._incarnation,
            began=self._began,
            sequence=self._sequence,
            time=time.time(),
            slots=self._settings.slots,
            device=self._settings.device,
            device_name=self._device_name,
            memory_bytes=self._memory_bytes,
            attempts=[attempt.report() for attempt in attempts(self._settings.run_dir)],
        )
        self._redis.xadd(EVENTS_STREAM, {"b": msgpack.packb(event)}, maxlen=100_000, approximate=True)


def _had_time(attempt: AttemptDir) -> bool:
    """False while a supervisor may still be on its way to writing its pid."""
    return attempt.supervisor.exists() or time.time() - attempt.order.stat().st_mtime > START_GRACE_S


def _lost(attempt: AttemptDir, reason: str) -> ExitReport:
    return ExitReport(
        v=VERSION,
        job=attempt.job,
        attempt=attempt.attempt,
        outcome="lost",
        reason=reason,
        exit_code=None,
        rank=None,
        signal=None,
        log_tail=[],
        started=attempt.order.stat().st_mtime,
        finished=time.time(),
        summary=None,
    )


def _device(settings: HostSettings) -> tuple[str, int]:
    """Name of the device, and memory bytes per slot."""
    if settings.device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
        listed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
        name, _, mebibytes = listed[0].rpartition(",")
        return name.strip(), int(mebibytes) * 2**20
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{platform.machine()} CPU, {os.cpu_count()} cores", total // settings.slots


def live_supervisors(run_dir: Path) -> list[tuple[AttemptDir, int]]:
    """Attempts whose supervisor runs, with its pid."""
    return [(a, read_json(a.supervisor)["pid"]) for a in attempts(run_dir) if a.supervisor_alive()]
