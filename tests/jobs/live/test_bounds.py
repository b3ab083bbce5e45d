"""Sockets: frames are bounded both ways, and none stays open and blind."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgpack
import psycopg
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from contracts.names import telemetry_stream
from jobs.runs.live.streams import CHUNK_BYTES, CHUNK_ENTRIES, QUEUE_BYTES, READS_AT_ONCE, Entry, Hub, Redis, Watch
from tests.planner.wrong_specs import GOOD
from tests.support.frames import messages
from tests.support.patience import patient
from tests.support.processes import RedisServer
from tests.support.web import Site

FRAME_BYTES = 2**20


def watching(site: Site, job: str, **options: Any) -> Any:
    url = f"ws://127.0.0.1:{site.port}/ws/jobs/{job}/"
    return connect(url, origin=site.url, additional_headers=site.cookie("owner"), max_size=None, **options)  # type: ignore[arg-type]


async def until_closed(socket: ClientConnection) -> int:
    try:
        while True:
            await asyncio.wait_for(socket.recv(), patient(30))
    except ConnectionClosed as closed:
        return int(closed.rcvd.code) if closed.rcvd else 0


def batch(size: int) -> bytes:
    return bytes(msgpack.packb({"v": 1, "items": [], "filler": b"x" * size}))


def test_a_replay_of_any_size_comes_in_frames_of_a_megabyte(postgres_site: Site) -> None:
    job = postgres_site.submit(GOOD)
    stream = telemetry_stream(job, 1)
    redis = postgres_site.redis.client()
    sizes = [100] * 300 + [256 * 2**10] * 60 + [3 * 2**20] + [100] * 10
    ids = [redis.xadd(stream, {"b": batch(size)}).decode() for size in sizes]

    async def watch() -> tuple[list[str], list[Any], int]:
        got: list[str] = []
        gaps: list[Any] = []
        largest = 0
        async with watching(postgres_site, job) as socket:
            while not got or got[-1] != ids[-1]:
                frame = await asyncio.wait_for(socket.recv(), patient(30))
                largest = max(largest, len(frame))
                for told in messages(frame):
                    got += [entry[0] for entry in told.get("entries", [])]
                    gaps += [told["gap"]] if "gap" in told else []
        return got, gaps, largest

    got, gaps, largest = asyncio.run(watch())
    redis.delete(stream)
    assert got == ids[:360] + ids[361:], "in order, without gap or repetition, but for the one too large for a frame"
    assert gaps == [{"after": ids[359], "first": ids[360]}]
    assert largest <= FRAME_BYTES


@pytest.mark.parametrize("size", [1, 14 * 2**20])
def test_whoever_sends_is_closed(postgres_site: Site, size: int) -> None:
    async def send() -> int:
        async with watching(postgres_site, postgres_site.submit(GOOD)) as socket:
            await socket.recv()
            with contextlib.suppress(ConnectionClosed):  # already told
                await socket.send(b"x" * size)
            return await until_closed(socket)

    assert asyncio.run(send()) in (4400, 1009)


def test_a_database_error_closes_the_socket_so_that_the_browser_comes_back(
    postgres_site: Site,
) -> None:
    """One statement of the look at the job fails; nothing else is wrong, and nothing would have told the browser."""
    job = postgres_site.submit(GOOD)
    postgres_url = postgres_site.database_url

    async def watch() -> int:
        async with watching(postgres_site, job) as socket:
            await socket.recv()
            with psycopg.connect(postgres_url, autocommit=True) as admin:
                admin.execute("ALTER TABLE jobs_statechange RENAME TO away")
                try:
                    return await until_closed(socket)
                finally:
                    admin.execute("ALTER TABLE away RENAME TO jobs_statechange")

    assert asyncio.run(watch()) == 1013


def test_what_a_watch_keeps_is_bounded_in_bytes(redis_service: RedisServer, settings: Any) -> None:
    settings.REDIS_URL = redis_service.url
    client = redis_service.client()
    large = b"x" * 256 * 2**10
    stream = telemetry_stream("slow", 1)
    first: Any = client.xadd(stream, {"b": large})

    async def watch() -> None:
        hub = Hub()
        watched = Watch(hub, stream, "0-0")
        chunks = watched.chunks()
        assert [e.id for e in await anext(chunks)] == [first.decode()]  # type: ignore[union-attr]
        ids = []
        for _ in range(40):  # nobody takes anything meanwhile
            entry: Any = await asyncio.to_thread(client.xadd, stream, {"b": large})
            ids.append(entry.decode())
            watched.offer(Entry(ids[-1], large))
            assert sum(e.num_bytes for e in watched._queue) <= QUEUE_BYTES
        got: list[str] = []
        while len(got) < len(ids):
            chunk = await asyncio.wait_for(anext(chunks), patient(10))
            assert isinstance(chunk, list)
            assert sum(e.num_bytes for e in chunk) <= CHUNK_BYTES
            assert len(chunk) <= CHUNK_ENTRIES
            got += [e.id for e in chunk]
        assert got == ids, "what did not fit the queue came from Redis"
        await chunks.aclose()  # type: ignore[attr-defined]
        await hub.redis.aclose()

    asyncio.run(watch())


def test_a_thousand_ranks_are_read_over_few_connections(redis_service: RedisServer, settings: Any) -> None:
    """Before, each of 128 hosts' streams opened one at once: on a busy machine some timed out, and the page said that
    Redis cannot be reached."""
    settings.REDIS_URL = redis_service.url
    client = redis_service.client()
    streams = [telemetry_stream("wide", 1, node) for node in range(128)]
    for stream in streams:
        client.xadd(stream, {"b": b"1"})

    async def watch() -> int:
        hub = Hub()
        before = client.info("stats")["total_connections_received"]
        watches = [Watch(hub, stream, "0-0").chunks() for stream in streams]
        for chunk in await asyncio.gather(*(anext(each) for each in watches)):
            assert [entry.batch for entry in chunk] == [b"1"]  # type: ignore[union-attr]
        opened = client.info("stats")["total_connections_received"] - before
        for each in watches:
            await each.aclose()  # type: ignore[attr-defined]
        await hub.redis.aclose()
        return int(opened)

    assert asyncio.run(watch()) <= READS_AT_ONCE + 1, "and the one that waits for what is new"


def test_a_stream_with_nothing_new_is_told_to_be_read_again_once_redis_answers(
    redis_service: RedisServer, settings: Any
) -> None:
    """Nothing more comes of an ended job: its page said for ever that Redis cannot be reached."""
    settings.REDIS_URL = redis_service.url

    async def watch() -> None:
        hub = Hub()
        chunks = Watch(hub, telemetry_stream("quiet", 1), "0-0").chunks()
        redis_service.stop()
        assert await anext(chunks) is Redis.AWAY
        redis_service.start()
        while (told := await anext(chunks)) is Redis.AWAY:
            pass
        assert told is Redis.BACK
        await chunks.aclose()  # type: ignore[attr-defined]
        await hub.redis.aclose()

    asyncio.run(asyncio.wait_for(watch(), patient(60)))


def test_the_one_reader_survives_what_nobody_foresaw(redis_service: RedisServer, settings: Any) -> None:
    """An entry without a batch; before, it ended the task that every socket waits for."""
    settings.REDIS_URL = redis_service.url
    client = redis_service.client()
    stream = telemetry_stream("odd", 1)

    async def watch() -> None:
        hub = Hub()
        watched = Watch(hub, stream, "0-0")
        got: list[str] = []

        async def follow() -> None:
            async for chunk in watched.chunks():
                got.extend(e.batch.decode() for e in chunk if isinstance(e, Entry))

        task = asyncio.create_task(follow())
        client.xadd(stream, {"b": b"1"})
        while got != ["1"]:
            await asyncio.sleep(0.01)
        while hub._positions[stream] == "$":  # then the reader waits for what is new
            await asyncio.sleep(0.01)
        client.xadd(stream, {"other": b"?"})
        client.xadd(stream, {"b": b"2"})
        while got != ["1", "2"]:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await hub.redis.aclose()

    asyncio.run(asyncio.wait_for(watch(), patient(20)))
