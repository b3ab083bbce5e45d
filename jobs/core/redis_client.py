"""Connect to Redis, and read the latest steps of running attempts from their telemetry streams."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

import redis
import redis.asyncio
from django.conf import settings
from redis.backoff import NoBackoff
from redis.retry import Retry

from contracts.telemetry.batches import select_items

STEP_MARKERS = (b"\xa4kind\xa4step", b"\xa4kind\xa5phase")  # msgpack of the kinds that report steps
FIRST_READ_ENTRIES = 40
MAX_READ_ENTRIES = 400
READ_BYTES = 2**20  # approximate size of a read
MAX_STREAM_BYTES = 16 * 2**20  # read per stream


def connect() -> redis.Redis:
    """Return a client with timeouts."""
    return redis.Redis.from_url(settings.REDIS_URL, socket_timeout=5, socket_connect_timeout=2)


def connect_once(timeout_s: float) -> redis.Redis:
    """Return a client without retries. The timeout applies to the connection and to each response."""
    return redis.Redis.from_url(
        settings.REDIS_URL,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=0,
    )


def connect_async(timeout_s: float) -> redis.asyncio.Redis:
    """Return a client for an event loop. The timeout applies to each response."""
    client = redis.asyncio.Redis.from_url(settings.REDIS_URL, socket_timeout=timeout_s, socket_connect_timeout=2)
    end_on_cancellation(client.connection_pool)
    return client


class _CancellableConnection:
    """Mixin that fixes lost cancellations in connections of redis-py 8.1.

    redis-py sends through `asyncio.wait_for`. In Python 3.11 it loses a cancellation at the end of the send, and the
    task then waits for a response forever.
    """

    async def send_packed_command(self, *args: Any, **options: Any) -> None:
        task = asyncio.current_task()
        assert task is not None, "commands to Redis are sent from an asyncio task"
        before = task.cancelling()
        await super().send_packed_command(*args, **options)  # type: ignore[misc]
        if task.cancelling() > before:
            await self.disconnect(nowait=True)  # type: ignore[attr-defined]  # the response is never read
            raise asyncio.CancelledError


def end_on_cancellation(pool: Any) -> None:
    """Make each connection of a pool stop when its task is cancelled."""
    pool.connection_class = type("CancellableConnection", (_CancellableConnection, pool.connection_class), {})


class _StreamTail:
    """Read a stream backward until each rank has reported a step."""

    def __init__(self, stream: str, num_ranks: int) -> None:
        self.stream = stream
        self.before, self.count = "+", FIRST_READ_ENTRIES
        self.is_done = False
        self._items: list[list[dict[str, Any]]] = []  # per entry, newest first
        self._num_ranks, self._ranks = num_ranks, set[int]()
        self._bytes = self._entries = 0

    def add(self, entries: list[Any]) -> None:
        """Add the next older entries."""
        for _, fields in entries:
            batch = fields.get(b"b", b"")
            self._bytes += len(batch)
            if any(marker in batch for marker in STEP_MARKERS):
                items = [item for item in select_items(batch, ("step", "phase")) if _reports_steps(item)]
                self._items.append(items)
                self._ranks |= {item["rank"] for item in items}
        self._entries += len(entries)
        is_exhausted = len(entries) < self.count or self._bytes >= MAX_STREAM_BYTES
        self.is_done = is_exhausted or len(self._ranks) >= self._num_ranks
        if not self.is_done:
            self.before = f"({entries[-1][0].decode()}"
            self.count = max(1, min(MAX_READ_ENTRIES, READ_BYTES * self._entries // max(1, self._bytes)))

    def get_items(self) -> list[dict[str, Any]]:
        """Return the items, oldest first."""
        return [item for items in reversed(self._items) for item in items]


def _reports_steps(item: Mapping[str, Any]) -> bool:
    return item["kind"] == "step" or (item["kind"] == "phase" and ("steps" in item or "cells" in item))


def get_completed_steps(item: Mapping[str, Any]) -> int:
    """Return the number of completed steps in an item, -1 for a script that counts no steps."""
    return int(item["step"] if item["kind"] == "step" else item.get("steps", -1))


def read_latest_steps(
    client: redis.Redis, streams: Mapping[str, int], max_age_s: float
) -> dict[str, list[dict[str, Any]]]:
    """Return per stream the latest items that report steps, oldest first.

    A supervisor writes ten entries per second between steps. So a fixed number of entries may contain no step.

    Args:
        streams: Number of ranks per stream.
        max_age_s: Maximum age of an item by the clock of Redis.
    """
    now: Any = client.time()
    oldest = f"{max(0, now[0] - math.ceil(max_age_s)) * 1000}-0"
    tails = [_StreamTail(stream, num_ranks) for stream, num_ranks in streams.items()]
    while unfinished := [tail for tail in tails if not tail.is_done]:
        with client.pipeline(transaction=False) as pipe:
            for tail in unfinished:
                pipe.xrevrange(tail.stream, max=tail.before, min=oldest, count=tail.count)
            responses = pipe.execute()
        for tail, entries in zip(unfinished, responses, strict=True):
            tail.add(entries)
    return {tail.stream: tail.get_items() for tail in tails}
