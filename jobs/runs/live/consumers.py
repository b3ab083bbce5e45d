"""Serve the WebSocket of a job page: stored telemetry, live telemetry, and the job's state.

All sockets that ask for jobs at about the same time share one query.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import msgpack
from channels.db import database_sync_to_async
from channels.generic.websocket import AsyncWebsocketConsumer
from channels_redis.core import RedisChannelLayer
from django.contrib.auth import get_user
from django.contrib.sessions.backends.db import SessionStore

from jobs.core.access import get_visible_jobs
from jobs.core.job_details import JobDetail, serialize_job
from jobs.core.redis_client import end_on_cancellation
from jobs.core.text import is_storable, parse_whole_number
from jobs.models import Job
from jobs.queue.lifecycle import get_channel_group
from jobs.runs.live.broadcast import Subscriber, get_broadcasts
from jobs.runs.live.held_requests import parse_stream_positions
from jobs.runs.live.telemetry_reader import STREAM_START, PerLoop

log = logging.getLogger(__name__)

MAX_ATTEMPT = 2**31 - 1
POLL_S = 5.0
# A process closes further sockets with TRY_AGAIN. Pages use its other connections (webapp/serving/limits.py).
MAX_SOCKETS = 1500
MAX_SOCKETS_PER_SESSION = 300
TRY_AGAIN, BAD_REQUEST, FORBIDDEN = 1013, 4400, 4403  # close codes

_num_open: Counter[str] = Counter()  # sockets of this process, by session


class CancellableChannelLayer(RedisChannelLayer):
    """Wait for Redis so that a cancellation is never lost."""

    def create_pool(self, index: int) -> Any:
        pool = super().create_pool(index)
        end_on_cancellation(pool)
        return pool


async def reject_socket(_scope: Any, _receive: Any, send: Any) -> None:
    """Refuse a WebSocket at an unknown address before it opens."""
    await send({"type": "websocket.close"})


class JobConsumer(AsyncWebsocketConsumer):
    """Send binary msgpack frames of at most 1 MB, each a message or a list of messages. The browser sends nothing.

    - {"deflated": bytes} is a large frame compressed with zlib.
    - {"job": detail} is sent at connect and after each change, {"beat": true} in place of an unchanged job.
      A page without messages for a while has lost its connection.
    - {"node", "entries": [[id, batch msgpack], ...]} has telemetry.
    - {"node", "gap": {"after", "first"}} reports entries that Redis trimmed or that fit no frame.
    - {"node", "stale": bool} reports that Redis cannot be reached, or that it can again.

    Each member of a gang has its own stream, and `after` in the query is a position in each.
    """

    async def connect(self) -> None:
        self.job_id = self.scope["url_route"]["kwargs"]["job_id"]
        self._polling: asyncio.Task[None] | None = None
        self._subscriber: Subscriber | None = None
        self._sending: asyncio.Task[None] | None = None
        self._poll_now, self._changed_at = asyncio.Event(), 0.0
        self._counted_session: str | None = None
        session = self.scope["session"].session_key or ""
        query = parse_qs(self.scope["query_string"].decode("latin-1"))
        after = parse_stream_positions(query.get("after", [STREAM_START])[0])
        await self.accept()
        if after is None:
            await self.close(BAD_REQUEST)
            return
        if _num_open.total() >= MAX_SOCKETS or _num_open[session] >= MAX_SOCKETS_PER_SESSION:
            await self.close(TRY_AGAIN)
            return
        self._counted_session = session
        _num_open[session] += 1
        attempt = parse_whole_number(query.get("attempt", [""])[0], 1, MAX_ATTEMPT)
        self._polling = asyncio.create_task(self._close_on_error(self._poll_job(after, attempt)))

    async def disconnect(self, code: int) -> None:
        if self._polling is not None:
            self._polling.cancel()
        self._unsubscribe()
        if self._counted_session is not None:
            _num_open[self._counted_session] -= 1
            if not _num_open[self._counted_session]:
                del _num_open[self._counted_session]
        with contextlib.suppress(Exception):
            await self.channel_layer.group_discard(get_channel_group(self.job_id), self.channel_name)

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        """Close the socket, because pages send nothing."""
        await self.close(BAD_REQUEST)

    async def job_changed(self, _message: dict[str, Any]) -> None:
        """Handle the event that `jobs.queue.lifecycle` sends to the group of the job."""
        self._changed_at = time.monotonic()
        self._poll_now.set()

    async def _close_on_error(self, work: Coroutine[Any, Any, None]) -> None:
        """Await work. Close the socket after an error, so that the browser connects again."""
        try:
            await work
        except Exception as error:
            log.warning("Closing a WebSocket of job %s after an error: %s", self.job_id, error)
            with contextlib.suppress(Exception):  # a browser that disconnected may have caused the error
                await self.close(TRY_AGAIN)

    async def _poll_job(self, after: dict[int, str], after_attempt: int | None) -> None:
        """Send the job after each change and follow its current attempt, until the user may no longer see the job."""
        sent: JobDetail | None = None
        followed_attempt = 0
        while True:
            job = await self._load_job()
            if job is None:
                await self.close(FORBIDDEN)
                return
            if sent is None:
                with contextlib.suppress(Exception):  # without the channel layer, polling every POLL_S still works
                    await self.channel_layer.group_add(get_channel_group(self.job_id), self.channel_name)
                self._changed_at = time.monotonic()  # a change before group_add sent no event
                self._poll_now.set()
            await self._send({"job": job} if job != sent else {"beat": True})
            sent = job
            if job["attempt"] != followed_attempt:
                self._unsubscribe()
                if followed_attempt or after_attempt not in (None, job["attempt"]):
                    after = {}
                followed_attempt = job["attempt"]
                self._subscriber = Subscriber(get_broadcasts().get(self.job_id, followed_attempt), after)
                self._sending = asyncio.create_task(self._close_on_error(self._send_frames(self._subscriber)))
            assert self._subscriber
            self._subscriber.follow(range(max(1, len(job["members"]))))
            with contextlib.suppress(TimeoutError):
                # All sockets poll at the same moments, so that one query serves them.
                async with asyncio.timeout(POLL_S - time.monotonic() % POLL_S):
                    await self._poll_now.wait()
            self._poll_now.clear()

    def _unsubscribe(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
        if self._subscriber is not None:
            self._subscriber.leave()
        self._sending = self._subscriber = None

    async def _send_frames(self, subscriber: Subscriber) -> None:
        async for frame in subscriber.frames():
            await self.send(bytes_data=frame.packed)

    async def _send(self, message: Mapping[str, JobDetail | bool]) -> None:
        await self.send(bytes_data=msgpack.packb(message))

    async def _load_job(self) -> JobDetail | None:
        """Return the job if the user of this session may see it now."""
        session = self.scope["session"].session_key
        if not session:
            return None
        return await get_snapshot_loader().load(SnapshotRequest(session, self.job_id), self._changed_at)


COLLECT_S = 0.01  # for which requests are collected into one query
MAX_AGE_S = 1.0  # of a detail that several sockets share
MAX_CACHED_DETAILS = 256


class SnapshotRequest(NamedTuple):
    """Ask for a job on behalf of the user of a session."""

    session: str
    job: str


SnapshotResult = JobDetail | Exception | None


class SnapshotLoader:
    """Batch the requests of an event loop."""

    def __init__(self) -> None:
        self._requests: dict[SnapshotRequest, float] = {}
        self._results: asyncio.Task[dict[SnapshotRequest, SnapshotResult]] | None = None

    async def load(self, request: SnapshotRequest, not_before: float) -> JobDetail | None:
        """Return a job as read after `not_before`, or None if it does not exist or the user may not see it.

        Raise the error of the database. `not_before`: monotonic seconds.
        """
        if self._results is None:
            self._results = asyncio.create_task(self._load_collected())
        self._requests[request] = max(not_before, self._requests.get(request, not_before))
        result = (await asyncio.shield(self._results))[request]
        if isinstance(result, Exception):
            raise result
        return result

    async def _load_collected(self) -> dict[SnapshotRequest, SnapshotResult]:
        await asyncio.sleep(COLLECT_S)
        requests, self._requests, self._results = self._requests, {}, None
        try:
            results: dict[SnapshotRequest, SnapshotResult] = await database_sync_to_async(load_snapshots)(requests)
        except Exception as error:
            results = dict.fromkeys(requests, error)
        return results


def load_snapshots(requests: dict[SnapshotRequest, float]) -> dict[SnapshotRequest, SnapshotResult]:
    """Load jobs and check access, with each session read once. An error in one job is its result."""
    read_at, results = time.monotonic(), dict[SnapshotRequest, SnapshotResult]()
    for session in {request.session for request in requests}:
        of_session = [request for request in requests if request.session == session]
        ids = [request.job for request in of_session if is_storable(request.job)]
        jobs = {job.id: job for job in get_visible_jobs(_get_user(session)).filter(id__in=ids)}
        for request in of_session:
            job = jobs.get(request.job)
            try:
                not_before = max(requests[request], read_at - MAX_AGE_S)
                results[request] = None if job is None else get_shared_detail(job, read_at, not_before)
            except Exception as error:
                results[request] = error
    return results


def _get_user(session: str) -> Any:
    class SessionRequest:
        """Carry a session to `get_user`."""

    request: Any = SessionRequest()
    request.session = SessionStore(session)
    return get_user(request)


class CachedDetail:
    """Hold the newest detail of one job. `read_at`: monotonic seconds just before the job was read."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.read_at = float("-inf")
        self.detail: JobDetail | None = None


_cached_details: dict[str, CachedDetail] = {}
_cache_lock = threading.Lock()


def get_shared_detail(job: Job, read_at: float, not_before: float) -> JobDetail:
    """Return the cached detail of a job if it was read after `not_before`, or a new one.

    The detail depends on the job alone, so the caller checks who may see it. `read_at`: when `job` was read.
    """
    with _cache_lock:
        if job.id not in _cached_details and len(_cached_details) >= MAX_CACHED_DETAILS:
            _cached_details.clear()
        cached = _cached_details.setdefault(job.id, CachedDetail())
    with cached.lock:
        if cached.detail is None or cached.read_at < not_before:
            cached.read_at, cached.detail = read_at, serialize_job(job)
        return cached.detail


get_snapshot_loader = PerLoop(SnapshotLoader)
