"""Send the end of a job over REST after all other events."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgpack
import pytest

from contracts.names import telemetry_stream
from jobs.api import held_request_middleware
from jobs.runs.live import held_requests, job_follower
from jobs.runs.live.held_requests import FollowEvents, JobState, LogSelector, Position
from jobs.runs.live.job_follower import JobFollower, JobUpdate
from jobs.runs.live.telemetry_reader import get_telemetry_reader
from tests.support import processes
from tests.support.processes import RedisServer

LINES = 40
ENDED = JobState("succeeded", 1)


@pytest.fixture(autouse=True)
def ended_job(redis_service: RedisServer, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the job has ended, without the wait for late lines."""
    settings.REDIS_URL = redis_service.url
    monkeypatch.setattr(job_follower, "DRAIN_S", 0.0)
    monkeypatch.setattr(job_follower, "read_update", lambda job, after: JobUpdate(ENDED, {}, 0, 1))
    monkeypatch.setattr(held_requests, "read_job_states", lambda jobs: dict.fromkeys(jobs, ENDED))


def put(redis_service: RedisServer, number: int, rank: int = 0) -> None:
    item = {"kind": "log", "rank": rank, "time": 0.0, "first": number, "lines": [f"line {number}"]}
    batch = {"v": 1, "job": "over", "attempt": 1, "time": 0.0, "items": [item]}
    redis_service.client().xadd(telemetry_stream("over", 1), {"b": msgpack.packb(batch)})


async def collect_events(request: FollowEvents, redis_service: RedisServer, restart: bool = False) -> list[str]:
    """Return the names of all events. Restart Redis once an outage is reported."""
    names: list[str] = []
    async with asyncio.timeout(processes.scale_timeout(60)):
        events = JobFollower(request).events()
        async for event in events:
            if event.startswith(b": telemetry") and restart:
                await asyncio.to_thread(redis_service.start)
                restart = False
            names += [line[7:].decode() for line in event.splitlines() if line.startswith(b"event: ")]
    await get_telemetry_reader().redis.aclose()
    return names


@pytest.mark.parametrize("every", [1, 2], ids=["lines of one rank", "lines of two ranks"])
def test_end_comes_after_every_line(redis_service: RedisServer, every: int) -> None:
    """The end came too early if a frame took longer to send than the end waits."""
    for number in range(LINES):
        put(redis_service, number, rank=0 if number % every == 0 else 1)
    request = FollowEvents("over", ENDED, Position(attempt=1), LogSelector(1, 0, 0))
    assert asyncio.run(collect_events(request, redis_service)) == ["log"] * (LINES // every) + ["end"]


def test_script_loss_is_an_event_of_its_preferred_source(redis_service: RedisServer) -> None:
    def make_item(source: str, **more: Any) -> dict[str, Any]:
        return {"kind": "metric", "rank": 0, "time": 1.0, "step": 3, "source": source, "values": {"lr": 0.1}, **more}

    items = [
        make_item("log line", values={"loss": 2.5}),
        make_item("wandb", not_finite={"train/loss": "nan"}),
        make_item("log line", values={"loss": 2.0}),
    ]
    batch = {"v": 1, "job": "over", "attempt": 1, "time": 0.0, "items": items}
    redis_service.client().xadd(telemetry_stream("over", 1), {"b": msgpack.packb(batch)})

    async def collect() -> list[dict[str, Any]]:
        async with asyncio.timeout(processes.scale_timeout(60)):
            events = [event async for event in JobFollower(FollowEvents("over", ENDED, Position(attempt=1))).events()]
        await get_telemetry_reader().redis.aclose()
        return [json.loads(event.partition(b"data: ")[2]) for event in events if b"event: loss" in event]

    place = {"attempt": 1, "rank": 0, "time": 1.0, "step": 3}
    assert asyncio.run(collect()) == [
        {**place, "source": "log line", "loss": 2.5},
        {**place, "source": "wandb", "loss": None, "not_finite": "nan"},
    ]


def test_end_waits_for_a_stream_that_is_unreadable(redis_service: RedisServer) -> None:
    put(redis_service, 0)
    redis_service.stop()
    request = FollowEvents("over", ENDED, Position(attempt=1), LogSelector(1, 0, 0))
    assert asyncio.run(collect_events(request, redis_service, restart=True)) == ["log", "end"]


def test_disconnected_client_leaves_no_listener(redis_service: RedisServer) -> None:
    put(redis_service, 0)

    async def disconnect() -> int:
        sending = asyncio.Event()

        async def send(message: Any) -> None:
            if b"event: log" in message["body"]:
                sending.set()
                await asyncio.Event().wait()

        request = FollowEvents("over", ENDED, Position(attempt=1), LogSelector(1, 0, 0))
        passing = asyncio.create_task(held_request_middleware._forward_events(request, send))
        async with asyncio.timeout(processes.scale_timeout(60)):
            await sending.wait()
        passing.cancel()
        await asyncio.wait([passing])
        left = len(get_telemetry_reader()._listeners)
        await get_telemetry_reader().redis.aclose()
        return left

    assert asyncio.run(disconnect()) == 0
