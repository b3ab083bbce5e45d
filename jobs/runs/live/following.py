"""A job's events in order, from a position on: changes of status, steps, verdicts and log lines, until it has ended.

What waits for a reader is bounded: one chunk of each stream, and of each `Watch` what its queue holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, NamedTuple

from channels.db import database_sync_to_async
from django.db import Error

from contracts.names import telemetry_stream
from contracts.telemetry.batches import select_items
from jobs.models import TERMINAL, Member, StateChange
from jobs.runs.live import sse
from jobs.runs.live.changes import changes, standings
from jobs.runs.live.held import Follow, Position, Standing
from jobs.runs.live.sent import Sent
from jobs.runs.live.streams import QUEUE_BYTES, Chunk, Oversize, Redis, Watch, hub

log = logging.getLogger(__name__)

BEAT_S = 15.0
LOOK_AGAIN_S = 1.0  # at a job that could not be looked at
TOLD_EVERY_S = 1.0  # what a job sends, to who follows it live
QUIET_S = 1.0  # without anything new, behind the end of a job: its last lines may be on their way
MOST_SHARES = 16  # of QUEUE_BYTES, between the streams of a gang
START = "0-0"


class Turn(NamedTuple):
    """How the job stands, the changes that came by their ids, and how many streams its attempt has."""

    standing: Standing | None
    changes: dict[int, dict[str, Any]]
    last: int
    nodes: int


class Part(NamedTuple):
    """Of a node's stream; `first`: all before this entry is gone."""

    node: int
    chunk: Chunk
    after: str
    first: str | None = None


