"""The transport of a host: the attempt's telemetry stream with limited bytes, the host's events, and flags in Redis."""

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
from workers.host.reporter import MAX_EVENTS
from workers.host.settings import HostSettings
from workers.host.supervisor.publisher import ReadyMember, TransportError

STREAM_EXPIRES_S = 24 * 3600  # after the last message of the attempt
RENEW_INTERVAL_S = 60.0


class RedisTransport:
    """A `BoardTransport` to Redis."""

    def __init__(self, attempt: AttemptDir, settings: HostSettings, node: int = 0) -> None:
        self._host, self._stream_bytes = settings.name, settings.stream_bytes
        self._key = settings.signing_key
        self._redis = redis.asyncio.Redis.from_url(
            settings.redis_url, socket_timeout=5, socket_connect_timeout=2, health_check_interval=10
        )
        self._attempt = attempt.job, attempt.attempt
        self._stream = telemetry_stream(*self._attempt, node)
        self._events = events_stream(settings.name)
        self._gang = gang_key(*self._attempt)
        self._entries: deque[tuple[str, int]] = deque()  # ID and bytes of each entry in the stream
        self._num_bytes = self._number = 0
        self._renew_due = 0.0

    async def publish(self, batch: bytes) -> None:
        """Add an entry to the stream, and remove the oldest entries that exceed the limit."""
        num_removed = self._count_excess(len(batch))
        trim: dict[str, Any] = {}
        if num_removed:
            keeps_some = num_removed < len(self._entries)
            trim = {"minid": self._entries[num_removed][0]} if keeps_some else {"maxlen": 1}
        with _translate_errors():
            # In one transaction: when Redis has the entry, no later command can fail, and the number is used.
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.xadd(self._stream, {"b": batch, "n": self._number}, approximate=False, **trim)
                pipe.expire(self._stream, STREAM_EXPIRES_S)
                entry_id: Any = (await pipe.execute())[0]
        self._number += 1
        for _ in range(num_removed):
            self._num_bytes -= self._entries.popleft()[1]
        self._entries.append((entry_id.decode(), len(batch)))
        self._num_bytes += len(batch)

    async def send_report(self, report: AttemptReport) -> None:
        event = AttemptEvent(kind="attempt", v=VERSION, host=self._host, time=time.time(), report=report)
        with _translate_errors():
            # Redis sets no expiry on a missing stream. The next call then tries again.
            if time.monotonic() >= self._renew_due and await self._redis.expire(self._stream, STREAM_EXPIRES_S):
                self._renew_due = time.monotonic() + RENEW_INTERVAL_S
            signed: Any = build_signed_entry(self._key, encode_event(event))
            await self._redis.xadd(self._events, signed, maxlen=MAX_EVENTS, approximate=True)

    async def is_cancelled(self) -> bool:
        with _translate_errors():
            return bool(await self._redis.exists(cancel_key(*self._attempt)))

    async def is_save_requested(self) -> bool:
        with _translate_errors():
            return bool(await self._redis.exists(save_key(*self._attempt)))

    async def get_requested_steps(self) -> frozenset[int]:
        with _translate_errors():
            steps: Any = await self._redis.smembers(requested_timelines_key(*self._attempt))
            return frozenset(int(step) for step in steps if step.isdigit())

    async def renew_stream(self) -> None:
        """Set the expiry also on a stream that was lost and created again since the last report."""
        with _translate_errors():
            await self._redis.expire(self._stream, STREAM_EXPIRES_S)

    async def get_time(self) -> float:
        with _translate_errors():
            response: Any = await self._redis.time()
            return float(response[0] + response[1] / 1e6)

    async def get_loan_address(self, host: str) -> ReadyMember | None:
        with _translate_errors():
            fields: Any = await self._redis.hgetall(loan_key(host, *self._attempt))
            return ReadyMember(fields[b"address"].decode(), int(fields[b"port"])) if fields else None

    async def announce_ready(self, node: int, ready: ReadyMember) -> None:
        with _translate_errors():
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.hset(self._gang, str(node), json.dumps(ready._asdict()))
                pipe.expire(self._gang, STREAM_EXPIRES_S)
                await pipe.execute()

    async def get_ready_members(self) -> dict[int, ReadyMember]:
        with _translate_errors():
            fields: Any = await self._redis.hgetall(self._gang)
            return {int(node): ReadyMember(**json.loads(member)) for node, member in fields.items()}

    async def close(self) -> None:
        await self._redis.aclose()

    def _count_excess(self, num_bytes: int) -> int:
        """Return how many of the oldest entries exceed the limit when `num_bytes` are added."""
        excess = self._num_bytes + num_bytes - self._stream_bytes
        for count, (_, size) in enumerate(self._entries):
            if excess <= 0:
                return count
            excess -= size
        return len(self._entries)


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError) as error:
        raise TransportError(f"Redis: {error}") from error
