"""Read the telemetry streams of Redis: one reader task per process for all subscribers.

Stream entries are small or up to `contracts.codec.MAX_BATCH_BYTES` large, so reads are bounded by bytes and by count.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

from redis.exceptions import RedisError

from jobs.core.redis_client import connect_async

log = logging.getLogger(__name__)

STREAM_START = "0-0"
STREAM_END = "$"
MAX_FRAME_BYTES = 2**20 - 2**14  # of batches: with its envelope, a frame has at most 1 MB
MAX_ENTRIES_PER_STREAM = 32  # in one read: 8 MB of entries of MAX_BATCH_BYTES
STREAMS_PER_READ = 16  # in one pipeline, because each stream costs a round trip otherwise
MAX_ENTRIES_PER_READ = 64  # of all streams: 16 MB of entries of MAX_BATCH_BYTES
LIVE_ENTRIES_PER_STREAM = 1  # a host writes a few entries per second
ENTRY_OVERHEAD_BYTES = 200
BLOCK_MS = 1000
RETRY_S = 1.0
# Each concurrent read needs its own connection, and a gang of 1,000 ranks has 128 streams.
MAX_CONCURRENT_READS = 8


T = TypeVar("T")


class PerLoop(Generic[T]):
    """Share one object per event loop. `create` makes it at the first call."""

    def __init__(self, create: Callable[[], T]) -> None:
        self._create = create
        # Keyed by the loop, because a new loop may reuse the id() of a collected one.
        self._objects = WeakKeyDictionary[asyncio.AbstractEventLoop, T]()

    def __call__(self) -> T:
        loop = asyncio.get_running_loop()
        if loop not in self._objects:
            self._objects[loop] = self._create()
        return self._objects[loop]


class StreamEntry(NamedTuple):
    """Hold an entry id and the msgpack of its Batch, which is empty for an entry without a batch."""

    id: str
    batch: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.batch) + ENTRY_OVERHEAD_BYTES

    @property
    def is_oversize(self) -> bool:
        """Return True if the entry fits no frame. Clients receive a gap instead."""
        return self.num_bytes > MAX_FRAME_BYTES


class StreamListener(Protocol):
    """Receive the new entries of streams."""

    def offer(self, stream: str, entry: StreamEntry) -> None: ...

    def fall_behind(self, stream: str) -> None:
        """Note that offered entries are incomplete. Redis has the rest."""


class TelemetryReader:
    """Read the streams that have listeners."""

    def __init__(self) -> None:
        self._listeners: dict[str, set[StreamListener]] = {}
        self._positions: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None
        self.redis = connect_async(BLOCK_MS / 1000 + 5)
        self._reads = asyncio.Semaphore(MAX_CONCURRENT_READS)

    def add(self, stream: str, listener: StreamListener) -> None:
        self._positions.setdefault(stream, STREAM_END)
        self._listeners.setdefault(stream, set()).add(listener)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._read_forever())

    def remove(self, stream: str, listener: StreamListener) -> None:
        listeners = self._listeners.get(stream, set())
        listeners.discard(listener)
        if not listeners:
            self._listeners.pop(stream, None)
            self._positions.pop(stream, None)

    def is_reading(self, stream: str) -> bool:
        """Return True once listeners receive every new entry of a stream."""
        return self._positions.get(stream, STREAM_END) != STREAM_END

    async def read_after(self, positions: dict[str, str]) -> AsyncIterator[dict[str, list[StreamEntry]]]:
        """Yield all stored entries after a position in each stream, a bounded number at a time. Raise RedisError."""
        unread, count = dict(positions), 1
        while unread:
            sizes: list[int] = []
            for streams in _batched(unread):
                request = self.redis.pipeline(transaction=False)
                for stream in streams:
                    request.xrange(stream, min=f"({unread[stream]}", count=count)
                replies = await self._limit(request.execute())
                entries_by_stream = {stream: _decode(reply) for stream, reply in zip(streams, replies, strict=True)}
                for stream, entries in entries_by_stream.items():
                    sizes += [entry.num_bytes for entry in entries]
                    if len(entries) < count:
                        del unread[stream]
                    else:
                        unread[stream] = entries[-1].id
                if found := {stream: entries for stream, entries in entries_by_stream.items() if entries}:
                    yield found
            if unread:
                max_count = min(MAX_ENTRIES_PER_STREAM, MAX_ENTRIES_PER_READ // min(len(unread), STREAMS_PER_READ))
                mean_bytes = sum(sizes) // len(sizes) + 1
                count = max(1, min(max_count, 2 * count, MAX_FRAME_BYTES // mean_bytes))

    async def find_trimmed(self, positions: dict[str, str]) -> dict[str, str]:
        """Return the first stored id of each stream that lost entries after the position."""
        trimmed = {}
        for streams in _batched(positions):
            request = self.redis.pipeline(transaction=False)
            for stream in streams:
                request.xinfo_stream(stream)
            replies = await self._limit(request.execute(raise_on_error=False))
            for stream, info in zip(streams, replies, strict=True):
                if not isinstance(info, dict):  # the stream does not exist yet
                    continue
                if first := _get_first_after_trim(info, positions[stream]):
                    trimmed[stream] = first
        return trimmed

    async def _limit(self, request: Awaitable[Any]) -> Any:
        """Await a request while few others run.

        Many new connections at once would time out, and Redis would be reported as unreachable.
        """
        async with self._reads:
            return await request

    async def _read_forever(self) -> None:
        while self._listeners:
            try:
                await self._read()
            except Exception as error:
                # All sockets wait for this task, so it survives every error.
                is_outage = isinstance(error, RedisError | OSError)
                log.warning("Cannot read telemetry streams: %s", error, exc_info=None if is_outage else error)
                for stream, listeners in list(self._listeners.items()):
                    for listener in list(listeners):
                        listener.fall_behind(stream)
                await asyncio.sleep(RETRY_S)

    async def _read(self) -> None:
        # "$" would skip entries that arrive between two reads, so the position becomes an id first.
        for stream, position in list(self._positions.items()):
            if position == STREAM_END:
                newest: Any = await self.redis.xrevrange(stream, count=1)
                self._positions[stream] = newest[0][0].decode() if newest else STREAM_START
                for listener in self._listeners.get(stream, set()):
                    listener.fall_behind(stream)
        positions: Any = dict(self._positions)
        found: Any = await self.redis.xread(positions, count=LIVE_ENTRIES_PER_STREAM, block=BLOCK_MS)
        for name, entries in found or []:
            stream = name.decode()
            if stream not in self._positions:
                continue
            self._positions[stream] = entries[-1][0].decode()
            for entry in _decode(entries):
                for listener in self._listeners.get(stream, set()):
                    listener.offer(stream, entry)


def parse_entry_id(entry_id: str) -> tuple[int, int]:
    """Return milliseconds and sequence number, which order the entries of a stream."""
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence or 0)


def _batched(streams: Iterable[str]) -> Iterator[tuple[str, ...]]:
    names = tuple(streams)
    for first in range(0, len(names), STREAMS_PER_READ):
        yield names[first : first + STREAMS_PER_READ]


def _get_first_after_trim(info: dict[str, Any], position: str) -> str | None:
    if info["first-entry"] is None:
        return None
    entry_id, fields = info["first-entry"]
    first: str = entry_id.decode()
    is_trimmed = parse_entry_id(first) > parse_entry_id(position)
    if position == STREAM_START:
        is_trimmed = fields.get(b"n", b"0") != b"0"
    return first if is_trimmed else None


def _decode(entries: Any) -> list[StreamEntry]:
    """Convert entries of Redis. An entry without a batch still moves the position."""
    return [StreamEntry(entry_id.decode(), fields.get(b"b", b"")) for entry_id, fields in entries]


get_telemetry_reader = PerLoop(TelemetryReader)
