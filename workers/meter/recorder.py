"""What one rank counted: exact cumulative counters, and a bounded buffer of single timed calls."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from contracts.telemetry import Axis, Cell, Op, Phase
from planner.collectives import bus_factor


class Record(NamedTuple):
    """One finished collective. `start` is monotonic seconds; the duration runs from issue to completion."""

    op: Op
    axis: Axis
    group: str
    payload_bytes: int
    start: float
    duration_s: float
    step: int
    phase: Phase


@dataclass(slots=True)
class Counter:
    """Totals of one (phase, op, axis, group size)."""

    phase: Phase
    op: Op
    axis: Axis
    group_size: int
    count: int = 0
    completed: int = 0
    payload_bytes: int = 0
    busy_s: float = 0.0


class Ticket(NamedTuple):
    """What `issued` hands to `completed`."""

    counter: Counter
    group: str
    payload_bytes: int
    step: int
    start: float


class Recorder:
    """Counts at issue, exactly; times at completion, up to `capacity` calls between two `drain`s.

    Thread safe. Nothing here waits for anything but a lock held for a few instructions. When the buffer is full
    the oldest record goes and is counted as dropped: durations then rest on fewer calls, counters stay exact.
    """

    def __init__(self, rank: int, capacity: int = 65536) -> None:
        self.rank = rank
        self.phase: Phase = "setup"
        self.step = 0
        self.dropped = 0
        self._axes: dict[str, Axis] = {}
        self._counters: dict[tuple[Phase, Op, Axis, int], Counter] = {}
        self._records: deque[tuple[Ticket, float]] = deque()
        self._capacity = capacity
        self._lock = threading.Lock()

    def label(self, group_name: str, axis: Axis) -> None:
        """Say which mesh axis a process group belongs to; unlabelled groups count as "world"."""
        self._axes[group_name] = axis

    def set_phase(self, phase: Phase) -> None:
        """Collectives issued from now on count towards `phase`."""
        self.phase = phase

    def issued(self, op: Op, group_name: str, group_size: int, payload_bytes: int) -> Ticket:
        """Count a call at the moment it is handed to the library."""
        axis = self._axes.get(group_name, "world")
        key = (self.phase, op, axis, group_size)
        with self._lock:
            counter = self._counters.get(key)
            if counter is None:
                counter = self._counters[key] = Counter(*key)
            counter.count += 1
            counter.payload_bytes += payload_bytes
        return Ticket(counter, group_name, payload_bytes, self.step, time.perf_counter())

    def completed(self, ticket: Ticket, duration_s: float | None = None) -> None:
        """Time a call; called from whichever thread saw it finish."""
        if duration_s is None:
            duration_s = time.perf_counter() - ticket.start
        with self._lock:
            if len(self._records) >= self._capacity:
                self._records.popleft()
                self.dropped += 1
            self._records.append((ticket, duration_s))

    def drain(self) -> tuple[list[Record], int]:
        """Take the buffered records, adding their times to the counters. Returns them and all drops so far."""
        with self._lock:
            taken = list(self._records)
            self._records.clear()
            for ticket, duration_s in taken:
                ticket.counter.completed += 1
                ticket.counter.busy_s += duration_s
        return [_record(ticket, duration_s) for ticket, duration_s in taken], self.dropped

    def cells(self, phase: Phase | None = None) -> list[Cell]:
        """A snapshot of the counters, of one phase or all, sorted."""
        with self._lock:
            return [_cell(c) for key, c in sorted(self._counters.items()) if phase in (None, key[0])]


def _record(ticket: Ticket, duration_s: float) -> Record:
    c = ticket.counter
    return Record(c.op, c.axis, ticket.group, ticket.payload_bytes, ticket.start, duration_s, ticket.step, c.phase)


def _cell(c: Counter) -> Cell:
    return Cell(
        phase=c.phase,
        op=c.op,
        axis=c.axis,
        group_size=c.group_size,
        count=c.count,
        completed=c.completed,
        payload_bytes=c.payload_bytes,
        algorithmic_bytes=round(bus_factor(c.op, c.group_size) * c.payload_bytes),
        busy_s=c.busy_s,
    )
