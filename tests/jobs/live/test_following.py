"""Following a job over REST: its end is told once all else was."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import pytest

from contracts.names import telemetry_stream
from jobs.api.http import patient
from jobs.runs.live import changes, following
from jobs.runs.live.following import Following, Turn
from jobs.runs.live.held import Follow, OneLog, Position, Standing
from jobs.runs.live.streams import hub
from tests.support import patience
from tests.support.processes import RedisServer

LINES = 40
ENDED = Standing("succeeded", 1)


@pytest.fixture(autouse=True)
def ended(redis_service: RedisServer, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that has ended, and no moment's grace for what comes behind its end."""
    settings.REDIS_URL = redis_service.url
    monkeypatch.setattr(following, "QUIET_S", 0.0)
    monkeypatch.setattr(following, "_turn", lambda job, after: Turn(ENDED, {}, 0, 1))
    monkeypatch.setattr(changes, "standings", lambda jobs: dict.fromkeys(jobs, ENDED))


def put(redis_service: RedisServer, number: int, rank: int = 0) -> None:
    item = {"kind": "log", "rank": rank, "time": 0.0, "first": number, "lines": [f"line {number}"]}
    batch = {"v": 1, "job": "over", "attempt": 1, "time": 0.0, "items": [item]}
    redis_service.client().xadd(telemetry_stream("over", 1), {"b": msgpack.packb(batch)})


async def told(wish: Follow, redis_service: RedisServer, back: bool = False) -> list[str]:
    """The names of all events; Redis comes back once it was said to be away."""
    found: list[str] = []
    async with asyncio.timeout(patience.patient(60)):
        events = Following(wish).events()
        async for event in events:
            if event.startswith(b": telemetry") and back:
                await asyncio.to_thread(redis_service.start)
                back = False
            found += [line[7:].decode() for line in event.splitlines() if line.startswith(b"event: ")]
    await hub().redis.aclose()
    return found


@pytest.mark.parametrize("every", [1, 2], ids=["its own lines", "between another rank's"])
def test_the_end_comes_behind_every_line_however_slowly_they_are_taken(redis_service: RedisServer, every: int) -> None:
    """It came before the second chunk where the first took longer to send than the end waits."""
    for number in range(LINES):
        put(redis_service, number, rank=0 if number % every == 0 else 1)
    wish = Follow("over", ENDED, Position(attempt=1), OneLog(1, 0, 0))
    assert asyncio.run(told(wish, redis_service)) == ["log"] * (LINES // every) + ["end"]


def test_the_end_waits_for_a_stream_that_cannot_be_read_just_now(redis_service: RedisServer) -> None:
    put(redis_service, 0)
    redis_service.stop()
    wish = Follow("over", ENDED, Position(attempt=1), OneLog(1, 0, 0))
    assert asyncio.run(told(wish, redis_service, back=True)) == ["log", "end"]


def test_a_client_that_leaves_while_it_is_sent_to_leaves_no_reader_behind(redis_service: RedisServer) -> None:
    put(redis_service, 0)

    async def leave() -> int:
        sending = asyncio.Event()

        async def send(message: Any) -> None:
            if b"event: log" in message["body"]:
                sending.set()
                await asyncio.Event().wait()

        wish = Follow("over", ENDED, Position(attempt=1), OneLog(1, 0, 0))
        passing = asyncio.create_task(patient._pass_on(wish, send))
        async with asyncio.timeout(patience.patient(60)):
            await sending.wait()
        passing.cancel()
        await asyncio.wait([passing])
        left = len(hub()._listeners)
        await hub().redis.aclose()
        return left

    assert asyncio.run(leave()) == 0
