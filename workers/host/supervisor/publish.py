"""What an attempt says to Redis: its telemetry stream, bounded in bytes, and its state to the controller."""

from __future__ import annotations

import json
import time
from collections import deque
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from contracts.codec import BATCH_BYTES, encode_batch, encode_event
from contracts.control import VERSION, AttemptEvent, AttemptReport
from contracts.names import EVENTS_STREAM, cancel_key, gang_key, telemetry_stream
from contracts.telemetry import VERSION as TELEMETRY_VERSION
from contracts.telemetry import Batch
from workers.host.attempts import AttemptDir
from workers.host.reporter import EVENTS_KEPT
from workers.host.settings import HostSettings
from workers.host.supervisor.board import Board
from workers.host.supervisor.bucket import Bucket
from workers.host.supervisor.clock import BoardClock
from workers.host.supervisor.gang import Ready

# What is not sent while Redis is away is saved up: a minute's outage costs nothing.
SEND_BYTES_PER_S, SEND_BURST = 2**20, 16 * 2**20  # of one attempt
LOG_BYTES_PER_S, LOG_BURST = 128 * 2**10, 4 * 2**20  # of these, log lines
STREAM_KEPT_S = 24 * 3600  # after the attempt last gave a sign of life
RENEW_S = 60.0


class Publisher:
    """One attempt's way to Redis."""

    def __init__(
        self, attempt: AttemptDir, settings: HostSettings, board: Board, clock: BoardClock, node: int = 0
    ) -> None:
        self._attempt, self._board, self._clock = attempt, board, clock
        self._host, self._stream_bytes = settings.name, settings.stream_bytes
        self._redis = redis.asyncio.Redis.from_url(
            settings.redis_url, socket_timeout=5, socket_connect_timeout=2, health_check_interval=10
        )
        self._stream = telemetry_stream(attempt.job, attempt.attempt, node)
        self._gang = gang_key(attempt.job, attempt.attempt)
        self._all, self._logs = Bucket(SEND_BYTES_PER_S, SEND_BURST), Bucket(LOG_BYTES_PER_S, LOG_BURST)
        self._entries: deque[tuple[str, int]] = deque()  # what we put into the stream: id and bytes
        self._num_bytes = self._number = 0
        self._renew_at = 0.0

    async def send(self) -> bool:
        """Send what waits, as far as it may. False when Redis did not take it."""
        while (load := self._board.take(min(self._all.level(), BATCH_BYTES), self._logs.level())) is not None:
            batch = Batch(
                v=TELEMETRY_VERSION,
                job=self._attempt.job,
                attempt=self._attempt.attempt,
                time=self._clock.now(),
                items=load.items,
                host=self._host,
            )
            if clock := self._clock.told():
                batch["clock"] = clock
            body = encode_batch(batch)
            try:
                await self._add(body)
            except (RedisError, OSError):
                self._board.give_back(load)
                return False
            self._all.spend(len(body))
            self._logs.spend(load.log_size)
        self._board.thin_logs()
        return True

    async def _add(self, body: bytes) -> None:
        """One entry more; of the oldest as many less as keep the stream below its bound."""
        entry: Any = await self._redis.xadd(self._stream, {"b": body, "n": self._number})
        self._number += 1
        self._entries.append((entry.decode(), len(body)))
        self._num_bytes += len(body)
        if self._num_bytes > self._stream_bytes:
            while self._num_bytes > self._stream_bytes:
                self._num_bytes -= self._entries.popleft()[1]
            oldest = self._entries[0][0] if self._entries else "+"
            await self._redis.xtrim(self._stream, minid=oldest, approximate=False)
        await self.renew()

    async def renew(self) -> None:
        """Let the stream live on for STREAM_KEPT_S. Raises RedisError."""
        # Redis sets no expiry on what is not there yet, or not there any more: then the next call asks again.
        if time.monotonic() >= self._renew_at and await self._redis.expire(self._stream, STREAM_KEPT_S):
            self._renew_at = time.monotonic() + RENEW_S

    async def renew_last(self) -> bool:
        """After the last entry: a stream that was lost and begun anew meanwhile expires too. False when Redis did not
        take it."""
        try:
            await self._redis.expire(self._stream, STREAM_KEPT_S)
        except (RedisError, OSError):
            return False
        return True

    async def report(self, report: AttemptReport) -> bool:
        """Tell the controller the state. False when Redis did not take it."""
        event = AttemptEvent(kind="attempt", v=VERSION, host=self._host, time=self._clock.now(), report=report)
        try:
            await self.renew()
            await self._redis.xadd(EVENTS_STREAM, {"b": encode_event(event)}, maxlen=EVENTS_KEPT, approximate=True)
        except (RedisError, OSError):
            return False
        return True

    async def cancelled(self) -> bool:
        """Has the controller raised the flag? Raises RedisError."""
        return bool(await self._redis.exists(cancel_key(self._attempt.job, self._attempt.attempt)))

    async def now(self) -> float:
        """The board's clock, unix seconds. Raises RedisError."""
        told: Any = await self._redis.time()
        return float(told[0] + told[1] / 1e6)

    async def say_ready(self, node: int, ready: Ready) -> None:
        """Raises RedisError."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(self._gang, str(node), json.dumps(ready._asdict()))
            pipe.expire(self._gang, STREAM_KEPT_S)
            await pipe.execute()

    async def who_is_ready(self) -> dict[int, Ready]:
        """By node. Raises RedisError."""
        told: Any = await self._redis.hgetall(self._gang)
        return {int(node): Ready(**json.loads(said)) for node, said in told.items()}

    async def close(self) -> None:
        await self._redis.aclose()
