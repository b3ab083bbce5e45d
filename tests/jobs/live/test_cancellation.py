"""Cancel a wait for Redis at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis.asyncio

from jobs.core.redis_client import connect_async
from jobs.runs.live.consumers import CancellableChannelLayer
from tests.support.processes import RedisServer, scale_timeout

MAX_TURNS = 40  # of the event loop: more than a call needs until it waits for the answer


async def find_lost_cancellation(wait: Callable[[], Awaitable[Any]]) -> int | None:
    """Return the number of event loop turns after which a cancellation is lost, or None."""
    for turns in range(MAX_TURNS):
        waiting = asyncio.ensure_future(wait())
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        _, pending = await asyncio.wait({waiting}, timeout=scale_timeout(0.3))
        if pending:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            return turns
    return None


def find_lost_cancellation_of_read(client: redis.asyncio.Redis) -> int | None:
    async def watch() -> int | None:
        async with client:
            await client.ping()  # connected
            return await find_lost_cancellation(lambda: client.xread({"quiet": "$"}, block=60_000))

    return asyncio.run(watch())


def test_read_is_cancelled_at_any_moment(redis_service: RedisServer, settings: Any) -> None:
    """Otherwise the reader outlives its process, and a follower waits forever for its own tasks."""
    settings.REDIS_URL = redis_service.url
    assert find_lost_cancellation_of_read(connect_async(30)) is None


def test_channel_layer_is_cancelled_at_any_moment(redis_service: RedisServer) -> None:
    async def watch() -> int | None:
        layer = CancellableChannelLayer(hosts=[{"address": redis_service.url, "socket_timeout": 30}])
        channel = await layer.new_channel()
        turns = await find_lost_cancellation(lambda: layer.receive(channel))
        await layer.close_pools()
        return turns

    assert asyncio.run(watch()) is None


def test_next_request_gets_its_own_answer_after_a_cancellation(redis_service: RedisServer, settings: Any) -> None:
    """A connection must not return the answer of a cancelled request."""
    settings.REDIS_URL = redis_service.url

    async def ask() -> None:
        async with connect_async(30) as client:
            for turns in range(MAX_TURNS):
                lost = asyncio.ensure_future(client.echo("lost"))
                for _ in range(turns):
                    await asyncio.sleep(0)
                lost.cancel()
                await asyncio.gather(lost, return_exceptions=True)
                assert await client.echo(f"own {turns}") == f"own {turns}".encode()

    asyncio.run(ask())


@pytest.mark.skipif("sys.version_info >= (3, 12)", reason="fixed in asyncio.wait_for of 3.12")
def test_redis_py_alone_loses_a_cancellation(redis_service: RedisServer) -> None:
    """When this test fails, remove `jobs.core.redis_client.end_on_cancellation`."""
    plain: Any = redis.asyncio.Redis.from_url(redis_service.url, socket_timeout=30)
    assert find_lost_cancellation_of_read(plain) is not None
