"""Whoever waits for Redis ends when they are told to, at whatever moment that is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis.asyncio

from jobs.core.redis_connection import connect_async
from jobs.runs.live.layer import Layer
from tests.support.patience import patient
from tests.support.processes import RedisServer

TURNS = 40  # of the event loop: more than there are from a call's start to its wait for the answer


async def deaf_after(wait: Callable[[], Awaitable[Any]]) -> int | None:
    """After how many turns of the event loop a cancellation was not heard first."""
    for turns in range(TURNS):
        waiting = asyncio.ensure_future(wait())
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        _, unheard = await asyncio.wait({waiting}, timeout=patient(0.3))
        if unheard:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            return turns
    return None


def of_client(client: redis.asyncio.Redis) -> int | None:
    async def watch() -> int | None:
        async with client:
            await client.ping()  # connected
            return await deaf_after(lambda: client.xread({"quiet": "$"}, block=60_000))

    return asyncio.run(watch())


def test_a_read_is_cancelled_at_any_moment(redis_service: RedisServer, settings: Any) -> None:
    """Else the reader of a process outlives it, and who leaves a page of events waits for ever for their own tasks."""
    settings.REDIS_URL = redis_service.url
    assert of_client(connect_async(30)) is None


def test_so_is_who_waits_for_a_change(redis_service: RedisServer) -> None:
    async def watch() -> int | None:
        layer = Layer(hosts=[{"address": redis_service.url, "socket_timeout": 30}])
        channel = await layer.new_channel()
        heard = await deaf_after(lambda: layer.receive(channel))
        await layer.close_pools()
        return heard

    assert asyncio.run(watch()) is None


def test_after_a_cancellation_an_answer_is_the_question_s_own(redis_service: RedisServer, settings: Any) -> None:
    """A connection whose answer nobody took must not hand it to the next."""
    settings.REDIS_URL = redis_service.url

    async def ask() -> None:
        async with connect_async(30) as client:
            for turns in range(TURNS):
                lost = asyncio.ensure_future(client.echo("lost"))
                for _ in range(turns):
                    await asyncio.sleep(0)
                lost.cancel()
                await asyncio.gather(lost, return_exceptions=True)
                assert await client.echo(f"own {turns}") == f"own {turns}".encode()

    asyncio.run(ask())


@pytest.mark.skipif("sys.version_info >= (3, 12)", reason="asyncio.wait_for hears it from 3.12 on")
def test_redis_py_alone_does_not_hear_it(redis_service: RedisServer) -> None:
    """When it does, `jobs.core.redis_connection.heard` can go."""
    plain: Any = redis.asyncio.Redis.from_url(redis_service.url, socket_timeout=30)
    assert of_client(plain) is not None
