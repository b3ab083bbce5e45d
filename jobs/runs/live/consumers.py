"""The websocket of a job page: replay, live telemetry, and the job's state."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections import Counter
from collections.abc import Coroutine, Mapping
from typing import Any
from urllib.parse import parse_qs

import msgpack
from channels.generic.websocket import AsyncWebsocketConsumer

from jobs.core.job_details import JobDetail
from jobs.core.text import whole_number
from jobs.queue.lifecycle import group_name
from jobs.runs.live.looks import Wish, looks
from jobs.runs.live.room import START, Viewer, rooms

log = logging.getLogger(__name__)

ENTRY_ID = re.compile(r"([0-9]{1,20})-([0-9]{1,20})")
LARGEST_ID = 2**64 - 1  # of either half; Redis refuses more
MOST_ATTEMPTS = 2**31 - 1
LOOK_S = 5.0
TRY_AGAIN = 1013
FORBIDDEN = 4403
# Open at once in a process; more are closed, to try again: of its connections (webapp/serving/limits.py) pages have
# the rest.
MOST_SOCKETS = 1500
MOST_OF_SESSION = 300
BAD_REQUEST = 4400


_open: Counter[str] = Counter()  # sockets of this process, by session


async def no_such_socket(_scope: Any, _receive: Any, send: Any) -> None:
    """Any other address: refused before it opens."""
    await send({"type": "websocket.close"})


class JobConsumer(AsyncWebsocketConsumer):
    """Binary msgpack frames of at most 1 MB to the browser, each a message or a list of them; nothing is read from it.

    A large frame is {"deflated": zlib's of such a frame}.
    {"node", "entries": [[id, batch msgpack], ...]}, {"node", "gap": {"after", "first"}} where history was trimmed or
    does not fit a frame, {"node", "stale"}: true while Redis is away, false once it answers again, {"job": job detail}
    at connect and whenever it changed, {"beat": true} where it did not: a page that hears nothing for long has lost its
    line.
    Each member of a gang has a stream of its own, and `after` a position in each.
    """

    async def connect(self) -> None:
        self.job_id = self.scope["url_route"]["kwargs"]["job_id"]
        self._watching: asyncio.Task[None] | None = None
        self._viewer: Viewer | None = None
        self._following: asyncio.Task[None] | None = None
        self._look_now, self._changed_s = asyncio.Event(), 0.0
        self._session: str | None = None  # under which it counts
        session = self.scope["session"].session_key or ""
        query = parse_qs(self.scope["query_string"].decode("latin-1"))
        after = positions(query.get("after", [START])[0])
        await self.accept()
        if after is None:
            await self.close(BAD_REQUEST)
            return
        if _open.total() >= MOST_SOCKETS or _open[session] >= MOST_OF_SESSION:
            await self.close(TRY_AGAIN)
            return
        self._session = session
        _open[session] += 1
        attempt = whole_number(query.get("attempt", [""])[0], 1, MOST_ATTEMPTS)
        self._watching = asyncio.create_task(self._or_close(self._watch_job(after, attempt)))

    async def disconnect(self, code: int) -> None:
        if self._watching is not None:
            self._watching.cancel()
        self._unfollow()
        if self._session is not None:
            _open[self._session] -= 1
            if not _open[self._session]:
                del _open[self._session]
        with contextlib.suppress(Exception):
            await self.channel_layer.group_discard(group_name(self.job_id), self.channel_name)

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        """No page of ours sends anything."""
        await self.close(BAD_REQUEST)

    async def job_changed(self, _message: dict[str, Any]) -> None:
        """Channel layer event from `jobs.queue.lifecycle`."""
        self._changed_s = time.monotonic()
        self._look_now.set()

    async def _or_close(self, work: Coroutine[Any, Any, None]) -> None:
        """A socket whose work ended in an error is closed, so that the browser connects again."""
        try:
            await work
        except Exception as error:
            log.warning("Closing a WebSocket of job %s after an error: %s", self.job_id, error)
            with contextlib.suppress(Exception):  # the browser may be gone, which may have been the error
                await self.close(TRY_AGAIN)

    async def _watch_job(self, after: dict[int, str], after_attempt: int | None) -> None:
        """Send the job when it changed; follow the streams of its current attempt; end when the right to see ends."""
        shown: JobDetail | None = None
        followed = 0
        while True:
            job = await self._visible_job()
            if job is None:
                await self.close(FORBIDDEN)
                return
            if shown is None:
                with contextlib.suppress(Exception):  # without the channel layer, looking every LOOK_S still works
                    await self.channel_layer.group_add(group_name(self.job_id), self.channel_name)
                self._changed_s = time.monotonic()  # it may have changed before we were told of changes
                self._look_now.set()
            await self._send({"job": job} if job != shown else {"beat": True})
            shown = job
            if job["attempt"] != followed:
                self._unfollow()
                if followed or after_attempt not in (None, job["attempt"]):
                    after = {}
                followed = job["attempt"]
                self._viewer = Viewer(rooms().of(self.job_id, followed), after)
                self._following = asyncio.create_task(self._or_close(self._follow(self._viewer)))
            assert self._viewer
            self._viewer.follow(max(1, len(job["members"])))
            with contextlib.suppress(TimeoutError):
                # At the same times as all other sockets.
                async with asyncio.timeout(LOOK_S - time.monotonic() % LOOK_S):
                    await self._look_now.wait()
            self._look_now.clear()

    def _unfollow(self) -> None:
        if self._following is not None:
            self._following.cancel()
        if self._viewer is not None:
            self._viewer.leave()
        self._following = self._viewer = None

    async def _follow(self, viewer: Viewer) -> None:
        async for packed in viewer.frames():
            await self.send(bytes_data=packed)

    async def _send(self, message: Mapping[str, JobDetail | bool]) -> None:
        await self.send(bytes_data=msgpack.packb(message))

    async def _visible_job(self) -> JobDetail | None:
        """The job as JSON if this session's user may see it now."""
        session = self.scope["session"].session_key
        return await looks().at(Wish(session, self.job_id), self._changed_s) if session else None


def positions(text: str) -> dict[int, str] | None:
    """Where a browser was in each node's stream: "7-0" of node 0, or "0:7-0,2:9-1". None for what is neither."""
    if _is_entry_id(text):
        return {0: text}
    found: dict[int, str] = {}
    for part in text.split(","):
        node, _, entry = part.partition(":")
        if not (node.isascii() and node.isdigit() and len(node) < 6 and _is_entry_id(entry)):
            return None
        found[int(node)] = entry
    return found


def _is_entry_id(text: str) -> bool:
    found = ENTRY_ID.fullmatch(text)
    return found is not None and all(int(half) <= LARGEST_ID for half in found.groups())
