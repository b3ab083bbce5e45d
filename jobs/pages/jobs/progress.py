"""Count the steps of runs, from the database after the end and from telemetry before."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from redis.exceptions import RedisError

from contracts.names import telemetry_stream
from jobs.connection import connect
from jobs.models import ON_A_HOST, TERMINAL, Attempt, Job
from jobs.newest import newest_steps, step_of

log = logging.getLogger(__name__)

WINDOW_S = 120  # seconds, older steps do not count
FRESH_S = 2.0

Key = tuple[str, int]  # job, attempt


Told = TypeVar("Told")


class OfRunning(Generic[Told]):
    """A figure of running jobs. A process reads it from Redis at most once per FRESH_S."""

    def __init__(self, read: Callable[[list[Key]], dict[Key, Told | None]]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._told: dict[Key, tuple[float, Told | None]] = {}

    def of(self, keys: list[Key]) -> dict[Key, Told]:
        """Return the known figures. A run without recent telemetry is left out."""
        with self._lock:  # other threads wait and find the answer
            now = time.monotonic()
            self._told = {key: told for key, told in self._told.items() if now - told[0] < FRESH_S}
            if missing := [key for key in keys if key not in self._told]:
                self._told |= {key: (now, told) for key, told in self._read(missing).items()}
            found = {key: self._told[key][1] for key in keys}
        return {key: told for key, told in found.items() if told is not None}


class RunningSteps(OfRunning[int]):
    """The steps of running jobs."""

    def __init__(self) -> None:
        super().__init__(_read)


def _read(keys: list[Key]) -> dict[Key, int | None]:
    try:
        with connect() as client:
            told = newest_steps(client, {telemetry_stream(*key): 1 for key in keys}, WINDOW_S)
    except (RedisError, OSError) as error:
        log.warning("the list goes without progress: %s", error)
        return dict.fromkeys(keys)
    steps = {key: max(map(step_of, told[telemetry_stream(*key)]), default=-1) for key in keys}
    return {key: step if step >= 0 else None for key, step in steps.items()}


_running = RunningSteps()


def steps_of(jobs: list[Job]) -> dict[str, int]:
    """Return the steps by job, for jobs with known steps."""
    running = [(job.id, job.attempt) for job in jobs if job.status in ON_A_HOST]
    live = _running.of(running) if running else {}
    return {**_ended(jobs), **{job: step for (job, _), step in live.items()}}


def _ended(jobs: list[Job]) -> dict[str, int]:
    current = {(job.id, job.attempt) for job in jobs if job.status in TERMINAL}
    found = Attempt.objects.filter(job__in=[job for job, _ in current]).values_list(
        "job_id", "number", "exit__summary__steps"
    )
    return {job: steps for job, number, steps in found if (job, number) in current and steps is not None}
