"""Reads telemetry streams for who watches: one reader task a process, however many they are.

A `Watch` first replays what the stream holds, then gets what the reader sees. If its bounded queue overflows it reads
on from Redis itself, so a slow browser costs memory for QUEUE_BYTES and one chunk, and loses nothing the stream still
has. Nothing is read from Redis by a count alone: entries are small or `contracts.codec.MAX_BATCH_BYTES` large.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from redis.exceptions import RedisError

from jobs.core.redis_connection import connect_async
from jobs.runs.live.per_loop import PerLoop

log = logging.getLogger(__name__)

CHUNK_BYTES = 2**20 - 2**14  # of batches in one chunk: one frame of at most 1 MB with what is written round them
CHUNK_ENTRIES = 32  # of a stream, read at once at most; at BATCH_BYTES each that is 8 MB
STREAMS_TOGETHER = 16  # asked for at once, as each is a round trip otherwise
ENTRIES_TOGETHER = 64  # of them all: 16 MB at BATCH_BYTES each
LIVE_ENTRIES = 1  # of each stream at a time: a host writes a few a second
QUEUE_BYTES = 2**20
ENTRY_BYTES = 200  # what an entry costs beside its batch
BLOCK_MS = 1000
RETRY_S = 1.0
READS_AT_ONCE = 8  # of those that catch up: each has a connection of its own, and a gang of a thousand ranks has 128


class Entry(NamedTuple):
    """One stream entry: its id, and the msgpack of its Batch."""

    id: str
    batch: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.batch) + ENTRY_BYTES


class Oversize(NamedTuple):
    """An entry too large for any frame, from `after` to `id`: told as a gap."""

    after: str
    id: str


class Redis(enum.Enum):
    """What became of it since the chunk before."""

    AWAY = "Redis could not be reached"
    BACK = "Redis answers again, but may have no new entries"


Chunk = list[Entry] | Oversize | Redis


class Listener(Protocol):
    """Who is told of a stream's entries as they come."""

    stream: str

    def offer(self, entry: Entry) -> None: ...

    def fall_behind(self) -> None:
        """What was offered is not all there is: the rest is read from Redis."""


