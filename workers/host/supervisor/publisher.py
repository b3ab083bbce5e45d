"""The interface of a supervisor to the board, and telemetry in batches at a limited rate, by the board's clock."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, Protocol

from contracts.codec import MAX_BATCH_BYTES, encode_batch
from contracts.control import AttemptReport
from contracts.telemetry.batches import Batch, ClockOffset, Item
from contracts.telemetry.items import VERSION
from workers.host.supervisor.telemetry_buffer import PendingBatch, TelemetryBuffer

# Per attempt. Unused bytes are saved up, so an outage of a minute loses nothing.
SEND_BYTES_PER_S, SEND_BURST = 2**20, 16 * 2**20
LOG_BYTES_PER_S, LOG_BURST = 128 * 2**10, 4 * 2**20  # of log lines
NUM_CLOCK_EXCHANGES = 8


class TokenBucket:
    """A limit of `rate` bytes per second with a burst of at most `burst` bytes. It starts full."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._tokens, self._filled = burst, time.monotonic()

    def get_level(self) -> int:
        """Return the bytes that can be spent now."""
        now = time.monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._filled) * self._rate)
        self._filled = now
        return max(0, int(self._tokens))

    def spend(self, num_bytes: int) -> None:
        """Spend bytes. The level can become negative."""
        self._tokens -= num_bytes

    async def wait_for_credit(self) -> None:
        """Wait until the level is not negative."""
        self.get_level()
        if self._tokens < 0:
            await asyncio.sleep(-self._tokens / self._rate)


class BoardClock:
    """The offset between the board's clock and this host's clock, measured as NTP does. 0 before the measurement."""

    def __init__(self) -> None:
        self.offset_s = 0.0
        self.within_s: float | None = None

    async def measure(self, get_time: Callable[[], Awaitable[float]]) -> None:
        """Measure the offset with the quickest of several exchanges.

        Args:
            get_time: returns the board's time in unix seconds. Its exceptions are passed on.
        """
        best = (math.inf, 0.0)
        for _ in range(NUM_CLOCK_EXCHANGES):
            sent, began = time.time(), time.monotonic()
            board_time = await get_time()
            round_trip_s = time.monotonic() - began
            best = min(best, (round_trip_s, board_time - (sent + round_trip_s / 2)))
        self.within_s, self.offset_s = best[0] / 2, best[1]

    def get_time(self) -> float:
        """Return unix seconds by the board's clock."""
        return time.time() + self.offset_s

    def to_message(self) -> ClockOffset | None:
        """Return the measured offset, or None before the measurement."""
        return None if self.within_s is None else ClockOffset(offset_s=self.offset_s, within_s=self.within_s)


class Publisher:
    """Send the content of a `TelemetryBuffer`.

    A batch that the board may have is sent again unchanged. The board ignores a batch with a known number, so a batch
    with new content under the same number would be lost.
    """

    def __init__(
        self,
        job: str,
        attempt: int,
        buffer: TelemetryBuffer,
        transport: BoardTransport,
        host: str = "",
        clock: BoardClock | None = None,
    ) -> None:
        self._job, self._attempt = job, attempt
        self._buffer, self._transport = buffer, transport
        self._host, self._clock = host, clock or BoardClock()
        self._unconfirmed: tuple[PendingBatch, bytes] | None = None
        self._all, self._logs = TokenBucket(SEND_BYTES_PER_S, SEND_BURST), TokenBucket(LOG_BYTES_PER_S, LOG_BURST)

    async def send(self) -> bool:
        """Send the buffered items as fast as the limits allow. Return False if the board did not accept a batch."""
        while (batch := self._unconfirmed or self._take_next()) is not None:
            self._unconfirmed = pending, body = batch
            try:
                await self._transport.publish(body)
            except MessageRefusedError:
                self._unconfirmed = None
                self._buffer.count_lost(len(pending.items))
                return False
            except TransportError:
                return False
            self._unconfirmed = None
            self._all.spend(len(body))
            self._logs.spend(pending.log_size)
        self._buffer.thin_logs()
        return True

    async def send_last(self, *, late: bool) -> bool:
        """Send the rest after the attempt has ended. Return whether all is sent.

        Args:
            late: drop waiting log lines, and send only their number.
        """
        self._buffer.flush_skipped(late=late)
        return await self.send() and (late or self._buffer.is_empty())

    def _take_next(self) -> tuple[PendingBatch, bytes] | None:
        pending = self._buffer.take(min(self._all.get_level(), MAX_BATCH_BYTES), self._logs.get_level())
        return None if pending is None else (pending, encode_batch(self._build_batch(pending.items)))

    def _build_batch(self, items: list[Item]) -> Batch:
        batch = Batch(v=VERSION, job=self._job, attempt=self._attempt, time=self._clock.get_time(), items=items)
        if self._host:
            batch["host"] = self._host
        if clock := self._clock.to_message():
            batch["clock"] = clock
        return batch


class TransportError(Exception):
    """The board is unreachable, or could not accept a message now. Send it again later."""


class MessageRefusedError(TransportError):
    """The board rejected a message, and will reject it again."""


class ReadyMember(NamedTuple):
    """A host of a multi-host job that waits for the others. `port` is that of the leader's store, or else 0."""

    address: str
    port: int


class BoardTransport(Protocol):
    """One attempt's connection to the board. Every method except `close` raises TransportError."""

    async def publish(self, batch: bytes) -> None:
        """Send one msgpack `Batch` of telemetry, and return when the board has it.

        After a TransportError or a cancellation, the board may have the batch. Send the identical bytes again before
        other batches, and the board takes them once. After MessageRefusedError, do not send them again.
        """

    async def send_report(self, report: AttemptReport) -> None:
        """Send the state of the attempt."""

    async def is_cancelled(self) -> bool:
        """Return whether the attempt must end."""

    async def get_requested_steps(self) -> frozenset[int]:
        """Return the steps whose timelines a user requested."""

    async def renew_stream(self) -> None:
        """Restart the expiry of the telemetry, after the last batch."""

    async def get_time(self) -> float:
        """Return the board's clock in unix seconds."""

    async def is_save_requested(self) -> bool:
        """Return whether the run must save a checkpoint and stop."""

    async def get_loan_address(self, host: str) -> ReadyMember | None:
        """Return the address at which a host sends a checkpoint, or None until the host has published it."""

    async def announce_ready(self, node: int, ready: ReadyMember) -> None:
        """Publish that this host is ready."""

    async def get_ready_members(self) -> Mapping[int, ReadyMember]:
        """Return the hosts that are ready, by node."""

    async def close(self) -> None:
        """Close the connection."""
