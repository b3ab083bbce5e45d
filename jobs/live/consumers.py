"""The websocket of a job page: replay, live telemetry, and the job's state."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from typing import Any
from urllib.parse import parse_qs

import msgpack
from channels.db import database_sync_to_async
from channels.generic.websocket import AsyncWebsocketConsumer
from django.contrib.auth import get_user
from django.contrib.sessions.backends.db import SessionStore

from contracts.names import telemetry_stream
from jobs.access import visible_jobs
from jobs.live.streams import Watch, hub
from jobs.present import job_detail
from jobs.queue.lifecycle import group_name

log = logging.getLogger(__name__)

ENTRY_ID = re.compile(r"\d{1,20}-\d{1,20}")
LOOK_S = 5.0
FORBIDDEN = 4403
BAD_REQUEST = 4400


class JobConsumer(AsyncWebsocketConsumer):
    """Binary msgpack frames to the browser; nothing is read from it.

    {"entries": [[id, batch msgpack], ...]}, {"gap": {"after", "first"}} where history was trimmed, {"stale": true}
    while Redis is away, {"job": job detail} at connect and whenever it changed.
    """

    async def connect(self) -> None:
        self.job_id = self.scope["url_route"]["kwargs"]["job_id"]
        self._tasks: list[asyncio.Task[None]] = []
        self._look_now = asyncio.Event()
        query = parse_qs(self.scope["query_string"].decode("latin-1"))
        after = query.get("after", ["0-0"])[0]
        await self.accept()
        if not ENTRY_ID.fullmatch(after):
            await self.close(BAD_REQUEST)
            return
        if await self._visible_job() is None:
            await self.close(FORBIDDEN)
            return
        with contextlib.suppress(Exception):  # without the channel layer, looking every LOOK_S still works
            await self.channel_layer.group_add(group_name(self.job_id), self.channel_name)
        attempt = query.get("attempt", [""])[0]
        self._tasks.append(asyncio.create_task(self._watch_job(after, int(attempt) if attempt.isdigit() else None)))

    async def disconnect(self, code: int) -> None:
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(Exception):
            await self.channel_layer.group_discard(group_name(self.job_id), self.channel_name)

    async def job_changed(self, _message: dict[str, Any]) -> None:
        """Channel layer event from `jobs.queue.lifecycle`."""
        self._look_now.set()

    async def _watch_job(self, after: str, after_attempt: int | None) -> None:
        """Send the job when it changed; follow the stream of its current attempt; end when the right to see ends."""
        shown: dict[str, Any] | None = None
        followed: int | None = None
        while True:
            job = await self._visible_job()
            if job is None:
                await self.close(FORBIDDEN)
                return
            if job != shown:
                await self._send({"job": job})
                shown = job
            if job["attempt"] != followed:
                for task in self._tasks[1:]:
                    task.cancel()
                same = after_attempt is None or after_attempt == job["attempt"]
                start = after if followed is None and same else "0-0"
                followed = job["attempt"]
                self._tasks[1:] = [asyncio.create_task(self._follow(telemetry_stream(self.job_id, followed), start))]
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look_now.wait(), LOOK_S)
            self._look_now.clear()

    async def _follow(self, stream: str, after: str) -> None:
        watch = Watch(hub(), stream, after)
        with contextlib.suppress(Exception):  # no stream yet, or no Redis: nothing was trimmed that we know of
            first = await watch.trimmed_before()
            if first is not None:
                await self._send({"gap": {"after": after, "first": first}})
        async for chunk in watch.entries():
            if chunk:
                await self._send({"entries": [[entry.id, entry.batch] for entry in chunk]})
            else:
                await self._send({"stale": True})

    async def _send(self, message: dict[str, Any]) -> None:
        await self.send(bytes_data=msgpack.packb(message))

    @database_sync_to_async
    def _visible_job(self) -> dict[str, Any] | None:
        """The job as JSON if this session's user may see it now; the session is read anew each time."""
        session = self.scope["session"]
        if not session.session_key:
            return None

        class Request:
            """What `get_user` reads of a request."""

        request: Any = Request()
        request.session = SessionStore(session.session_key)
        user: Any = get_user(request)
        if "\x00" in self.job_id:
            return None
        job = visible_jobs(user).filter(id=self.job_id).first()
        return job_detail(job) if job else None
