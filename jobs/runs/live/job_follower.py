"""Follow a job: changes of status, steps, verdicts, traffic, and log lines in order, until the job has ended.

One frame of telemetry waits for a slow client. The rest stays in its broadcast and in Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any, NamedTuple

from channels.db import database_sync_to_async
from django.db import Error

from contracts.telemetry.batches import select_items
from contracts.telemetry.items import StepItem, TrafficItem
from contracts.telemetry.metrics import MetricItem, MetricSeries, find_loss, is_loss
from jobs.models import TERMINAL, Member, StateChange
from jobs.runs.live import held_requests
from jobs.runs.live.broadcast import ClientFrame, Gap, StreamSegment, Subscriber, get_broadcasts
from jobs.runs.live.held_requests import (
    FollowEvents,
    JobState,
    Position,
    format_event,
    get_job_watcher,
    read_job_states,
    serialize_loss,
)
from jobs.runs.live.telemetry_reader import STREAM_START

log = logging.getLogger(__name__)

HEARTBEAT_S = 15.0
RETRY_S = 1.0  # after an error of the database
TRAFFIC_INTERVAL_S = 1.0
DRAIN_S = 1.0  # without news after the end of a job, because its last lines may still arrive
MAX_COUNTERS = 100_000  # of an attempt, because a script names its own process groups


class JobUpdate(NamedTuple):
    """Hold the state of a job, its new changes by id, the last change, and the number of nodes of its attempt."""

    state: JobState | None
    changes: dict[int, dict[str, Any]]
    last_change: int
    num_nodes: int


class JobFollower:
    """Write the events of a job for one client."""

    def __init__(self, request: FollowEvents) -> None:
        self._job, self._log, self._position = request.job, request.log, request.after
        self._live_s, self._traffic, self._traffic_sent = request.live_s, TrafficRates(), time.monotonic()
        self._streams = dict(request.after.streams)
        self._queue: asyncio.Queue[JobUpdate | tuple[Subscriber, ClientFrame]] = asyncio.Queue(1)
        self._tasks: list[asyncio.Task[None]] = []
        self._subscriber: Subscriber | None = None
        self._reading: asyncio.Task[None] | None = None
        self._error: BaseException | None = None  # of a background task
        self._state: JobState | None = None
        self._loss_series: MetricSeries | None = None  # of the loss of a script
        self._last_news = time.monotonic()

    async def events(self) -> AsyncGenerator[bytes]:
        polling = self._start_task(self._poll_job())
        try:
            yield held_requests.RETRY
            while True:
                try:
                    async with asyncio.timeout(self._get_timeout_s()):
                        message = await self._queue.get()
                except TimeoutError:
                    message = None
                    if self._live_s is None:
                        yield held_requests.HEARTBEAT
                if self._error is not None:
                    raise self._error  # the client reconnects instead of waiting forever
                if message is not None:
                    for event in self._apply(message) if isinstance(message, JobUpdate) else self._convert(*message):
                        yield event
                    self._last_news = time.monotonic()  # once the client has taken all of it
                if self._live_s is not None and time.monotonic() >= self._traffic_sent + TRAFFIC_INTERVAL_S:
                    self._traffic_sent = time.monotonic()
                    rates = {"attempt": self._position.attempt, "at": time.time(), "sent": self._traffic.take()}
                    yield format_event("traffic", rates, self._get_position())
                if self._is_over() and self._is_drained() and time.monotonic() > self._last_news + DRAIN_S:
                    assert self._state is not None, "the job has ended"
                    end = {"status": self._state.status, "attempt": self._state.attempt}
                    yield format_event("end", end, self._get_position())
                    return
        finally:
            self._unsubscribe()
            polling.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        def store_error(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                self._error = self._error or task.exception()

        task = asyncio.create_task(work)
        task.add_done_callback(store_error)
        self._tasks.append(task)
        return task

    def _get_timeout_s(self) -> float:
        """Return the seconds after which something is due without news."""
        if self._live_s is not None:
            return max(0.0, self._traffic_sent + TRAFFIC_INTERVAL_S - time.monotonic())
        return DRAIN_S if self._is_over() else HEARTBEAT_S

    def _is_over(self) -> bool:
        """Return True if the job, or the attempt of the followed log, has ended."""
        if self._state is None:
            return False
        is_replaced = self._log is not None and self._state.attempt > self._log.attempt
        return is_replaced or self._state.status in TERMINAL

    def _is_drained(self) -> bool:
        """Return True if no message waits here or in a stream. An unreadable stream may have more."""
        return self._queue.empty() and (self._subscriber is None or self._subscriber.is_caught_up)

    def _get_position(self) -> Position:
        return self._position._replace(streams=tuple(sorted(self._streams.items())))

    async def _poll_job(self) -> None:
        last = self._position.change
        with get_job_watcher().watch(self._job, None) as waiter:
            while True:
                try:
                    update = await database_sync_to_async(read_update)(self._job, last)
                except Error as error:
                    log.warning("Cannot read job %s: %s", self._job, error)
                    await asyncio.sleep(RETRY_S)
                    continue
                last = update.last_change
                await self._queue.put(update)
                await waiter.wait(None if update.state is None else HEARTBEAT_S)

    def _apply(self, update: JobUpdate) -> list[bytes]:
        """Follow the job's current attempt, and return the events of its state."""
        events: list[bytes] = []
        previous, self._state = self._state, update.state
        if update.state is None:
            return events
        attempt = update.state.attempt if self._log is None else self._log.attempt
        if attempt != self._position.attempt:
            self._position, self._streams = Position(self._position.change, attempt), {}
            self._traffic.reset()
            self._loss_series = None
            self._unsubscribe()
        if self._log is None:
            for number, change in update.changes.items():
                # A client that disconnects after this event receives the rest when it resumes.
                self._position = self._position._replace(change=number)
                events.append(format_event("state", change, self._get_position()))
            verdict = update.state.verdict
            if verdict is not None and (previous is None or verdict != previous.verdict):
                events.append(format_event("verdict", {"attempt": attempt, **verdict}))
        self._position = self._position._replace(change=update.last_change)
        self._subscribe(attempt, update.num_nodes)
        return events

    def _subscribe(self, attempt: int, num_nodes: int) -> None:
        start = STREAM_START if self._live_s is None else f"{int((time.time() - self._live_s) * 1000)}-0"
        if self._subscriber is None:
            self._subscriber = Subscriber(get_broadcasts().get(self._job, attempt), self._streams, start)
            self._reading = self._start_task(self._read(self._subscriber))
        self._subscriber.follow(range(num_nodes) if self._log is None else [self._log.node])

    def _unsubscribe(self) -> None:
        if self._subscriber is not None and self._reading is not None:
            self._reading.cancel()
            self._subscriber.leave()
        self._subscriber = self._reading = None

    async def _read(self, subscriber: Subscriber) -> None:
        async with contextlib.aclosing(subscriber.frames()) as frames:
            async for frame in frames:
                await self._queue.put((subscriber, frame))

    def _convert(self, subscriber: Subscriber, frame: ClientFrame) -> Iterator[bytes]:
        """Yield the events of a frame, unless it is of an attempt that is no longer followed."""
        if subscriber is not self._subscriber:
            return
        for content in frame.contents:
            if isinstance(content, StreamSegment):
                yield from self._convert_segment(content)
            elif isinstance(content, Gap):
                if content.is_oversize:
                    self._streams[content.node] = content.first
                    self._traffic.reset()
                yield format_event("gap", {"node": content.node, "after": content.after, "first": content.first})
            elif content.stale:
                yield held_requests.OUTAGE

    def _convert_segment(self, segment: StreamSegment) -> list[bytes]:
        kinds = held_requests.EVENT_KINDS if self._live_s is None else held_requests.LIVE_KINDS
        events: list[tuple[str, dict[str, Any]]] = []
        steps = []
        for entry in segment.entries:
            second = int(entry.id.partition("-")[0]) // 1000
            for item in select_items(entry.batch, kinds):
                if item["kind"] in ("step", "traffic") and self._live_s is not None:
                    self._traffic.add(item, second)
                if item["kind"] == "step":
                    steps.append(item)
                elif item["kind"] == "metric" and self._log is None:
                    events += [
                        ("loss", {"attempt": self._position.attempt, **row}) for row in self._select_losses(item)
                    ]
                elif item["kind"] == "log" and self._is_followed(item["rank"], segment.node):
                    line = held_requests.serialize_log(item, segment.node)
                    events.append(("log", {"attempt": self._position.attempt, **line}))
        if self._log is None:
            rows = held_requests.serialize_steps(steps, self._position.step)
            events += [("step", {"attempt": self._position.attempt, **row}) for row in rows]
            self._position = self._position._replace(step=max([self._position.step, *(row["step"] for row in rows)]))
        self._streams[segment.node] = segment.entries[-1].id
        # The last event alone carries a position, because only then the client has all of the segment.
        position, last = self._get_position(), len(events) - 1
        return [format_event(name, data, position if i == last else None) for i, (name, data) in enumerate(events)]

    def _select_losses(self, item: MetricItem) -> Iterator[dict[str, Any]]:
        """Yield the loss in an item, if no preferred source reported one before."""
        for name in filter(is_loss, [*item["values"], *item.get("not_finite", {})]):
            series = MetricSeries(name, item["source"], item["rank"])
            self._loss_series = find_loss(filter(None, (self._loss_series, series)))
            if series == self._loss_series:
                yield serialize_loss(item, name)

    def _is_followed(self, rank: int, node: int) -> bool:
        return self._log is None or (node, rank) == (self._log.node, self._log.rank)


