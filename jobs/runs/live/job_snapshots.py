"""Load jobs for WebSockets, with one query for all sockets that ask at about the same time."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any, NamedTuple

from channels.db import database_sync_to_async
from django.contrib.auth import get_user
from django.contrib.sessions.backends.db import SessionStore

from jobs.core.access import get_visible_jobs
from jobs.core.job_details import JobDetail, serialize_job
from jobs.core.text import is_storable
from jobs.models import Job
from jobs.runs.live.per_loop import PerLoop

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

        Args:
            not_before: Monotonic seconds.

        Raises:
            Exception: The error that the database raised.
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
        results: dict[SnapshotRequest, SnapshotResult]
        try:
            results = await database_sync_to_async(load_snapshots)(requests)
        except Exception as error:
            results = dict.fromkeys(requests, error)
        return results


def load_snapshots(requests: dict[SnapshotRequest, float]) -> dict[SnapshotRequest, SnapshotResult]:
    """Load jobs and check access, with each session read once.

    An error in one job becomes the result of that job only.
    """
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

    The detail depends on the job alone, so the caller checks who may see it.

    Args:
        read_at: Monotonic seconds just before `job` was read.
        not_before: Monotonic seconds.
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
