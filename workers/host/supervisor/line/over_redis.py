"""The line of a host of ours: an attempt's telemetry stream, bounded in bytes, its events, its cancel flag."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from contracts.codec import encode_event
from contracts.control import VERSION, AttemptEvent, AttemptReport
from contracts.names import (
    cancel_key,
    events_stream,
    gang_key,
    loan_key,
    requested_timelines_key,
    save_key,
    telemetry_stream,
)
from contracts.security import build_signed_entry
from workers.host.attempts import AttemptDir
from workers.host.reporter import EVENTS_KEPT
from workers.host.settings import HostSettings
from workers.host.supervisor.line import LineError, Ready

STREAM_KEPT_S = 24 * 3600  # after the attempt last gave a sign of life
RENEW_S = 60.0


class RedisLine:
    """A `GangLine` to Redis."""

    def __init__(self, attempt: AttemptDir, settings: HostSettings, node: int = 0) -> None:
        self._host, self._stream_bytes = settings.name, settings.stream_bytes
        self._key = settings.signing_key
        self._redis = redis.asyncio.Redis.from_url(
            settings.redis_url, socket_timeout=5, socket_connect_timeout=2, health_check_interval=10
        )
        self._attempt = attempt.job, attempt.attempt
        self._stream = telemetry_stream(attempt.job, attempt.attempt, node)
        self._events = events_stream(settings.name)
        self._gang = gang_key(attempt.job, attempt.attempt)
        self._cancel = cancel_key(attempt.job, attempt.attempt)
        self._save = save_key(attempt.job, attempt.attempt)
        self._wanted = requested_timelines_key(attempt.job, attempt.attempt)
        self._entries: deque[tuple[str, int]] = deque()  # what we put into the stream: id and bytes
        self._num_bytes = self._number = 0
        self._renew_at = 0.0

    async def publish(self, batch: bytes) -> None:
        """One entry more; of the oldest as many less as keep the stream below its bound."""
        gone = self._too_old(len(batch))
        trim: dict[str, Any] = {}
        if gone:  # all that are known, or those before the first that stays
            trim = {"minid": self._entries[gone][0]} if gone < len(self._entries) else {"maxlen": 1}
        with _told():
            # At once: once Redis has it, nothing behind it can fail, and the number is spent.
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.xadd(self._stream, {"b": batch, "n": self._number}, approximate=False, **trim)
                pipe.expire(self._stream, STREAM_KEPT_S)
                entry: Any = (await pipe.execute())[0]
        self._number += 1
        for _ in range(gone):
            self._num_bytes -= self._entries.popleft()[1]
        self._entries.append((entry.decode(), len(batch)))
        self._num_bytes += len(batch)

    async def report(self, report: AttemptReport) -> None:
        event = AttemptEvent(kind="attempt", v=VERSION, host=self._host, time=time.time(), report=report)
        with _told():
            await self._renew_in_time()
            signed: Any = build_signed_entry(self._key, encode_event(event))
            await self._redis.xadd(self._events, signed, maxlen=EVENTS_KEPT, approximate=True)

    async def cancelled(self) -> bool:
        """Has the controller raised the flag?"""
        with _told():
            return bool(await self._redis.exists(self._cancel))

    async def asked_to_save(self) -> bool:
        with _told():
            return bool(await self._redis.exists(self._save))

    async def wanted(self) -> frozenset[int]:
        with _told():
            told: Any = await self._redis.smembers(self._wanted)
            return frozenset(int(step) for step in told if step.isdigit())

    async def renew(self) -> None:
        """A stream that was lost and begun anew since `_renew_in_time` expires too."""
        with _told():
            await self._redis.expire(self._stream, STREAM_KEPT_S)

    async def now(self) -> float:
        with _told():
            told: Any = await self._redis.time()
            return float(told[0] + told[1] / 1e6)

    async def lent_at(self, host: str) -> Ready | None:
        with _told():
            told: Any = await self._redis.hgetall(loan_key(host, *self._attempt))
            return Ready(told[b"address"].decode(), int(told[b"port"])) if told else None

    async def say_ready(self, node: int, ready: Ready) -> None:
        with _told():
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.hset(self._gang, str(node), json.dumps(ready._asdict()))
                pipe.expire(self._gang, STREAM_KEPT_S)
                await pipe.execute()

    async def who_is_ready(self) -> dict[int, Ready]:
        with _told():
            told: Any = await self._redis.hgetall(self._gang)
            return {int(node): Ready(**json.loads(said)) for node, said in told.items()}

    async def close(self) -> None:
        await self._redis.aclose()

    def _too_old(self, num_bytes: int) -> int:
        """How many of the oldest entries have no room beside so many bytes more."""
        over = self._num_bytes + num_bytes - self._stream_bytes
        for gone, (_, size) in enumerate(self._entries):
            if over <= 0:
                return gone
            over -= size
        return len(self._entries)

    async def _renew_in_time(self) -> None:
        """Let the stream live on for STREAM_KEPT_S."""
        # Redis sets no expiry on what is not there yet, or not there any more: then the next call asks again.
        if time.monotonic() >= self._renew_at and await self._redis.expire(self._stream, STREAM_KEPT_S):
            self._renew_at = time.monotonic() + RENEW_S


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError) as error:
        raise LineError(f"Redis: {error}") from error
