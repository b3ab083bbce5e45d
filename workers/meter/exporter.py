"""Send the counters and items of a rank to its supervisor from a separate thread, so that training never waits.

Counters are cumulative, so traffic needs no queue: each frame carries the cells that changed since the last frame. Only
items and a few timelines wait in bounded queues.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Literal, TypeVar

import msgpack

from contracts.telemetry.batches import Frame, Item
from contracts.telemetry.items import VERSION, Cell, PhaseItem, StartItem, TimelineItem, TrafficItem
from workers.meter.monitors import ResourceMonitor, StallMonitor, TimelineBuilder, get_last_report
from workers.meter.recorder import Recorder

log = logging.getLogger(__name__)
T = TypeVar("T")

PERIOD_S = 0.1
MAX_QUEUED_ITEMS = 10_000  # over 15 minutes at ten steps per second without a supervisor
MAX_ITEMS_PER_FRAME = 200
MAX_TIMELINES = 8  # queued timelines, after which the oldest is dropped
TIMELINES_PER_FRAME = 2

Stage = Literal["imported", "met", "built", "first step"]
_CellKey = tuple[str, str, str, int]


class Exporter:
    """Send a `Frame` every PERIOD_S while new data exists.

    The exporter connects again each period after an error, and sends every cell over a new connection. If the queue is
    full, it drops the oldest step item. Step numbers show the gap.
    """

    def __init__(self, recorder: Recorder, socket_path: str, job: str, attempt: int) -> None:
        self._recorder = recorder
        self._path = socket_path
        self._job = job
        self._attempt = attempt
        self._lock = threading.RLock()  # reentrant, because a signal handler may interrupt `send` and call it
        self._queue: deque[Item] = deque()
        self._timelines: deque[TimelineItem] = deque(maxlen=MAX_TIMELINES)
        self._timeline_builder = TimelineBuilder(recorder, max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1)))
        self._monitors = (StallMonitor(recorder).poll, ResourceMonitor(recorder.rank).poll)
        self._sources: list[Callable[[], Item | None] | Callable[[], None]] = []
        self._stopping = threading.Event()
        self._deadline = float("inf")
        self._flushed = self._has_failed = False
        self._connection: socket.socket | None = None
        self._sent: dict[_CellKey, Cell] = {}
        self._unsent = memoryview(b"")  # rest of the current frame
        self._frame_items: list[Item] = []  # items of the current frame
        self._thread = threading.Thread(target=self._run, name="meter-exporter", daemon=True)
        self._thread.start()

    def send(self, item: Item) -> None:
        """Queue an item for the next frame. Never blocks on the supervisor."""
        with self._lock:
            if len(self._queue) >= MAX_QUEUED_ITEMS:
                steps = (index for index, queued in enumerate(self._queue) if queued["kind"] == "step")
                del self._queue[next(steps, 0)]
            self._queue.append(item)

    def add_source(self, source: Callable[[], Item | None]) -> None:
        """Call `source` before each frame, including the last, and send the item that it returns."""
        self._sources.append(source)

    @property
    def is_closing(self) -> bool:
        """Return True if the exporter sends its last frames."""
        return self._stopping.is_set()

    def report_end(self) -> None:
        """Send the last position of a program that ends, with the exception that ended it."""
        self._poll(lambda: get_last_report(self._recorder, sys.exc_info()[1] or getattr(sys, "last_value", None)))

    def close(self, timeout_s: float = 5.0) -> bool:
        """Send all queued items, the last counters and the last position, then stop. Return False after a timeout."""
        self.report_end()
        self._deadline = time.monotonic() + timeout_s
        self._stopping.set()
        self._thread.join(timeout_s + PERIOD_S)
        return self._flushed

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            self._take_timelines(final=False)
            self._poll(*self._monitors, *self._sources)
            self._try(self._send_new_data)
        self._poll(*self._sources)
        self._recorder.close_trace()
        self._take_timelines(final=True)
        while not self._flushed and time.monotonic() < self._deadline:
            sent = self._try(self._send_new_data)
            self._flushed = sent is True
            if sent is None or (not sent and self._connection is None):
                time.sleep(PERIOD_S)
        if self._connection is not None:
            self._connection.close()

    def _take_timelines(self, *, final: bool) -> None:
        self._timelines.extend(self._try(lambda: self._timeline_builder.take_items(final=final)) or ())

    def _poll(self, *sources: Callable[[], Item | None]) -> None:
        for source in sources:
            if (item := self._try(source)) is not None:
                self.send(item)

    def _try(self, function: Callable[[], T]) -> T | None:
        """Call `function`, and log only its first error.

        The exporter continues after an error, for example too many open files, because a silent rank looks dead.
        """
        try:
            return function()
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                log.exception("the meter skips a report after an error")
            return None

    def _send_new_data(self) -> bool:
        """Send frames until no data is left, and return True. Return False if the supervisor is slow or gone."""
        try:
            if self._connection is None or _is_closed(self._connection):
                self._disconnect()
                self._connect()
            self._push()
            while self._build_next_frame():
                self._push()
                if not self._queue and not self._timelines:  # newly changed counters wait for the next period
                    break
        except TimeoutError:  # the supervisor reads slowly, so this frame continues later
            return False
        except OSError:
            self._disconnect()
            return False
        return True

    def _connect(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(PERIOD_S)
            connection.connect(self._path)
        except OSError:
            connection.close()
            raise
        self._connection = connection

    def _disconnect(self) -> None:
        """Close the connection. The next connection receives every cell and the unfinished frame."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.close()
        self._connection = None
        self._sent = {}
        self._unsent = memoryview(b"")
        with self._lock:
            self._queue.extendleft(reversed(self._frame_items))
        self._frame_items = []

    def _build_next_frame(self) -> bool:
        """Build the next frame. Return False if no new data exists."""
        with self._lock:
            items = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_ITEMS_PER_FRAME))]
        items += [self._timelines.popleft() for _ in range(min(len(self._timelines), TIMELINES_PER_FRAME))]
        self._frame_items = list(items)
        changed = [cell for cell in self._recorder.get_cells() if self._sent.get(_get_key(cell)) != cell]
        if changed:
            rank, dropped = self._recorder.rank, self._recorder.dropped
            items.append(TrafficItem(kind="traffic", rank=rank, time=time.time(), cells=changed, dropped=dropped))
            self._sent.update((_get_key(cell), cell) for cell in changed)
        if not items:
            return False
        frame = Frame(v=VERSION, job=self._job, attempt=self._attempt, rank=self._recorder.rank, items=items)
        body: bytes = msgpack.packb(frame)
        self._unsent = memoryview(struct.pack(">I", len(body)) + body)
        return True

    def _push(self) -> None:
        assert self._connection is not None
        while self._unsent:
            self._unsent = self._unsent[self._connection.send(self._unsent) :]
        self._frame_items = []


