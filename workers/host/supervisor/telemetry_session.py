"""Telemetry of one attempt on one node, from the socket and the logs of its ranks to the board."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from contracts.codec import BadMessageError, validate_item
from contracts.control import Outcome
from contracts.telemetry.batches import Item
from contracts.telemetry.items import GaugeItem, LogItem
from contracts.telemetry.metrics import MetricItem
from workers.host.supervisor.exit_report import SummaryBuilder
from workers.host.supervisor.health import RankMonitor
from workers.host.supervisor.log_metrics import LogMetrics
from workers.host.supervisor.log_tail import LogTail, follow_logs
from workers.host.supervisor.publisher import BoardClock, BoardTransport, Publisher, TransportError
from workers.host.supervisor.telemetry_buffer import TelemetryBuffer, TimelineSampler

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
HEARTBEAT_INTERVAL_S = 5.0
CLOCK_INTERVAL_S = 30.0
LAST_LINES_TIMEOUT_S = 10.0
CANCEL_INTERVAL_S = 0.2
RETRY_AFTER_ERROR_S = 5.0

Work = Callable[[], Awaitable[object]]


class TelemetrySession:
    """Collect the telemetry of one attempt on this node, and send it to the board.

    Subclasses start the processes. `transport` and `publisher` are None until the board knows the attempt.
    """

    transport: BoardTransport | None = None
    publisher: Publisher | None = None
    tail: LogTail | None = None
    log_metrics: LogMetrics | None = None  # of scripts

    def __init__(self, ranks: range) -> None:
        self.buffer, self.clock = TelemetryBuffer(), BoardClock()
        self.monitor = RankMonitor(self._record)
        self.ended_by: Outcome | None = None  # set if this session ended the attempt
        self._finished = asyncio.Event()
        self._set_ranks(ranks)

    def _set_ranks(self, ranks: range) -> None:
        self.summary = SummaryBuilder(ranks[0])
        self.timelines = TimelineSampler(ranks, self.buffer.add_step)

    async def _collect(
        self,
        server: asyncio.Server,
        processes: Awaitable[int],
        work: Iterable[tuple[Work, float]],
        others: Iterable[asyncio.Task[None]] = (),
    ) -> int:
        """Collect telemetry until the processes end, and return their exit code.

        Args:
            work: functions to call periodically, with intervals in seconds.
            others: tasks to cancel at the end.
        """
        common = (
            (self._try_report, HEARTBEAT_INTERVAL_S),
            (self._measure_clock, CLOCK_INTERVAL_S),
            (self.monitor.check, POLL_INTERVAL_S),
        )
        tasks = [asyncio.create_task(run_periodically(one, interval_s)) for one, interval_s in (*common, *work)]
        tail = asyncio.create_task(follow_logs(lambda: self.tail, self._record_log, self._finished))
        code = await processes
        self._finished.set()
        # A disk that hangs must not keep the slots in use. The last lines are then missing.
        await asyncio.wait([tail], timeout=LAST_LINES_TIMEOUT_S)
        await cancel_tasks([*tasks, *others, tail])
        self._record_metrics(self.log_metrics.take_last() if self.log_metrics else ())
        server.close()
        self.timelines.finish()
        return code

    def _receive_item(self, item: Item) -> None:
        """Process a checked item of a rank."""
        if item["kind"] == "timeline":
            item["time"] += self.clock.offset_s
            self.timelines.add(item)
            return
        self.monitor.add(item)
        self._add(item)

    def _add(self, item: Item) -> None:
        """Add an item with a time of this host's clock."""
        item["time"] += self.clock.offset_s
        self.summary.add(item)
        self.buffer.add(item)

    def _record(self, item: Item) -> None:
        """Add an item of this process. It is checked, because the board rejects a whole batch for one bad item."""
        try:
            self._add(validate_item(item))
        except BadMessageError as error:
            log.warning("dropped a %s item of the supervisor: %s", item["kind"], error)
            self.buffer.count_lost(1)

    def _record_log(self, item: LogItem) -> None:
        """Add new log lines, and the metrics in these lines."""
        self._record(item)
        if self.log_metrics is not None:
            self._record_metrics(self.log_metrics.read(item))

    def _record_metrics(self, items: Iterable[MetricItem]) -> None:
        for item in items:
            self._record(item)

    def _record_gauges(self, items: list[GaugeItem]) -> None:
        for item in items:
            self._record(item)

    async def _measure_clock(self) -> None:
        if self.transport is not None:
            with contextlib.suppress(TransportError):
                await self.clock.measure(self.transport.get_time)

    async def _report(self) -> None:
        """Send the state of the attempt. Raises TransportError."""
        raise NotImplementedError

    async def _try_report(self) -> None:
        with contextlib.suppress(TransportError):  # the next report has the same content
            await self._report()


async def cancel_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until all have ended. A Redis call that times out in the same moment loses a cancellation."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_INTERVAL_S)


async def run_periodically(work: Work, interval_s: float) -> None:
    """Repeat some work forever, also after errors."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("%s failed", work)
            await asyncio.sleep(RETRY_AFTER_ERROR_S)
        await asyncio.sleep(interval_s)