def read_update(job: str, after: int) -> JobUpdate:
    """Read the state of a job and its changes after a number."""
    state = read_job_states([job]).get(job)
    rows = list(StateChange.objects.filter(job_id=job, id__gt=after))
    changes = {
        row.id: {"status": row.status, "attempt": row.attempt, "reason": row.reason, "at": row.at.isoformat()}
        for row in rows
    }
    attempt = state.attempt if state else 0
    num_nodes = Member.objects.filter(attempt__job_id=job, attempt__number=attempt).count()
    return JobUpdate(state, changes, rows[-1].id if rows else after, max(1, num_nodes))


class TrafficRates:
    """Sum the payload bytes of all ranks by second and axis.

    Counters are cumulative. The first value of a counter gives no rate and is skipped.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[int, str, str, str, int], int] = {}
        self._pending: dict[tuple[int, str], int] = {}

    def add(self, item: TrafficItem | StepItem, second: int) -> None:
        for cell in item["cells"]:
            counter = (item["rank"], cell["phase"], cell["op"], cell["axis"], cell["group_size"])
            now, before = cell["payload_bytes"], self._last.get(counter)
            if before is None and len(self._last) >= MAX_COUNTERS:
                continue
            # Step items and traffic items leave a rank on two paths, so an older value may arrive second.
            self._last[counter] = max(now, before or 0)
            if before is not None and now > before:
                key = (second, cell["axis"])
                self._pending[key] = self._pending.get(key, 0) + now - before

    def take(self) -> list[dict[str, Any]]:
        """Return the bytes that arrived after the last call, oldest first."""
        pending, self._pending = self._pending, {}
        return [{"second": second, "axis": axis, "bytes": num} for (second, axis), num in sorted(pending.items())]

    def reset(self) -> None:
        """Drop the counters, because entries were missed or another attempt begins."""
        self._last = {}
