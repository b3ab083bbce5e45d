"""How jobs stand, looked at once a second for everybody in the process who waits for a change, in the database alone:
what is told needs no Redis."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from channels.db import database_sync_to_async
from django.db.models import F
from django.db.models.fields.json import KT

from jobs.models import Attempt, Job
from jobs.runs.live.held import Standing
from jobs.runs.live.per_loop import PerLoop

log = logging.getLogger(__name__)

LOOK_S = 1.0
WORDS = ("state", "sentence", "reason", "next")


class Waiting:
    """One who waits for a job to stand otherwise than `standing`, None: it is gone."""

    def __init__(self, seen: Standing | None) -> None:
        self.standing = seen
        self._news = asyncio.Event()

    def tell(self, found: Standing | None) -> None:
        if found != self.standing:
            self.standing = found
            self._news.set()

    async def changed(self, timeout_s: float | None = None) -> bool:
        """Whether it changed within that time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return True


class Changes:
    """The one who looks, of an event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[Waiting]] = {}
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def of(self, job: str, seen: Standing | None) -> Iterator[Waiting]:
        waiting = Waiting(seen)
        self._waiting.setdefault(job, set()).add(waiting)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look_on())
        try:
            yield waiting
        finally:
            self._waiting[job].discard(waiting)
            if not self._waiting[job]:
                del self._waiting[job]

    async def _look_on(self) -> None:
        while self._waiting:
            try:
                found = await database_sync_to_async(standings)(list(self._waiting))
            except Exception as error:
                # Whatever it is, those who wait for this one task must not wait for ever: it looks again.
                log.warning("Cannot read job states: %s", error)
            else:
                for job, waiting in self._waiting.items():
                    for one in waiting:
                        one.tell(found.get(job))
            await asyncio.sleep(LOOK_S)


def standings(jobs: Iterable[str]) -> dict[str, Standing]:
    """Of those of the jobs that there are."""
    verdicts = {
        job: dict(zip(WORDS, told, strict=True)) if told[0] is not None else None
        for job, *told in Attempt.objects.filter(job_id__in=jobs, number=F("job__attempt")).values_list(
            "job_id", *(KT(f"diagnosis__{name}") for name in WORDS)
        )
    }
    rows = Job.objects.filter(id__in=jobs).values_list("id", "status", "attempt")
    return {job: Standing(status, attempt, verdicts.get(job)) for job, status, attempt in rows}


changes = PerLoop(Changes)
