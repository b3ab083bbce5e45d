"""What the pages of an attempt are sent: what is new is packed once, however many look on.

A `Viewer` first reads from Redis what its page has not seen, then is given the frames of its `Room`, which keeps
ROOM_BYTES of them: who is slower than that reads from Redis again. A crowd is told less often of more at a time, as a
frame costs the same whatever is in it, and what requests wait for is the same process. Large frames are deflated: what
ranks tell again and again is a tenth of its size then.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, NamedTuple

import msgpack
from redis.exceptions import RedisError

from contracts.names import telemetry_stream
from jobs.runs.live.per_loop import PerLoop
from jobs.runs.live.streams import CHUNK_BYTES, RETRY_S, Entry, Hub, hub, order

ROOM_BYTES = 2**23  # of entries, beside the frames made of them
DEFLATED_FROM = 2**14  # bytes of a frame
FRAMES_PER_S = 600  # to all the pages of a hub: a fifth of a core
SLOWEST_S = 0.4  # from frame to frame of a page that keeps up, however large the crowd
START = "0-0"


class Part(NamedTuple):
    """Entries of a node's stream, in order, and the id of the one before them; None where nobody knows it."""

    node: int
    before: str | None
    entries: list[Entry]


class Frame(NamedTuple):
    """One message to a page, of at most 1 MB."""

    parts: list[Part]
    packed: bytes

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for part in self.parts for entry in part.entries)


class Ear:
    """Listens to one node's stream for a room."""

    def __init__(self, room: Room, node: int, stream: str) -> None:
        self.stream = stream
        self._room, self._node = room, node

    def offer(self, entry: Entry) -> None:
        self._room.offer(self._node, entry)

    def fall_behind(self) -> None:
        self._room.fall_behind(self._node)


class Room:
    """All who look at one attempt of a job, and what is new of its streams."""

    def __init__(self, rooms: Rooms, job: str, attempt: int) -> None:
        self.hub, self.key = rooms.hub, (job, attempt)
        self.viewers: set[Viewer] = set()
        self.first, self.frames = 0, deque[Frame]()  # the number of the first one kept
        self._rooms = rooms
        self._kept_bytes = 0
        self._ears: dict[int, Ear] = {}
        self._told: dict[int, str] = {}  # by node, the last entry that frames tell of
        self._new: dict[int, list[Entry]] = {}
        self._flush_at: asyncio.TimerHandle | None = None
        self._flushed_s = 0.0

    def stream(self, node: int) -> str:
        return telemetry_stream(*self.key, node)

    @property
    def end(self) -> int:
        """The number of the frame that comes next."""
        return self.first + len(self.frames)

    def listen(self, node: int) -> None:
        if node not in self._ears:
            self._ears[node] = Ear(self, node, self.stream(node))
            self.hub.add(self._ears[node])

    def leave(self, viewer: Viewer) -> None:
        self.viewers.discard(viewer)
        if self.viewers:
            return
        self._rooms.forget(self)
        if self._flush_at is not None:
            self._flush_at.cancel()
        for ear in self._ears.values():
            self.hub.remove(ear)

    def offer(self, node: int, entry: Entry) -> None:
        self._new.setdefault(node, []).append(entry)
        if self._flush_at is None:
            loop = asyncio.get_running_loop()
            pause_s = min(SLOWEST_S, self._rooms.viewers / FRAMES_PER_S)
            self._flush_at = loop.call_at(max(loop.time(), self._flushed_s + pause_s), self._flush)

    def fall_behind(self, node: int) -> None:
        self._new.pop(node, None)
        self._told.pop(node, None)
        for viewer in self.viewers:
            viewer.fall_behind(node)

    def _flush(self) -> None:
        self._flush_at, self._flushed_s = None, asyncio.get_running_loop().time()
        parts = [Part(node, self._told.get(node), entries) for node, entries in self._new.items()]
        self._told.update((part.node, part.entries[-1].id) for part in parts)
        self._new = {}
        for frame in framed(parts):
            self.frames.append(frame)
            self._kept_bytes += frame.num_bytes
        while self._kept_bytes > ROOM_BYTES:
            self._kept_bytes -= self.frames.popleft().num_bytes
            self.first += 1
        for viewer in self.viewers:
            viewer.news.set()


