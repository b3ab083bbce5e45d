"""Reads telemetry streams for sockets: one reader task a process, however many sockets watch.

A `Watch` first replays what the stream holds, then gets what the reader sees. If its bounded queue overflows it reads
on from Redis itself, so a slow browser costs memory for QUEUE_ENTRIES and loses nothing the stream still has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import redis.asyncio
from django.conf import settings
from redis.exceptions import RedisError

from contracts.names import TELEMETRY_MAXLEN

log = logging.getLogger(__name__)

CHUNK = 200
QUEUE_ENTRIES = 400
BLOCK_MS = 1000
RETRY_S = 1.0


class Entry(NamedTuple):
    """One stream entry: its id, and the msgpack of its Batch."""

    id: str
    batch: bytes


class Hub:
    """The one reader of a process, and who waits for what."""

    def __init__(self) -> None:
        self._watches: dict[str, set[Watch]] = {}
        self._positions: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None
        self.redis = redis.asyncio.Redis.from_url(
            settings.REDIS_URL, socket_timeout=BLOCK_MS / 1000 + 5, socket_connect_timeout=2
        )

    def add(self, watch: Watch) -> None:
        if watch.stream not in self._watches:
            self._positions[watch.stream] = "$"
        self._watches.setdefault(watch.stream, set()).add(watch)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._read_forever())

    def remove(self, watch: Watch) -> None:
        watching = self._watches.get(watch.stream, set())
        watching.discard(watch)
        if not watching:
            self._watches.pop(watch.stream, None)
            self._positions.pop(watch.stream, None)

    async def _read_forever(self) -> None:
        while self._watches:
            try:
                await self._read()
            except (RedisError, OSError) as error:
                log.warning("telemetry streams cannot be read: %s", error)
                for watch in self._everyone():
                    watch.fall_behind()
                await asyncio.sleep(RETRY_S)

    async def _read(self) -> None:
        # "$" would skip what comes between two reads, so a position is fixed as soon as it is known.
        for stream, position in list(self._positions.items()):
            if position == "$":
                last: Any = await self.redis.xrevrange(stream, count=1)
                self._positions[stream] = last[0][0].decode() if last else "0-0"
                for watch in self._watches.get(stream, set()):
                    watch.fall_behind()
        positions: Any = dict(self._positions)
        found: Any = await self.redis.xread(positions, count=CHUNK, block=BLOCK_MS)
        for name, entries in found or []:
            stream = name.decode()
            if stream not in self._positions:
                continue
            self._positions[stream] = entries[-1][0].decode()
            for watch in self._watches.get(stream, set()):
                for entry_id, fields in entries:
                    watch.offer(Entry(entry_id.decode(), fields[b"b"]))

    def _everyone(self) -> list[Watch]:
        return [watch for watching in self._watches.values() for watch in watching]


class Watch:
    """One socket's view of a stream, in order, without gap or repetition but for what was trimmed."""

    def __init__(self, hub: Hub, stream: str, after: str) -> None:
        self.stream = stream
        self.position = after
        self._hub = hub
        self._queue: asyncio.Queue[Entry | None] = asyncio.Queue(QUEUE_ENTRIES)
        self._behind = True

    def offer(self, entry: Entry) -> None:
        try:
            self._queue.put_nowait(entry)
        except asyncio.QueueFull:
            self.fall_behind()

    def fall_behind(self) -> None:
        """What is queued is no longer all there is: read from Redis again."""
        self._behind = True
        with contextlib.suppress(asyncio.QueueFull):
            self._queue.put_nowait(None)

    async def entries(self) -> AsyncIterator[list[Entry]]:
        """Chunks of entries, for ever. An empty chunk says that Redis could not be reached just now."""
        self._hub.add(self)
        try:
            while True:
                if self._behind:
                    async for chunk in self._catch_up():
                        yield chunk
                    continue
                first = await self._queue.get()
                queued = [first]
                while not self._queue.empty():
                    queued.append(self._queue.get_nowait())
                fresh = [e for e in queued if e is not None and _order(e.id) > _order(self.position)]
                if fresh and not self._behind:
                    self.position = fresh[-1].id
                    yield fresh
        finally:
            self._hub.remove(self)

    async def _catch_up(self) -> AsyncIterator[list[Entry]]:
        self._behind = False
        while True:
            try:
                found: Any = await self._hub.redis.xrange(self.stream, min=f"({self.position}", count=CHUNK)
            except (RedisError, OSError):
                self._behind = True
                yield []
                await asyncio.sleep(RETRY_S)
                return
            if found:
                chunk = [Entry(entry_id.decode(), fields[b"b"]) for entry_id, fields in found]
                self.position = chunk[-1].id
                yield chunk
            if len(found) < CHUNK:
                return

    async def trimmed_before(self) -> str | None:
        """The first id the stream still has, when what lay between it and our position was trimmed away.

        Redis before 7 does not count what it trimmed: from the beginning, a full stream is taken for a trimmed one.
        """
        info: Any = await self._hub.redis.xinfo_stream(self.stream)
        if info["first-entry"] is None:
            return None
        first: str = info["first-entry"][0].decode()
        if self.position == "0-0":
            return first if info["length"] >= TELEMETRY_MAXLEN else None
        return first if _order(first) > _order(self.position) else None


def _order(entry_id: str) -> tuple[int, int]:
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence or 0)


_hubs: dict[int, Hub] = {}


def hub() -> Hub:
    """The hub of the running event loop."""
    loop = id(asyncio.get_running_loop())
    if loop not in _hubs:
        _hubs[loop] = Hub()
    return _hubs[loop]