def add_telemetry_options(parser: argparse.ArgumentParser) -> None:
    """Add the options with which a supervisor starts the program of a rank."""
    parser.add_argument("--job", default="local")
    parser.add_argument("--attempt", type=int, default=1)
    parser.add_argument("--telemetry", help="Unix socket of the supervisor")


@contextlib.contextmanager
def open_exporter(recorder: Recorder, options: argparse.Namespace) -> Iterator[Callable[[Item], None]]:
    """Yield a function that sends an item, if the options name a socket. Send the phase of a program without phases."""
    if not options.telemetry:
        yield lambda _item: None
        return
    exporter = Exporter(recorder, options.telemetry, options.job, options.attempt)
    try:
        exporter.send(PhaseItem(kind="phase", rank=recorder.rank, time=time.time(), phase="step"))
        yield exporter.send
    finally:
        exporter.close()


class StartReporter:
    """Send the time at which a rank completes each stage of its start, once per stage.

    The numbers of ranks are sent with each stage, if the supervisor does not know them.
    """

    def __init__(
        self,
        rank: int,
        send: Callable[[Item], None],
        world_size: int | None = None,
        local_ranks: int | None = None,
    ) -> None:
        self._rank, self._send = rank, send
        self._world_size, self._local_ranks = world_size, local_ranks
        self._completed: set[Stage] = set()

    def report(self, stage: Stage) -> None:
        if stage not in self._completed:
            self._completed.add(stage)
            item = StartItem(kind="start", rank=self._rank, time=time.time(), stage=stage)
            if self._world_size is not None:
                item["world_size"] = self._world_size
            if self._local_ranks is not None:
                item["local_ranks"] = self._local_ranks
            self._send(item)


def _is_closed(connection: socket.socket) -> bool:
    """Return True if the supervisor closed its end. The supervisor never sends data."""
    connection.settimeout(0)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    finally:
        connection.settimeout(PERIOD_S)


def _get_key(cell: Cell) -> _CellKey:
    return cell["phase"], cell["op"], cell["axis"], cell["group_size"]
