"""Many pages of one run: each is told all of it once, in order, whoever is slow."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from contracts.names import telemetry_stream
from jobs.runs.live import room
from jobs.runs.live.room import Rooms, Viewer
from jobs.runs.live.streams import Hub
from tests.support.frames import messages
from tests.support.patience import patient
from tests.support.processes import RedisServer

NODES = 5
ENTRIES = 60  # of each node


@pytest.mark.parametrize("kept_bytes", [2**22, 4000], ids=["all keep up", "the room keeps little"])
def test_every_page_is_told_each_entry_once_and_in_order(
    redis_service: RedisServer, settings: Any, monkeypatch: pytest.MonkeyPatch, kept_bytes: int
) -> None:
    settings.REDIS_URL = redis_service.url
    monkeypatch.setattr(room, "ROOM_BYTES", kept_bytes)
    ids: dict[int, list[str]] = {node: [] for node in range(NODES)}

    async def watch() -> list[dict[int, list[str]]]:
        hub, draw = Hub(), random.Random(1)
        rooms = Rooms(hub)
        pages: list[tuple[Viewer, dict[int, list[str]], asyncio.Task[None]]] = []

        def look(slowness_s: float, seen: dict[int, list[str]]) -> None:
            viewer = Viewer(rooms.of("many", 1), {node: had[-1] for node, had in seen.items() if had})
            viewer.follow(NODES)
            pages.append((viewer, seen, asyncio.create_task(read(viewer, seen, slowness_s))))

        for slowness_s in (0.0, 0.0, 0.002, 0.02):
            look(slowness_s, {})
        for number in range(ENTRIES * NODES):
            node = draw.randrange(NODES) if number % 7 else 0
            entry: Any = await hub.redis.xadd(telemetry_stream("many", 1, node), {"b": b"x" * draw.randrange(1, 300)})
            ids[node].append(entry.decode())
            if number % 40 == 20:  # one comes late, with what it had seen
                look(0.0, {node: had[: len(had) // 2] for node, had in ids.items()})
            if number % 50 == 49:  # as when Redis was away
                next(iter(rooms.of("many", 1).viewers))._room.fall_behind(draw.randrange(NODES))
        await until(lambda: all(seen == ids for _, seen, _ in pages))
        for viewer, _, task in pages:
            task.cancel()
            viewer.leave()
        await asyncio.gather(*(task for _, _, task in pages), return_exceptions=True)
        assert not rooms.viewers
        assert not hub._listeners
        await hub.redis.aclose()
        return [seen for _, seen, _ in pages]

    for seen in asyncio.run(asyncio.wait_for(watch(), patient(60))):
        assert seen == ids


async def read(viewer: Viewer, seen: dict[int, list[str]], slowness_s: float) -> None:
    async for frame in viewer.frames():
        for message in messages(frame):
            seen.setdefault(message["node"], []).extend(entry for entry, _ in message.get("entries", []))
        await asyncio.sleep(slowness_s)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_what_is_new_is_packed_once_for_all_pages(redis_service: RedisServer, settings: Any) -> None:
    settings.REDIS_URL = redis_service.url

    async def watch() -> None:
        hub = Hub()
        rooms = Rooms(hub)
        viewers = [Viewer(rooms.of("same", 1), {}) for _ in range(3)]
        for viewer in viewers:
            viewer.follow(2)
        frames = [viewer.frames() for viewer in viewers]
        for _ in range(2):  # of what comes first each page has to see whether it read it from Redis already
            waiting = [asyncio.ensure_future(anext(each)) for each in frames]
            await until(lambda: "$" not in hub._positions.values() and not any(viewer._behind for viewer in viewers))
            await hub.redis.xadd(telemetry_stream("same", 1, 1), {"b": b"1"})
            first, *others = await asyncio.gather(*waiting)
            assert messages(first)[0]["node"] == 1
            assert first == others[0] == others[1]
        assert first is others[0] is others[1]
        for each, viewer in zip(frames, viewers, strict=True):
            await each.aclose()  # type: ignore[attr-defined]
            viewer.leave()
        await hub.redis.aclose()

    asyncio.run(asyncio.wait_for(watch(), patient(20)))


def test_who_learns_of_a_member_later_than_others_is_told_all_of_it_once(
    redis_service: RedisServer, settings: Any
) -> None:
    """Its first entries were lost to who was sent a frame of a member that it did not follow yet."""
    settings.REDIS_URL = redis_service.url

    async def watch() -> None:
        rooms = Rooms(hub := Hub())
        early, late = (Viewer(rooms.of("wide", 1), {}) for _ in range(2))
        told: list[dict[int, list[str]]] = [{}, {}]
        early.follow(2)
        late.follow(1)
        tasks = [asyncio.create_task(read(one, seen, 0.0)) for one, seen in zip((early, late), told, strict=True)]
        ids: dict[int, list[str]] = {0: [], 1: []}

        async def put(node: int) -> None:
            entry: Any = await hub.redis.xadd(telemetry_stream("wide", 1, node), {"b": b"1"})
            ids[node].append(entry.decode())

        await put(1)
        await until(lambda: told[0].get(1) == ids[1] and "$" not in hub._positions.values())
        for node in (1, 0):
            await put(node)
            await until(lambda: told[0] == {name: had for name, had in ids.items() if had})
        await until(lambda: told[1].get(0) == ids[0])
        assert 1 not in told[1], "it is not followed yet"
        late.follow(2)
        await put(1)
        await until(lambda: told == [ids, ids])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for viewer in (early, late):
            viewer.leave()
        await hub.redis.aclose()

    asyncio.run(asyncio.wait_for(watch(), patient(20)))
