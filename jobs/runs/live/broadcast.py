"""Send the telemetry of an attempt to all its subscribers. Each frame is packed once.

A `Subscriber` first reads from Redis what its client has not received, then takes the frames of the `Broadcast`.
The broadcast stores BROADCAST_BYTES of frames, and collects at most MAX_FRAME_BYTES for the next frame. A slower
subscriber reads from Redis again, so it costs no memory and receives all frames that the stream still has.

Many subscribers receive fewer and larger frames, because the cost of a frame hardly depends on its size.
Large frames are deflated, because telemetry repeats itself and shrinks to a tenth.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import msgpack
from redis.exceptions import RedisError

from contracts.names import telemetry_stream
from jobs.runs.live.telemetry_reader import (
    MAX_FRAME_BYTES,
    RETRY_S,
    STREAM_START,
    PerLoop,
    StreamEntry,
    TelemetryReader,
    get_telemetry_reader,
    parse_entry_id,
)

BROADCAST_BYTES = 2**23  # of entries, without the packed frames
MIN_DEFLATED_BYTES = 2**14
FRAMES_PER_S = 600  # to all subscribers of a process: a fifth of a core
MAX_FRAME_INTERVAL_S = 0.4  # for a subscriber that keeps up


class StreamSegment(NamedTuple):
    """Hold consecutive entries of one node's stream. `before`: the id of the entry before them, if known."""

    node: int
    before: str | None
    entries: list[StreamEntry]

    def split_at_oversize(self) -> Iterator[StreamSegment | Gap]:
        """Yield the entries that have a batch, and a gap for each entry that is too large for a frame."""
        before, run = self.before, list[StreamEntry]()
        for entry in self.entries:
            if entry.is_oversize:
                if run:
                    yield self._replace(entries=run)
                yield Gap(self.node, before or STREAM_START, entry.id, is_oversize=True)
                run = []
            elif entry.batch:
                run.append(entry)
            before = entry.id
        if run:
            yield self._replace(entries=run)


class Gap(NamedTuple):
    """Report that entries of a node's stream are missing after the entry `after`."""

    node: int
    after: str
    first: str  # after the gap, or the missing entry itself if it `is_oversize`
    is_oversize: bool = False


class Outage(NamedTuple):
    """Report that Redis cannot be reached (`stale`), or that it can again."""

    node: int
    stale: bool


class ClientFrame:
    """Hold one message to a client, of at most 1 MB."""

    def __init__(self, segments: list[StreamSegment], notices: Sequence[Outage | Gap] = ()) -> None:
        self.segments, self.notices = segments, notices

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for segment in self.segments for entry in segment.entries)

    @property
    def contents(self) -> Iterator[StreamSegment | Gap | Outage]:
        yield from self.notices
        for segment in self.segments:
            yield from segment.split_at_oversize()

    @cached_property
    def packed(self) -> bytes:
        """Return the msgpack of the only message or of the list of messages, deflated if large."""
        messages = [_serialize(content) for content in self.contents]
        packed: bytes = msgpack.packb(messages[0] if len(messages) == 1 else messages)
        if len(packed) < MIN_DEFLATED_BYTES:
            return packed
        deflated: bytes = msgpack.packb({"deflated": zlib.compress(packed, 1)})
        return deflated


