"""Tells the supervisor what a rank counted, from a thread of its own: training never waits for it.

Counters are cumulative, so traffic needs no queue: each frame carries the cells that changed since the last
one, whenever that could be sent. Only the items handed to `send` wait, in a bounded queue, and a few steps' timelines.

How a rank came to its first step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal, TypeVar

import msgpack

from contracts.telemetry.batches import Frame, Item
from contracts.telemetry.steps import Cell, StartItem, TrafficItem
from contracts.telemetry.timeline import TimelineItem
from contracts.telemetry.vocabulary import VERSION
from workers.meter.monitors import ResourceMonitor, StallMonitor
from workers.meter.recorder import Recorder
from workers.meter.timeline import TimelineBuilder

log = logging.getLogger(__name__)
T = TypeVar("T")

PERIOD_S = 0.1
MAX_QUEUED_ITEMS = 10_000  # items, over a quarter of an hour of ten steps a second without a supervisor
MAX_ITEMS_PER_FRAME = 200
MAX_TIMELINES = 8  # that wait; the oldest goes
TIMELINES_PER_FRAME = 2

_CellKey = tuple[str, str, str, int]


class Exporter:
    """Sends a `Frame` every PERIOD_S while there is something new.

    A missing or broken socket is tried again each period, and a fresh connection gets every cell again. When
    the queue is full the oldest step item goes first: step numbers show the gap, and other kinds stay.
    """

    def __init__(self, recorder: Recorder, socket_path: str, job: str, attempt: int) -> None:
        self._recorder = recorder
        self._path = socket_path
        self._job = job
        self._attempt = attempt
        self._lock = threading.RLock()  # reentrant: a signal handler may say a last word in the middle of `send`
        self._waiting: deque[Item] = deque()
        self._timelines = TimelineBuilder(recorder, max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1)))
        self._looks: tuple[Callable[[], Item | None], ...] = (
            StallMonitor(recorder).poll,
            ResourceMonitor(recorder.rank).poll,
        )
        self._watched: list[Callable[[], Item | None]] = []
        self._steps: deque[TimelineItem] = deque(maxlen=MAX_TIMELINES)
        self._stopping = threading.Event()
        self._deadline = float("inf")
        self._flushed = self._failed = False
        self._connection: socket.socket | None = None
        self._sent: dict[_CellKey, Cell] = {}
        self._unsent = memoryview(b"")  # the rest of a frame that is under way
        self._under_way: list[Item] = []
        self._thread = threading.Thread(target=self._run, name="meter-exporter", daemon=True)
        self._thread.start()

    def send(self, item: Item) -> None:
        """Queue an item for the next frame; never waits for the supervisor."""
        with self._lock:
            if len(self._waiting) >= MAX_QUEUED_ITEMS:
                steps = (place for place, held in enumerate(self._waiting) if held["kind"] == "step")
                del self._waiting[next(steps, 0)]
            self._waiting.append(item)

    def add_source(self, look: Callable[[], Item | None]) -> None:
        """Call it before each frame, the last too, and tell what it gives."""
        self._watched.append(look)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Send everything queued and the last counters, then stop. False when `timeout_s` was not enough."""
        self._deadline = time.monotonic() + timeout_s
        self._stopping.set()
        self._thread.join(timeout_s + PERIOD_S)
        return self._flushed

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            self._take_steps(final=False)
            self._look(*self._looks, *self._watched)
            self._tried(self._send_what_is_new)
        self._look(*self._watched)
        self._recorder.close_trace()
        self._take_steps(final=True)
        while not self._flushed and time.monotonic() < self._deadline:
            told = self._tried(self._send_what_is_new)
            self._flushed = told is True
            if told is None or (not told and self._connection is None):
                time.sleep(PERIOD_S)
        if self._connection is not None:
            self._connection.close()

    def _take_steps(self, *, final: bool) -> None:
        self._steps.extend(self._tried(lambda: self._timelines.take_items(final=final)) or ())

    def _look(self, *looks: Callable[[], Item | None]) -> None:
        for look in looks:
            if (item := self._tried(look)) is not None:
                self.send(item)

    def _tried(self, work: Callable[[], T]) -> T | None:
        """What fails, with too many files open, say, is not told, but for the first in the rank's log; all else is: a
        silent rank looks dead."""
        try:
            return work()
        except Exception:
            if not self._failed:
                self._failed = True
                log.exception("the meter skips a report after an error")
            return None

    def _send_what_is_new(self) -> bool:
        """True once nothing is left to send."""
        try:
            if self._connection is None or _hung_up(self._connection):
                self._disconnect()
                self._connect()
            self._push()
            while self._next_frame():
                self._push()
                if not self._waiting and not self._steps:  # counters may have moved again: that is for the next period
                    break
        except TimeoutError:  # the supervisor reads slowly: go on with this frame later
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
        """Forget the connection; whoever answers next hears every cell, and the frame that was under way."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.close()
        self._connection = None
        self._sent = {}
        self._unsent = memoryview(b"")
        with self._lock:
            self._waiting.extendleft(reversed(self._under_way))
        self._under_way = []

    def _next_frame(self) -> bool:
        """Put the next frame under way; False when there is nothing new."""
        with self._lock:
            items = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_ITEMS_PER_FRAME))]
        items += [self._steps.popleft() for _ in range(min(len(self._steps), TIMELINES_PER_FRAME))]
        self._under_way = list(items)
        changed = [cell for cell in self._recorder.get_cells() if self._sent.get(_key(cell)) != cell]
        if changed:
            items.append(self._traffic(changed))
            self._sent.update((_key(cell), cell) for cell in changed)
        if not items:
            return False
        frame = Frame(v=VERSION, job=self._job, attempt=self._attempt, rank=self._recorder.rank, items=items)
        body: bytes = msgpack.packb(frame)
        self._unsent = memoryview(struct.pack(">I", len(body)) + body)
        return True

    def _traffic(self, cells: list[Cell]) -> TrafficItem:
        return {
            "kind": "traffic",
            "rank": self._recorder.rank,
            "time": time.time(),
            "cells": cells,
            "dropped": self._recorder.dropped,
        }

    def _push(self) -> None:
        assert self._connection is not None
        while self._unsent:
            self._unsent = self._unsent[self._connection.send(self._unsent) :]
        self._under_way = []


def _hung_up(connection: socket.socket) -> bool:
    """True when the supervisor closed its end; it never says anything, so there is nothing else to read."""
    connection.settimeout(0)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    finally:
        connection.settimeout(PERIOD_S)


def _key(cell: Cell) -> _CellKey:
    return cell["phase"], cell["op"], cell["axis"], cell["group_size"]


Stage = Literal["imported", "met", "built", "first step"]


class StartReporter:
    """Tells each stage when it is over, once."""

    def __init__(self, rank: int, send: Callable[[Item], None]) -> None:
        self._rank, self._send = rank, send
        self._over: set[Stage] = set()

    def report(self, stage: Stage) -> None:
        if stage not in self._over:
            self._over.add(stage)
            self._send(StartItem(kind="start", rank=self._rank, time=time.time(), stage=stage))
