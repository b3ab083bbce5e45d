"""Connections to Redis."""

from __future__ import annotations

import asyncio
from typing import Any

import redis
import redis.asyncio
from django.conf import settings
from redis.backoff import NoBackoff
from redis.retry import Retry


def connect() -> redis.Redis:
    """A connection with timeouts: whoever waits on Redis holds something else up."""
    return redis.Redis.from_url(settings.REDIS_URL, socket_timeout=5, socket_connect_timeout=2)


def connect_once(patience_s: float) -> redis.Redis:
    """For one question, asked once: `patience_s` to connect, and as long for the answer."""
    return redis.Redis.from_url(
        settings.REDIS_URL,
        socket_timeout=patience_s,
        socket_connect_timeout=patience_s,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=0,
    )


def connect_async(patience_s: float) -> redis.asyncio.Redis:
    """For code on an event loop; `patience_s` for an answer."""
    client = redis.asyncio.Redis.from_url(settings.REDIS_URL, socket_timeout=patience_s, socket_connect_timeout=2)
    heard(client.connection_pool)
    return client


class _Heard:
    """Mixed into a connection of redis-py (8.1), which sends by `asyncio.wait_for`: in Python 3.11 that loses a
    cancellation which comes as the sending is done, and who waited for the answer waits on."""

    async def send_packed_command(self, *args: Any, **options: Any) -> None:
        task = asyncio.current_task()
        assert task is not None, "commands to Redis are sent from an asyncio task"
        before = task.cancelling()
        await super().send_packed_command(*args, **options)  # type: ignore[misc]
        if task.cancelling() > before:
            await self.disconnect(nowait=True)  # type: ignore[attr-defined]  # nobody takes the answer
            raise asyncio.CancelledError


def heard(pool: Any) -> None:
    """Let every connection of a pool end when its task is cancelled."""
    pool.connection_class = type("Heard", (_Heard, pool.connection_class), {})