class Broadcast:
    """Collect the new entries of an attempt into frames for all subscribers."""

    def __init__(self, broadcasts: Broadcasts, job: str, attempt: int) -> None:
        self.reader, self.key = broadcasts.reader, (job, attempt)
        self.subscribers: set[Subscriber] = set()
        self.first_number, self.frames = 0, deque[ClientFrame]()  # frames are numbered in order
        self._broadcasts = broadcasts
        self._stored_bytes = 0
        self._node_by_stream: dict[str, int] = {}
        self._last_sent: dict[int, str] = {}  # entry id by node
        self._unsent: dict[int, list[StreamEntry]] = {}
        self._unsent_bytes = 0
        self._flush_timer: asyncio.TimerHandle | None = None
        self._flushed_s = 0.0

    @property
    def next_number(self) -> int:
        return self.first_number + len(self.frames)

    def get_stream(self, node: int) -> str:
        return telemetry_stream(*self.key, node)

    def subscribe(self, node: int) -> None:
        if self.get_stream(node) not in self._node_by_stream:
            self._node_by_stream[self.get_stream(node)] = node
            self.reader.add(self.get_stream(node), self)

    def is_up_to_date(self, nodes: Iterable[int]) -> bool:
        """Return True if every entry of the nodes' streams is in a frame."""
        return all(node not in self._unsent and self.reader.is_reading(self.get_stream(node)) for node in nodes)

    def remove(self, subscriber: Subscriber) -> None:
        """Remove a subscriber, and stop if it was the last one."""
        self.subscribers.discard(subscriber)
        if self.subscribers:
            return
        self._broadcasts.remove(self)
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        for stream in self._node_by_stream:
            self.reader.remove(stream, self)

    def offer(self, stream: str, entry: StreamEntry) -> None:
        self._unsent.setdefault(self._node_by_stream[stream], []).append(entry)
        self._unsent_bytes += entry.num_bytes
        if self._unsent_bytes >= MAX_FRAME_BYTES:
            self._flush()
        elif self._flush_timer is None:
            loop = asyncio.get_running_loop()
            interval_s = min(MAX_FRAME_INTERVAL_S, self._broadcasts.num_subscribers / FRAMES_PER_S)
            self._flush_timer = loop.call_at(max(loop.time(), self._flushed_s + interval_s), self._flush)

    def fall_behind(self, stream: str) -> None:
        node = self._node_by_stream[stream]
        self._unsent_bytes -= sum(entry.num_bytes for entry in self._unsent.pop(node, []))
        self._last_sent.pop(node, None)
        for subscriber in self.subscribers:
            subscriber.fall_behind(node)

    def _flush(self) -> None:
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        self._flush_timer, self._flushed_s = None, asyncio.get_running_loop().time()
        segments = [StreamSegment(node, self._last_sent.get(node), entries) for node, entries in self._unsent.items()]
        self._last_sent.update((segment.node, segment.entries[-1].id) for segment in segments)
        self._unsent, self._unsent_bytes = {}, 0
        for frame in build_frames(segments):
            self.frames.append(frame)
            self._stored_bytes += frame.num_bytes
        while self._stored_bytes > BROADCAST_BYTES:
            self._stored_bytes -= self.frames.popleft().num_bytes
            self.first_number += 1
        for subscriber in self.subscribers:
            subscriber.news.set()


