"""Read the newest step and loss of running jobs from their telemetry."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from redis.exceptions import RedisError

from contracts.names import telemetry_stream
from jobs.core.latest_steps import newest_steps, step_of
from jobs.core.redis_connection import connect
from jobs.models import ON_A_HOST, Job

log = logging.getLogger(__name__)

WINDOW_S = 120  # seconds, older steps do not count
FRESH_S = 2.0

Key = tuple[str, int]  # job, attempt
LOSS_FAULT = re.compile(r"loss is (\S+)")  # as in the item of a step whose loss is NaN or infinite


class Newest(NamedTuple):
    """The progress of a running job. `loss` is None if no rank reported a loss."""

    step: int
    loss: float | None


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


class RunningSteps(OfRunning[Newest]):
    """The newest steps of running jobs."""

    def __init__(self) -> None:
        super().__init__(_read)


def _read(keys: list[Key]) -> dict[Key, Newest | None]:
    try:
        with connect() as client:
            told = newest_steps(client, {telemetry_stream(*key): 1 for key in keys}, WINDOW_S)
    except (RedisError, OSError) as error:
        log.warning("Cannot read progress for the job list: %s", error)
        return dict.fromkeys(keys)
    return {key: newest(told[telemetry_stream(*key)]) for key in keys}


def newest(items: list[dict[str, Any]]) -> Newest | None:
    """Return the newest step of the items, and the newest loss. None if no item counts steps."""
    step = max(map(step_of, items), default=-1)
    losses = [(step_of(item), loss) for item in items if (loss := _loss(item)) is not None]
    return Newest(step, max(losses, key=lambda one: one[0])[1] if losses else None) if step >= 0 else None


def _loss(item: dict[str, Any]) -> float | None:
    """Return the loss of an item. NaN and infinite losses are words in the item."""
    if (loss := item.get("loss")) is not None:
        return float(loss)
    fault = LOSS_FAULT.match(item.get("not_finite", ""))
    return float(fault[1]) if fault and fault[1] in ("nan", "inf", "-inf") else None


_running = RunningSteps()


def newest_of(jobs: list[Job]) -> dict[str, Newest]:
    """Return the progress by job, for running jobs with recent telemetry."""
    running = [(job.id, job.attempt) for job in jobs if job.status in ON_A_HOST]
    return {job: told for (job, _), told in _running.of(running).items()} if running else {}
