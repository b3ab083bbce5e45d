"""Hold requests until a job changes, with one query per second for all that wait.

A view that cannot answer yet leaves a wait in the scope of its request and answers 204, which no client receives.
The layer around Django (`jobs.api.http.patient`) then waits without a thread. It calls the view again when the job
changed, regularly to check access, and a last time when the view must answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from channels.db import database_sync_to_async
from django.db.models import F
from django.db.models.fields.json import KT

from jobs.models import Attempt, Job
from jobs.runs.live.event_stream import LogSelector, Position
from jobs.runs.live.per_loop import PerLoop

log = logging.getLogger(__name__)

SCOPE_KEY = "meshboard.held"
POLL_S = 1.0
VERDICT_FIELDS = ("state", "sentence", "reason", "next")


class JobState(NamedTuple):
    """Hold the status, the attempt, and the verdict of a job."""

    status: str
    attempt: int
    verdict: dict[str, str] | None = None


class WaitForChange(NamedTuple):
    """Call the view again when the state is no longer `seen`, and after `timeout_s`."""

    job: str
    seen: JobState
    timeout_s: float


class FollowEvents(NamedTuple):
    """Send the events of a job after a position.

    Args:
        log: Send the lines of this log only.
        live_s: Send steps and traffic without logs, beginning this many seconds ago.
    """

    job: str
    seen: JobState
    after: Position
    log: LogSelector | None = None
    live_s: int | None = None


@dataclass
class HeldRequest:
    """Connect a view to the layer that holds its request.

    Args:
        is_repeated: The view was called before.
        is_last: The view must answer now.
        user: The id of the user who sent the request.
    """

    is_repeated: bool = False
    is_last: bool = False
    user: int = 0
    wait: WaitForChange | FollowEvents | None = None


def get_held_request(request: Any) -> HeldRequest | None:
    """Return None if the request cannot be held: on another server, or for another method than GET."""
    held: HeldRequest | None = getattr(request, "scope", {}).get(SCOPE_KEY)
    return held if request.method == "GET" else None


class ChangeWaiter:
    """Wait until a job leaves a state. None as a state: the job does not exist."""

    def __init__(self, seen: JobState | None) -> None:
        self.state = seen
        self._news = asyncio.Event()

    def update(self, state: JobState | None) -> None:
        if state != self.state:
            self.state = state
            self._news.set()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Return True if the state changed within the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return True


class JobWatcher:
    """Poll the database for all waiters of an event loop. Redis is not needed."""

    def __init__(self) -> None:
        self._waiters: dict[str, set[ChangeWaiter]] = {}
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def watch(self, job: str, seen: JobState | None) -> Iterator[ChangeWaiter]:
        waiter = ChangeWaiter(seen)
        self._waiters.setdefault(job, set()).add(waiter)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll())
        try:
            yield waiter
        finally:
            self._waiters[job].discard(waiter)
            if not self._waiters[job]:
                del self._waiters[job]

    async def _poll(self) -> None:
        while self._waiters:
            try:
                states = await database_sync_to_async(read_job_states)(list(self._waiters))
            except Exception as error:
                # All waiters depend on this task, so it survives every error.
                log.warning("Cannot read job states: %s", error)
            else:
                for job, waiters in self._waiters.items():
                    for waiter in waiters:
                        waiter.update(states.get(job))
            await asyncio.sleep(POLL_S)


def read_job_states(jobs: Iterable[str]) -> dict[str, JobState]:
    """Return the states of the jobs that exist."""
    verdicts = {
        job: dict(zip(VERDICT_FIELDS, values, strict=True)) if values[0] is not None else None
        for job, *values in Attempt.objects.filter(job_id__in=jobs, number=F("job__attempt")).values_list(
            "job_id", *(KT(f"diagnosis__{name}") for name in VERDICT_FIELDS)
        )
    }
    rows = Job.objects.filter(id__in=jobs).values_list("id", "status", "attempt")
    return {job: JobState(status, attempt, verdicts.get(job)) for job, status, attempt in rows}


get_job_watcher = PerLoop(JobWatcher)
