"""Send every entry of an attempt once and in order to each subscriber, whatever its speed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from contracts.names import telemetry_stream
from jobs.runs.live import broadcast
from jobs.runs.live.broadcast import Broadcasts, Outage, StreamSegment, Subscriber
from jobs.runs.live.telemetry_reader import (
    MAX_CONCURRENT_READS,
    MAX_ENTRIES_PER_STREAM,
    MAX_FRAME_BYTES,
    PerLoop,
    StreamEntry,
    TelemetryReader,
)
from tests.support.processes import RedisServer, scale_timeout
from tests.support.telemetry import unpack_messages

NODES = 5
ENTRIES_PER_NODE = 60
TIMEOUT_S = 60


@pytest.fixture(autouse=True)
def redis_url(redis_service: RedisServer, settings: Any) -> None:
    settings.REDIS_URL = redis_service.url


@asynccontextmanager
async def open_broadcasts() -> AsyncIterator[Broadcasts]:
    broadcasts = Broadcasts(TelemetryReader())
    try:
        yield broadcasts
    finally:
        await broadcasts.reader.redis.aclose()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), scale_timeout(TIMEOUT_S)))  # type: ignore[arg-type]


async def collect(subscriber: Subscriber, ids: dict[int, list[str]], delay_s: float = 0.0) -> None:
    async for frame in subscriber.frames():
        for message in unpack_messages(frame.packed):
            ids.setdefault(message["node"], []).extend(entry for entry, _ in message.get("entries", []))
        await asyncio.sleep(delay_s)


async def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("stored_bytes", [2**22, 4000], ids=["all keep up", "few frames are stored"])
def test_sends_each_entry_once_and_in_order(monkeypatch: pytest.MonkeyPatch, stored_bytes: int) -> None:
    monkeypatch.setattr(broadcast, "BROADCAST_BYTES", stored_bytes)
    ids: dict[int, list[str]] = {node: [] for node in range(NODES)}

    async def test() -> None:
        draw = random.Random(1)
        clients: list[tuple[Subscriber, dict[int, list[str]], asyncio.Task[None]]] = []
        async with open_broadcasts() as broadcasts:

            def add_client(delay_s: float, received: dict[int, list[str]]) -> None:
                positions = {node: entries[-1] for node, entries in received.items() if entries}
                subscriber = Subscriber(broadcasts.get("many", 1), positions)
                subscriber.follow(range(NODES))
                clients.append((subscriber, received, asyncio.create_task(collect(subscriber, received, delay_s))))

            for delay_s in (0.0, 0.0, 0.002, 0.02):
                add_client(delay_s, {})
            for number in range(ENTRIES_PER_NODE * NODES):
                node = draw.randrange(NODES) if number % 7 else 0
                fields: Any = {"b": b"x" * draw.randrange(1, 300)}
                entry: Any = await broadcasts.reader.redis.xadd(telemetry_stream("many", 1, node), fields)
                ids[node].append(entry.decode())
                if number % 40 == 20:  # a client reconnects with half of the entries
                    add_client(0.0, {node: entries[: len(entries) // 2] for node, entries in ids.items()})
                if number % 50 == 49:  # as after an outage of Redis
                    broadcasts.get("many", 1).fall_behind(telemetry_stream("many", 1, draw.randrange(NODES)))
            await wait_until(lambda: all(received == ids for _, received, _ in clients))
            for subscriber, _, task in clients:
                task.cancel()
                subscriber.leave()
            await asyncio.gather(*(task for _, _, task in clients), return_exceptions=True)
            assert not broadcasts.num_subscribers
            assert not broadcasts.reader._listeners
        assert all(received == ids for _, received, _ in clients)

    run(test)


def test_collects_at_most_one_frame_of_new_entries() -> None:
    """The entries that arrive between two frames had no limit in bytes."""

    async def test() -> None:
        async with open_broadcasts() as broadcasts:
            shared, stream = broadcasts.get("flood", 1), telemetry_stream("flood", 1, 0)
            subscriber = Subscriber(shared, {})
            subscriber.follow([0])
            for number in range(1, 41):
                shared.offer(stream, StreamEntry(f"{number}-0", b"x" * 2**18))
                assert sum(entry.num_bytes for entries in shared._unsent.values() for entry in entries) < 2**20
                if number == 20:
                    shared.fall_behind(stream)
                    assert shared._unsent_bytes == 0
            assert sum(frame.num_bytes for frame in shared.frames) <= broadcast.BROADCAST_BYTES
            subscriber.leave()

    run(test)


def test_packs_new_entries_once_for_all_subscribers() -> None:
    async def test() -> None:
        async with open_broadcasts() as broadcasts:
            reader = broadcasts.reader
            subscribers = [Subscriber(broadcasts.get("same", 1), {}) for _ in range(3)]
            for subscriber in subscribers:
                subscriber.follow(range(2))
            frames = [subscriber.frames() for subscriber in subscribers]
            for _ in range(2):  # each subscriber checks whether it read the first entry from Redis already
                waiting = [asyncio.ensure_future(anext(each)) for each in frames]
                await wait_until(
                    lambda: "$" not in reader._positions.values() and not any(s._behind for s in subscribers)
                )
                await reader.redis.xadd(telemetry_stream("same", 1, 1), {"b": b"1"})
                first, *others = await asyncio.gather(*waiting)
                assert unpack_messages(first.packed)[0]["node"] == 1
                assert first.packed == others[0].packed == others[1].packed
            assert first is others[0] is others[1]
            for each, subscriber in zip(frames, subscribers, strict=True):
                await each.aclose()
                subscriber.leave()

    run(test)


def test_sends_all_entries_of_a_node_that_is_followed_later() -> None:
    """A subscriber lost the first entries if it received a frame of a node that it did not follow yet."""

    async def test() -> None:
        async with open_broadcasts() as broadcasts:
            early, late = (Subscriber(broadcasts.get("wide", 1), {}) for _ in range(2))
            received: list[dict[int, list[str]]] = [{}, {}]
            early.follow(range(2))
            late.follow(range(1))
            tasks = [asyncio.create_task(collect(*pair)) for pair in zip((early, late), received, strict=True)]
            ids: dict[int, list[str]] = {0: [], 1: []}

            async def put(node: int) -> None:
                entry: Any = await broadcasts.reader.redis.xadd(telemetry_stream("wide", 1, node), {"b": b"1"})
                ids[node].append(entry.decode())

            await put(1)
            positions = broadcasts.reader._positions
            await wait_until(lambda: received[0].get(1) == ids[1] and "$" not in positions.values())
            for node in (1, 0):
                await put(node)
                await wait_until(lambda: received[0] == {node: entries for node, entries in ids.items() if entries})
            await wait_until(lambda: received[1].get(0) == ids[0])
            assert 1 not in received[1], "node 1 is not followed yet"
            late.follow(range(2))
            await put(1)
            await wait_until(lambda: received == [ids, ids])
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for subscriber in (early, late):
                subscriber.leave()

    run(test)


def test_stores_a_bounded_number_of_bytes_for_a_slow_subscriber(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "BROADCAST_BYTES", 2**20)
    large = b"x" * 256 * 2**10
    stream = telemetry_stream("slow", 1)

    async def test() -> None:
        async with open_broadcasts() as broadcasts:
            shared = broadcasts.get("slow", 1)
            subscriber = Subscriber(shared, {})
            subscriber.follow([0])
            ids: list[str] = []

            async def put() -> None:
                entry: Any = await broadcasts.reader.redis.xadd(stream, {"b": large})
                ids.append(entry.decode())

            await put()
            async with aclosing(subscriber.frames()) as frames:
                received = [entry.id for segment in (await anext(frames)).segments for entry in segment.entries]
                for _ in range(40):
                    await put()
                    assert sum(frame.num_bytes for frame in shared.frames) <= 2**20
                while len(received) < len(ids):
                    frame = await anext(frames)
                    assert frame.num_bytes <= MAX_FRAME_BYTES
                    assert all(len(segment.entries) <= MAX_ENTRIES_PER_STREAM for segment in frame.segments)
                    received += [entry.id for segment in frame.segments for entry in segment.entries]
                assert received == ids, "entries that are no longer stored come from Redis"
            subscriber.leave()

    run(test)


def test_many_streams_share_few_connections(redis_service: RedisServer) -> None:
    """With one connection for each of 128 streams, some timed out and Redis was reported as unreachable."""
    client = redis_service.client()
    nodes = range(128)
    for node in nodes:
        client.xadd(telemetry_stream("wide", 2, node), {"b": b"1"})

    async def test() -> None:
        async with open_broadcasts() as broadcasts:
            before = client.info("stats")["total_connections_received"]
            subscribers = [Subscriber(broadcasts.get("wide", 2), {}) for _ in nodes]
            for node, subscriber in zip(nodes, subscribers, strict=True):
                subscriber.follow([node])
            frames = [subscriber.frames() for subscriber in subscribers]
            for frame in await asyncio.gather(*(anext(each) for each in frames)):
                assert [entry.batch for segment in frame.segments for entry in segment.entries] == [b"1"]
            opened = client.info("stats")["total_connections_received"] - before
            assert opened <= MAX_CONCURRENT_READS + 1, "and one connection that waits for new entries"
            for each, subscriber in zip(frames, subscribers, strict=True):
                await each.aclose()
                subscriber.leave()

    run(test)


def test_reports_that_redis_answers_again_without_new_entries(redis_service: RedisServer) -> None:
    """The page of an ended job said forever that Redis cannot be reached."""

    async def test() -> None:
        async with open_broadcasts() as broadcasts:
            subscriber = Subscriber(broadcasts.get("quiet", 1), {})
            subscriber.follow([0])
            redis_service.stop()
            async with aclosing(subscriber.frames()) as frames:
                assert (await anext(frames)).notices == [Outage(0, stale=True)]
                redis_service.start()
                while (notices := (await anext(frames)).notices) == [Outage(0, stale=True)]:
                    pass
                assert notices == [Outage(0, stale=False)]
            subscriber.leave()

    run(test)


def test_reader_survives_an_entry_without_a_batch(redis_service: RedisServer) -> None:
    client = redis_service.client()
    stream = telemetry_stream("odd", 1)

    async def test() -> None:
        async with open_broadcasts() as broadcasts:
            subscriber = Subscriber(broadcasts.get("odd", 1), {})
            subscriber.follow([0])
            received: list[bytes] = []

            async def collect_batches() -> None:
                async for frame in subscriber.frames():
                    segments = [content for content in frame.contents if isinstance(content, StreamSegment)]
                    received.extend(entry.batch for segment in segments for entry in segment.entries)

            task = asyncio.create_task(collect_batches())
            client.xadd(stream, {"b": b"1"})
            await wait_until(lambda: received == [b"1"] and broadcasts.reader._positions[stream] != "$")
            client.xadd(stream, {"other": b"?"})
            client.xadd(stream, {"b": b"2"})
            await wait_until(lambda: received == [b"1", b"2"])
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            subscriber.leave()

    run(test)


NUM_LOOPS = 20  # a new loop often reuses the id() of the previous one


def test_each_loop_has_its_own_object() -> None:
    get_object = PerLoop(object)

    async def get_twice() -> tuple[object, object]:
        return get_object(), get_object()

    found = [asyncio.run(get_twice()) for _ in range(NUM_LOOPS)]
    assert all(first is second for first, second in found)
    assert len({id(first) for first, _ in found}) == NUM_LOOPS
