"""Jobs as sockets show them, and who may still see which: asked of the database together for all sockets that wonder at
about the same time."""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

from channels.db import database_sync_to_async
from django.contrib.auth import get_user
from django.contrib.sessions.backends.db import SessionStore

from jobs.core.access import visible_jobs
from jobs.core.job_details import JobDetail
from jobs.core.text import storable
from jobs.runs.live.details import FRESH_S, shared_detail
from jobs.runs.live.per_loop import PerLoop

GATHER_S = 0.01


class Wish(NamedTuple):
    """A job, for whoever has the session."""

    session: str
    job: str


Found = JobDetail | Exception | None


class Looks:
    """The one who looks, of an event loop."""

    def __init__(self) -> None:
        self._wanted: dict[Wish, float] = {}
        self._answer: asyncio.Task[dict[Wish, Found]] | None = None

    async def at(self, wish: Wish, not_before: float) -> JobDetail | None:
        """The job as it was no earlier than then, in monotonic seconds; None for what is not there or not theirs.

        Raises what the database did.
        """
        if self._answer is None:
            self._answer = asyncio.create_task(self._look())
        self._wanted[wish] = max(not_before, self._wanted.get(wish, not_before))
        found = (await asyncio.shield(self._answer))[wish]
        if isinstance(found, Exception):
            raise found
        return found

    async def _look(self) -> dict[Wish, Found]:
        await asyncio.sleep(GATHER_S)
        wanted, self._wanted, self._answer = self._wanted, {}, None
        found: dict[Wish, Found]
        try:
            found = await database_sync_to_async(looked_up)(wanted)
        except Exception as error:
            found = dict.fromkeys(wanted, error)
        return found


def looked_up(wanted: dict[Wish, float]) -> dict[Wish, Found]:
    """Sessions are read anew each time, each once. What cannot be shown of one job is no other's trouble."""
    read, found = time.monotonic(), dict[Wish, Found]()
    for session in {wish.session for wish in wanted}:
        wishes = [wish for wish in wanted if wish.session == session]
        asked = [wish.job for wish in wishes if storable(wish.job)]
        jobs = {job.id: job for job in visible_jobs(_user_of(session)).filter(id__in=asked)}
        for wish in wishes:
            job = jobs.get(wish.job)
            try:
                not_before = max(wanted[wish], read - FRESH_S)
                found[wish] = None if job is None else shared_detail(job, read, not_before)
            except Exception as error:
                found[wish] = error
    return found


def _user_of(session: str) -> Any:
    class Request:
        """What `get_user` reads of a request."""

    request: Any = Request()
    request.session = SessionStore(session)
    return get_user(request)


looks = PerLoop(Looks)