class Hub:
    """The one reader of a process, and who listens to what."""

    def __init__(self) -> None:
        self._listeners: dict[str, set[Listener]] = {}
        self._positions: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None
        self.redis = connect_async(BLOCK_MS / 1000 + 5)
        self._reads = asyncio.Semaphore(READS_AT_ONCE)

    def add(self, listener: Listener) -> None:
        if listener.stream not in self._listeners:
            self._positions[listener.stream] = "$"
        self._listeners.setdefault(listener.stream, set()).add(listener)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._read_forever())

    def remove(self, listener: Listener) -> None:
        listening = self._listeners.get(listener.stream, set())
        listening.discard(listener)
        if not listening:
            self._listeners.pop(listener.stream, None)
            self._positions.pop(listener.stream, None)

    def hears(self, stream: str) -> bool:
        """Whether what is new of it will be told: not until the reader has come to it."""
        return self._positions.get(stream, "$") != "$"

    async def behind(self, positions: dict[str, str]) -> AsyncIterator[dict[str, list[Entry]]]:
        """All that streams hold after a position in each, a little at a time.

        Raises:
            RedisError, OSError: Redis cannot be reached.
        """
        left, wanted = dict(positions), 1
        while left:
            sizes: list[int] = []
            for streams in _together(left):
                asked = self.redis.pipeline(transaction=False)
                for stream in streams:
                    asked.xrange(stream, min=f"({left[stream]}", count=wanted)
                told = await self._ask(asked.execute())
                found = {stream: _entries(entries) for stream, entries in zip(streams, told, strict=True)}
                for stream, entries in found.items():
                    sizes += [entry.num_bytes for entry in entries]
                    if len(entries) < wanted:
                        del left[stream]
                    else:
                        left[stream] = entries[-1].id
                if some := {stream: entries for stream, entries in found.items() if entries}:
                    yield some
            if left:
                most = min(CHUNK_ENTRIES, ENTRIES_TOGETHER // min(len(left), STREAMS_TOGETHER))
                mean_bytes = sum(sizes) // len(sizes) + 1
                wanted = max(1, min(most, 2 * wanted, CHUNK_BYTES // mean_bytes))

    async def trimmed_before(self, positions: dict[str, str]) -> dict[str, str]:
        """The first id that streams still have, of those where what lay between it and a position was trimmed away."""
        found = {}
        for streams in _together(positions):
            asked = self.redis.pipeline(transaction=False)
            for stream in streams:
                asked.xinfo_stream(stream)
            for stream, info in zip(streams, await self._ask(asked.execute(raise_on_error=False)), strict=True):
                if isinstance(info, dict) and (
                    first := _trimmed_before(info, positions[stream])
                ):  # else: no stream yet
                    found[stream] = first
        return found

    async def _ask(self, question: Awaitable[Any]) -> Any:
        """What Redis answers, once few others ask: a crowd of new connections at once would time out, and Redis be
        called away."""
        async with self._reads:
            return await question

    async def _read_forever(self) -> None:
        while self._listeners:
            try:
                await self._read()
            except Exception as error:
                # Whatever it is, the sockets that wait for this one task must not stay open and blind.
                away = isinstance(error, RedisError | OSError)
                log.warning("Cannot read telemetry streams: %s", error, exc_info=None if away else error)
                for listener in self._everyone():
                    listener.fall_behind()
                await asyncio.sleep(RETRY_S)

    async def _read(self) -> None:
        # "$" would skip what comes between two reads, so a position is fixed as soon as it is known.
        for stream, position in list(self._positions.items()):
            if position == "$":
                last: Any = await self.redis.xrevrange(stream, count=1)
                self._positions[stream] = last[0][0].decode() if last else "0-0"
                for listener in self._listeners.get(stream, set()):
                    listener.fall_behind()
        positions: Any = dict(self._positions)
        found: Any = await self.redis.xread(positions, count=LIVE_ENTRIES, block=BLOCK_MS)
        for name, entries in found or []:
            stream = name.decode()
            if stream not in self._positions:
                continue
            self._positions[stream] = entries[-1][0].decode()
            for entry in _entries(entries):
                for listener in self._listeners.get(stream, set()):
                    listener.offer(entry)

    def _everyone(self) -> list[Listener]:
        return [listener for listening in self._listeners.values() for listener in listening]


class Watch:
    """One reader's view of a stream, in order, without gap or repetition but for what was trimmed."""

    def __init__(self, hub: Hub, stream: str, after: str, queue_bytes: int = QUEUE_BYTES) -> None:
        self.stream = stream
        self.position = after
        self._hub = hub
        self._queue: deque[Entry] = deque()
        self._queued_bytes, self._most_bytes = 0, queue_bytes
        self._news = asyncio.Event()
        self._behind = True
        self._away = False
        self._waiting = False

    @property
    def caught_up(self) -> bool:
        """Whether all that the stream holds was told: it is heard, and nothing of it is on its way."""
        return self._waiting and not self._news.is_set() and self._hub.hears(self.stream)

    def offer(self, entry: Entry) -> None:
        if self._queued_bytes + entry.num_bytes > self._most_bytes:
            self.fall_behind()
            return
        self._queue.append(entry)
        self._queued_bytes += entry.num_bytes
        self._news.set()

    def fall_behind(self) -> None:
        """What is queued is no longer all there is: read from Redis again."""
        self._queue.clear()
        self._queued_bytes = 0
        self._behind = True
        self._news.set()

    async def chunks(self) -> AsyncGenerator[Chunk]:
        """Entries for one frame at a time, for ever, and in between when Redis went away and came back."""
        self._hub.add(self)
        try:
            while True:
                if self._behind:
                    async for chunk in self._catch_up():
                        yield chunk
                    continue
                self._waiting = True
                await self._news.wait()
                self._waiting = False
                for chunk in self._cut(self._take()):
                    yield chunk
        finally:
            self._waiting = False
            self._hub.remove(self)

    def _take(self) -> list[Entry]:
        """What is queued and new; nothing where some of it was let go."""
        self._news.clear()
        fresh = [] if self._behind else [e for e in self._queue if order(e.id) > order(self.position)]
        self._queue.clear()
        self._queued_bytes = 0
        return fresh

    async def _catch_up(self) -> AsyncIterator[Chunk]:
        self._behind = False
        try:
            async for found in self._hub.behind({self.stream: self.position}):
                if self._away:
                    self._away = False
                    yield Redis.BACK
                for chunk in self._cut(found[self.stream]):
                    yield chunk
        except (RedisError, OSError):
            self._behind = self._away = True
            yield Redis.AWAY
            await asyncio.sleep(RETRY_S)
            return
        if self._away:  # nothing new
            self._away = False
            yield Redis.BACK

    def _cut(self, entries: list[Entry]) -> Iterator[Chunk]:
        """Parts that fit a frame each; moves the position past them."""
        part: list[Entry] = []
        part_bytes = 0
        for entry in entries:
            if part and part_bytes + entry.num_bytes > CHUNK_BYTES:
                yield part
                part, part_bytes = [], 0
            before, self.position = self.position, entry.id
            if not entry.batch:
                continue
            if entry.num_bytes > CHUNK_BYTES:
                yield Oversize(before, entry.id)
                continue
            part.append(entry)
            part_bytes += entry.num_bytes
        if part:
            yield part

    async def trimmed_before(self) -> str | None:
        """See `Hub.trimmed_before`."""
        return (await self._hub.trimmed_before({self.stream: self.position})).get(self.stream)


def _together(streams: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """So few at a time that what they hold fits."""
    whole = tuple(streams)
    for first in range(0, len(whole), STREAMS_TOGETHER):
        yield whole[first : first + STREAMS_TOGETHER]


def _trimmed_before(info: dict[str, Any], position: str) -> str | None:
    if info["first-entry"] is None:
        return None
    entry_id, fields = info["first-entry"]
    first: str = entry_id.decode()
    if position == "0-0":
        return first if fields.get(b"n", b"0") != b"0" else None
    return first if order(first) > order(position) else None


def _entries(found: Any) -> list[Entry]:
    """As Redis tells them; one without a batch is empty, so that the position still moves past it."""
    return [Entry(entry_id.decode(), fields.get(b"b", b"")) for entry_id, fields in found]


def order(entry_id: str) -> tuple[int, int]:
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence or 0)


hub = PerLoop(Hub)