class Subscriber:
    """Follow nodes of an attempt for one client: every entry once, in order, with gaps where Redis trimmed a stream.

    Args:
        positions: The last entry that the client received, by node.
        start: The position in every other stream. Only a client that reads from the start learns of trimmed entries.
    """

    def __init__(self, broadcast: Broadcast, positions: dict[int, str], start: str = STREAM_START) -> None:
        self.news = asyncio.Event()
        self._broadcast, self._start_positions, self._start = broadcast, positions, start
        self._positions: dict[int, str] = {}
        self._behind: set[int] = set()
        self._next = broadcast.next_number
        self._is_waiting = False
        broadcast.subscribers.add(self)

    @property
    def is_caught_up(self) -> bool:
        """Return True if the client has taken all that the streams hold."""
        return self._is_waiting and not self.news.is_set() and self._broadcast.is_up_to_date(self._positions)

    def leave(self) -> None:
        self._broadcast.remove(self)

    def follow(self, nodes: Iterable[int]) -> None:
        """Add nodes. Their number is unknown until the job is placed."""
        for node in nodes:
            if node not in self._positions:
                self._positions[node] = self._start_positions.get(node, self._start)
                self._broadcast.subscribe(node)
                self.fall_behind(node)

    def fall_behind(self, node: int) -> None:
        if node in self._positions:
            self._behind.add(node)
            self.news.set()

    async def frames(self) -> AsyncGenerator[ClientFrame]:
        """Yield frames forever."""
        checked: set[int] = set()
        while True:
            if self._behind:
                if unchecked := self._behind - checked:
                    checked |= unchecked
                    if gaps := await self._find_gaps(unchecked):
                        yield ClientFrame([], gaps)
                async for frame in self._catch_up():
                    yield frame
            elif self._next < self._broadcast.first_number:
                self._next = self._broadcast.next_number
                self._behind = set(self._positions)
            elif self._next == self._broadcast.next_number:
                self.news.clear()
                self._is_waiting = True
                try:
                    await self.news.wait()
                finally:
                    self._is_waiting = False
            else:
                shared = self._broadcast.frames[self._next - self._broadcast.first_number]
                self._next += 1
                for frame in self._select_new(shared):
                    yield frame

    async def _find_gaps(self, nodes: set[int]) -> list[Gap]:
        """Return the gaps between the client's positions and what the streams still hold."""
        if self._start != STREAM_START:
            return []
        streams = {self._broadcast.get_stream(node): node for node in sorted(nodes)}
        positions = {stream: self._positions[node] for stream, node in streams.items()}
        with contextlib.suppress(Exception):  # without Redis, no trim is known
            trimmed = await self._broadcast.reader.find_trimmed(positions)
            return [Gap(streams[stream], positions[stream], first) for stream, first in trimmed.items()]
        return []

    async def _catch_up(self) -> AsyncGenerator[ClientFrame]:
        """Yield what Redis has of the streams that are behind, and outages of Redis."""
        stale_node: int | None = None
        while self._behind:
            streams = {self._broadcast.get_stream(node): node for node in sorted(self._behind)}
            self._behind.clear()
            positions = {stream: self._positions[node] for stream, node in streams.items()}
            try:
                async for found in self._broadcast.reader.read_after(positions):
                    segments = [
                        StreamSegment(streams[stream], self._positions[streams[stream]], entries)
                        for stream, entries in found.items()
                    ]
                    for frame in build_frames(segments):
                        yield frame
                    self._positions.update((segment.node, segment.entries[-1].id) for segment in segments)
            except (RedisError, OSError):
                self._behind.update(streams.values())
                stale_node = next(iter(streams.values())) if stale_node is None else stale_node
                yield ClientFrame([], [Outage(stale_node, True)])
                await asyncio.sleep(RETRY_S)
                continue
            if stale_node is not None:
                yield ClientFrame([], [Outage(stale_node, False)])
                stale_node = None

    def _select_new(self, frame: ClientFrame) -> Iterator[ClientFrame]:
        """Yield the entries that this client has not received: usually the shared frame itself."""
        is_new = all(
            segment.node in self._positions and self._positions[segment.node] == segment.before
            for segment in frame.segments
        )
        segments = frame.segments if is_new else [new for each in frame.segments if (new := self._trim(each)).entries]
        self._positions.update((segment.node, segment.entries[-1].id) for segment in segments)
        yield from [frame] if is_new else build_frames(segments)

    def _trim(self, segment: StreamSegment) -> StreamSegment:
        position = self._positions.get(segment.node)
        if position is None:
            return StreamSegment(segment.node, None, [])
        new = [entry for entry in segment.entries if parse_entry_id(entry.id) > parse_entry_id(position)]
        return StreamSegment(segment.node, position, new)


class Broadcasts:
    """Hold the broadcast of each attempt that has subscribers."""

    def __init__(self, reader: TelemetryReader) -> None:
        self.reader = reader
        self._broadcasts: dict[tuple[str, int], Broadcast] = {}

    @property
    def num_subscribers(self) -> int:
        return sum(len(broadcast.subscribers) for broadcast in self._broadcasts.values())

    def get(self, job: str, attempt: int) -> Broadcast:
        """Return the broadcast of an attempt, which the first subscriber creates."""
        if (job, attempt) not in self._broadcasts:
            self._broadcasts[job, attempt] = Broadcast(self, job, attempt)
        return self._broadcasts[job, attempt]

    def remove(self, broadcast: Broadcast) -> None:
        self._broadcasts.pop(broadcast.key, None)


def build_frames(segments: Iterable[StreamSegment]) -> Iterator[ClientFrame]:
    """Distribute segments over frames of at most MAX_FRAME_BYTES. Oversize entries count nothing."""
    collected: list[StreamSegment] = []
    collected_bytes = 0
    for node, before, entries in segments:
        last = before
        for entry in entries:
            num_bytes = 0 if entry.is_oversize else entry.num_bytes
            if collected and collected_bytes + num_bytes > MAX_FRAME_BYTES:
                yield ClientFrame(collected)
                collected, collected_bytes = [], 0
            if not collected or collected[-1].node != node:
                collected.append(StreamSegment(node, last, []))
            collected[-1].entries.append(entry)
            collected_bytes += num_bytes
            last = entry.id
    if collected:
        yield ClientFrame(collected)


def _serialize(content: StreamSegment | Gap | Outage) -> dict[str, Any]:
    if isinstance(content, StreamSegment):
        return {"node": content.node, "entries": [[entry.id, entry.batch] for entry in content.entries]}
    if isinstance(content, Gap):
        return {"node": content.node, "gap": {"after": content.after, "first": content.first}}
    return {"node": content.node, "stale": content.stale}


get_broadcasts = PerLoop(lambda: Broadcasts(get_telemetry_reader()))