class Viewer:
    """One page: what it has seen of each node's stream, in order, without gap or repetition but for what was trimmed.
    `seen`: where it was before, by node."""

    def __init__(self, room: Room, seen: dict[int, str]) -> None:
        self.news = asyncio.Event()
        self._room, self._seen = room, seen
        self._at: dict[int, str] = {}
        self._behind: set[int] = set()
        self._next = room.end
        room.viewers.add(self)

    def leave(self) -> None:
        """It is sent nothing more."""
        self._room.leave(self)

    def follow(self, nodes: int) -> None:
        """The streams of so many nodes: before a job is placed, nobody knows how many there are."""
        for node in range(nodes):
            if node in self._at:
                continue
            self._at[node] = self._seen.get(node, START)
            self._room.listen(node)
            self.fall_behind(node)

    def fall_behind(self, node: int) -> None:
        if node in self._at:
            self._behind.add(node)
            self.news.set()

    async def frames(self) -> AsyncIterator[bytes]:
        """For ever."""
        begun: set[int] = set()
        while True:
            if self._behind:
                if new := self._behind - begun:
                    begun |= new
                    async for packed in self._trimmed(new):
                        yield packed
                async for packed in self._catch_up():
                    yield packed
            elif self._next < self._room.first:
                self._next = self._room.end
                self._behind = set(self._at)
            elif self._next == self._room.end:
                self.news.clear()
                await self.news.wait()
            else:
                frame = self._room.frames[self._next - self._room.first]
                self._next += 1
                for packed in self._of(frame):
                    yield packed

    async def _trimmed(self, nodes: set[int]) -> AsyncIterator[bytes]:
        """The gaps before what streams still hold."""
        with contextlib.suppress(Exception):  # no Redis: nothing was trimmed that we know of
            streams = {self._room.stream(node): node for node in sorted(nodes)}
            seen = {stream: self._at[node] for stream, node in streams.items()}
            found = await self._room.hub.trimmed_before(seen)
            gaps = [
                {"node": streams[stream], "gap": {"after": seen[stream], "first": first}}
                for stream, first in found.items()
            ]
            if gaps:
                yield _packed(gaps)

    async def _catch_up(self) -> AsyncIterator[bytes]:
        """What Redis has of the streams that are behind. When it cannot be reached the page is told, and when it is
        back."""
        away: int | None = None  # a node whose stream the page was told cannot be read
        while self._behind:
            streams = {self._room.stream(node): node for node in sorted(self._behind)}
            self._behind.clear()
            try:
                async for found in self._room.hub.behind({s: self._at[node] for s, node in streams.items()}):
                    parts = [Part(streams[s], self._at[streams[s]], entries) for s, entries in found.items()]
                    for frame in framed(parts):
                        yield frame.packed
                    self._at.update((part.node, part.entries[-1].id) for part in parts)
            except (RedisError, OSError):
                self._behind.update(streams.values())
                away = next(iter(streams.values())) if away is None else away
                yield _packed([{"node": away, "stale": True}])
                await asyncio.sleep(RETRY_S)
                continue
            if away is not None:
                yield _packed([{"node": away, "stale": False}])
                away = None

    def _of(self, frame: Frame) -> Iterator[bytes]:
        """What of a frame is new to this page: mostly all of it."""
        whole = all(part.node in self._at and self._at[part.node] == part.before for part in frame.parts)
        fresh = frame.parts if whole else [part for each in frame.parts if (part := self._fresh(each)).entries]
        self._at.update((part.node, part.entries[-1].id) for part in fresh)
        if whole:
            yield frame.packed
            return
        for again in framed(fresh):
            yield again.packed

    def _fresh(self, part: Part) -> Part:
        at = self._at.get(part.node)
        fresh = [entry for entry in part.entries if at is not None and order(entry.id) > order(at)]
        return Part(part.node, at, fresh)


class Rooms:
    """Of a hub: one for each attempt that somebody looks at."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self._rooms: dict[tuple[str, int], Room] = {}

    @property
    def viewers(self) -> int:
        return sum(len(room.viewers) for room in self._rooms.values())

    def of(self, job: str, attempt: int) -> Room:
        """Its room, a new one for the first who looks."""
        if (job, attempt) not in self._rooms:
            self._rooms[job, attempt] = Room(self, job, attempt)
        return self._rooms[job, attempt]

    def forget(self, room: Room) -> None:
        self._rooms.pop(room.key, None)


def framed(parts: Iterable[Part]) -> Iterator[Frame]:
    """Frames of what lies within bounds; an entry that fits none is told as a gap."""
    held: list[Part] = []
    held_bytes = 0
    for node, before, entries in parts:
        last = before
        for entry in entries:
            num_bytes = 0 if entry.num_bytes > CHUNK_BYTES else entry.num_bytes
            if held and held_bytes + num_bytes > CHUNK_BYTES:
                yield _frame(held)
                held, held_bytes = [], 0
            if not held or held[-1].node != node:
                held.append(Part(node, last, []))
            held[-1].entries.append(entry)
            held_bytes += num_bytes
            last = entry.id
    if held:
        yield _frame(held)


def _frame(parts: list[Part]) -> Frame:
    return Frame(parts, _packed([message for part in parts for message in _messages(part)]))


def _messages(part: Part) -> Iterator[dict[str, Any]]:
    before, run = part.before, list[list[Any]]()
    for entry in part.entries:
        if entry.num_bytes > CHUNK_BYTES:
            if run:
                yield {"node": part.node, "entries": run}
            yield {"node": part.node, "gap": {"after": before or START, "first": entry.id}}
            run = []
        elif entry.batch:  # one without a batch only moves the position
            run.append([entry.id, entry.batch])
        before = entry.id
    if run:
        yield {"node": part.node, "entries": run}


def _packed(messages: list[dict[str, Any]]) -> bytes:
    """One message as it is, several as a list, many bytes deflated."""
    packed: bytes = msgpack.packb(messages[0] if len(messages) == 1 else messages)
    if len(packed) < DEFLATED_FROM:
        return packed
    deflated: bytes = msgpack.packb({"deflated": zlib.compress(packed, 1)})
    return deflated


rooms = PerLoop(lambda: Rooms(hub()))