class Following:
    """What one reader is told."""

    def __init__(self, wish: Follow) -> None:
        self._job, self._log, self._at = wish.job, wish.log, wish.after
        self._live_s, self._sent, self._sent_told = wish.live_s, Sent(), time.monotonic()
        self._streams = dict(wish.after.streams)
        self._queue: asyncio.Queue[Turn | Part] = asyncio.Queue(1)
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by node
        self._watches: list[Watch] = []
        self._error: BaseException | None = None  # of a task of ours
        self._standing: Standing | None = None
        self._last_news = time.monotonic()

    async def events(self) -> AsyncGenerator[bytes]:
        watching = self._begun(self._watch_job())
        yield sse.RETRY
        try:
            while True:
                try:
                    async with asyncio.timeout(self._patience_s()):
                        message = await self._queue.get()
                except TimeoutError:
                    message = None
                    if self._live_s is None:
                        yield sse.BEAT
                if self._error is not None:
                    raise self._error  # the reader comes again, where it would have waited for ever
                if isinstance(message, Turn):
                    for part in self._turn(message):
                        yield part
                elif isinstance(message, Part):
                    for part in self._part(message):
                        yield part
                if message is not None:
                    self._last_news = time.monotonic()  # once the reader has taken all of it, however slowly
                if self._live_s is not None and time.monotonic() >= self._sent_told + TOLD_EVERY_S:
                    self._sent_told = time.monotonic()
                    told = {"attempt": self._at.attempt, "at": time.time(), "sent": self._sent.take()}
                    yield sse.event("traffic", told, self._position())
                if self._is_over() and self._has_told_all() and time.monotonic() > self._last_news + QUIET_S:
                    assert self._standing is not None, "it has ended"
                    status, attempt, _ = self._standing
                    yield sse.event("end", {"status": status, "attempt": attempt}, self._position())
                    return
        finally:
            for task in (watching, *self._tasks.values()):
                task.cancel()
            await asyncio.gather(watching, *self._tasks.values(), return_exceptions=True)

    def _begun(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        def over(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                self._error = self._error or task.exception()

        task = asyncio.create_task(work)
        task.add_done_callback(over)
        return task

    def _patience_s(self) -> float:
        """For which nothing need be told."""
        if self._live_s is not None:
            return max(0.0, self._sent_told + TOLD_EVERY_S - time.monotonic())
        return QUIET_S if self._is_over() else BEAT_S

    def _is_over(self) -> bool:
        """Nothing but what is on its way comes any more."""
        if self._standing is None:
            return False
        replaced = self._log is not None and self._standing.attempt > self._log.attempt
        return replaced or self._standing.status in TERMINAL

    def _has_told_all(self) -> bool:
        """Nothing waits for the reader, here or in a stream: one that cannot be read just now may hold more."""
        return self._queue.empty() and all(watch.caught_up for watch in self._watches)

    def _position(self) -> Position:
        return self._at._replace(streams=tuple(sorted(self._streams.items())))

    def _turn(self, turn: Turn) -> list[bytes]:
        told: list[bytes] = []
        before, self._standing = self._standing, turn.standing
        if turn.standing is None:
            return told
        attempt = turn.standing.attempt if self._log is None else self._log.attempt
        if attempt != self._at.attempt:
            self._at, self._streams = Position(self._at.change, attempt), {}
            self._sent.forget()
            self._unfollow()
        if self._log is None:
            for number, change in turn.changes.items():
                self._at = self._at._replace(change=number)  # who is cut off behind it is told the rest
                told.append(sse.event("state", change, self._position()))
            verdict = turn.standing.verdict
            if verdict is not None and (before is None or verdict != before.verdict):
                told.append(sse.event("verdict", {"attempt": attempt, **verdict}))
        self._at = self._at._replace(change=turn.last)
        self._follow(attempt, turn.nodes)
        return told

    def _part(self, part: Part) -> list[bytes]:
        if part.first is not None:
            return [sse.event("gap", {"node": part.node, "after": part.after, "first": part.first})]
        if isinstance(part.chunk, Oversize):
            self._streams[part.node] = part.chunk.id
            self._sent.forget()
            return [sse.event("gap", {"node": part.node, "after": part.chunk.after, "first": part.chunk.id})]
        if isinstance(part.chunk, Redis):
            return [sse.AWAY] if part.chunk is Redis.AWAY else []
        told: list[tuple[str, dict[str, Any]]] = []
        steps = []
        for entry in part.chunk:
            second = int(entry.id.partition("-")[0]) // 1000
            for item in select_items(entry.batch, sse.EVENTS if self._live_s is None else sse.LIVE):
                if item["kind"] != "log" and self._live_s is not None:
                    self._sent.add(item, second)
                if item["kind"] == "step":
                    steps.append(item)
                elif item["kind"] == "log" and sse.is_of(item, part.node, self._log):
                    told.append(("log", {"attempt": self._at.attempt, **sse.of_log(item, part.node)}))
        if self._log is None:
            found = sse.of_steps(steps, self._at.step)
            told += [("step", {"attempt": self._at.attempt, **step}) for step in found]
            self._at = self._at._replace(step=max([self._at.step, *(step["step"] for step in found)]))
        self._streams[part.node] = part.chunk[-1].id
        last = len(told) - 1  # only behind it has all of the chunk been told
        return [sse.event(n, data, self._position() if at == last else None) for at, (n, data) in enumerate(told)]

    async def _watch_job(self) -> None:
        last = self._at.change
        with changes().of(self._job, None) as waiting:
            while True:
                try:
                    turn = await database_sync_to_async(_turn)(self._job, last)
                except Error as error:
                    log.warning("Cannot read job %s: %s", self._job, error)
                    await asyncio.sleep(LOOK_AGAIN_S)
                    continue
                last = turn.last
                await self._queue.put(turn)
                await waiting.changed(None if turn.standing is None else BEAT_S)

    def _follow(self, attempt: int, nodes: int) -> None:
        """Each stream that is not followed yet: before a job is placed, nobody knows how many there are."""
        wanted = range(nodes) if self._log is None else [self._log.node]
        for node in wanted:
            if node not in self._tasks:
                stream = telemetry_stream(self._job, attempt, node)
                share = QUEUE_BYTES // min(max(nodes, 1), MOST_SHARES)
                watch = Watch(hub(), stream, self._streams.get(node, self._start()), share)
                self._watches.append(watch)
                self._tasks[node] = self._begun(self._read(node, watch))

    def _start(self) -> str:
        """Of a stream that is followed from no known place on."""
        return START if self._live_s is None else f"{int((time.time() - self._live_s) * 1000)}-0"

    def _unfollow(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        self._tasks, self._watches = {}, []

    async def _read(self, node: int, watch: Watch) -> None:
        after = watch.position
        try:
            first = await watch.trimmed_before() if self._live_s is None else None
        except Exception:  # no stream yet, or no Redis: nothing was trimmed that we know of
            first = None
        if first is not None:
            await self._queue.put(Part(node, [], after, first))
        async with contextlib.aclosing(watch.chunks()) as chunks:
            async for chunk in chunks:
                await self._queue.put(Part(node, chunk, after))


def _turn(job: str, after: int) -> Turn:
    """Of the job now, with its changes after one."""
    standing = standings([job]).get(job)
    rows = list(StateChange.objects.filter(job_id=job, id__gt=after))
    told = {c.id: {"status": c.status, "attempt": c.attempt, "reason": c.reason, "at": c.at.isoformat()} for c in rows}
    number = standing.attempt if standing else 0
    nodes = Member.objects.filter(attempt__job_id=job, attempt__number=number).count()
    return Turn(standing, told, rows[-1].id if rows else after, max(1, nodes))
