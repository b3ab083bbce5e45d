"""What one rank sent: exact cumulative counters, and the last records one by one.

Counters are counted when a collective is issued and again when it completes, always in the cell (phase, op,
axis) it was issued in. They never lose a byte. Records are kept in a bounded buffer: when nobody drains it,
the oldest go and are counted in `dropped`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, get_args

from contracts.telemetry import Axis, Cell, Label, Op, Phase
from planner.facts.collectives import algorithmic_bytes

AXES: frozenset[str] = frozenset(get_args(Axis))
MAX_NAMES = 64  # a script may make thousands of groups
OTHER_GROUPS = "other groups"
PHASES: frozenset[str] = frozenset(get_args(Phase))


class Record(NamedTuple):
    """One completed collective. `start` is unix seconds, `duration_s` monotonic."""

    op: Op
    axis: Label
    group: str
    payload_bytes: int
    start: float
    duration_s: float
    step: int
    phase: Phase


class _Counters:
    """Running totals of one (phase, op, axis, group size)."""

    __slots__ = ("busy_s", "completed", "count", "payload_bytes", "uneven_bytes", "uneven_sent_bytes")

    def __init__(self) -> None:
        self.count = 0
        self.completed = 0
        self.payload_bytes = 0
        self.uneven_bytes = 0  # of the payload, what ranks share unevenly
        self.uneven_sent_bytes = 0  # of that, what left this rank
        self.busy_s = 0.0


_Key = tuple[Phase, Op, Label, int]


class Pending:
    """A collective on its way. Calling it (as a future's callback does) says that it is complete."""

    __slots__ = ("_recorder", "counters", "group", "key", "payload_bytes", "started_s", "step")

    def __init__(self, recorder: Recorder, key: _Key, counters: _Counters, group: str, payload_bytes: int) -> None:
        self._recorder: Recorder | None = recorder
        self.key = key
        self.counters = counters
        self.group = group
        self.payload_bytes = payload_bytes
        self.step = recorder.step
        self.started_s = time.perf_counter()

    def __call__(self, _future: object = None) -> None:
        self.complete(time.perf_counter() - self.started_s)

    def complete(self, duration_s: float) -> None:
        """Count it once; later calls change nothing (a work may be waited for twice)."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder._complete(self, duration_s)


class Recorder:
    """Counters and records of one rank. Thread safe: collectives end on the backend's own threads."""

    def __init__(self, rank: int, capacity: int = 65536) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 record, got {capacity}")
        self.rank = rank
        self.step = 0
        self._phase: Phase = "setup"
        self._axes: dict[str, Label] = {}
        self._phases: dict[str, Phase] = {}
        self._cells: dict[_Key, _Counters] = {}
        self._records: deque[tuple[Pending, float]] = deque()
        self._capacity = capacity
        self._dropped = 0
        self._pollers: list[Callable[[], None]] = []
        # Reentrant: a signal handler may take a snapshot while its own thread is counting.
        self._lock = threading.RLock()
        self._unix_offset_s = time.time() - time.perf_counter()

    @property
    def phase(self) -> Phase:
        """The phase that collectives issued from now on are counted in."""
        return self._phase

    @property
    def dropped(self) -> int:
        """Records the bounded buffer had to let go so far."""
        return self._dropped

    def set_phase(self, phase: Phase) -> None:
        """Count what is issued from now on in `phase`; what is on its way stays where it was issued."""
        if phase not in PHASES:
            raise ValueError(f"phase must be one of {sorted(PHASES)}, got {phase!r}")
        self._phase = phase

    def label(self, group_name: str, axis: Axis, phase: Phase | None = None) -> None:
        """Count the collectives of the group so named under `axis` from now on.

        With a `phase`, always in that one: a group whose work goes on beside training.
        """
        if axis not in AXES:
            raise ValueError(f"axis must be one of {sorted(AXES)}, got {axis!r}")
        self._axes[group_name] = axis
        if phase is not None:
            self._phases[group_name] = phase

    def name_group(self, group_name: str, words: str) -> None:
        """Count a group of a user's own script under the words for it; beyond MAX_NAMES, under those for the rest."""
        known = set(self._axes.values())
        self._axes[group_name] = words if words in known or len(known) < MAX_NAMES else OTHER_GROUPS

    def axis_of(self, group_name: str) -> Label:
        """What a group is counted under; "world" until it is labelled."""
        return self._axes.get(group_name, "world")

    def issue(
        self, op: Op, group_name: str, group_size: int, payload_bytes: int, sent_bytes: int | None = None
    ) -> Pending:
        """Count a collective that is being issued now; call what is returned when it completes.

        `sent_bytes`: what leaves this rank, where the caller says how much goes to whom.
        """
        phase = self._phases.get(group_name, self._phase)
        key = (phase, op, self._axes.get(group_name, "world"), group_size)
        with self._lock:
            counters = self._cells.get(key)
            if counters is None:
                counters = self._cells[key] = _Counters()
            counters.count += 1
            counters.payload_bytes += payload_bytes
            if sent_bytes is not None:
                counters.uneven_bytes += payload_bytes
                counters.uneven_sent_bytes += sent_bytes
        return Pending(self, key, counters, group_name, payload_bytes)

    def _complete(self, pending: Pending, duration_s: float) -> None:
        counters = pending.counters
        with self._lock:
            counters.completed += 1
            counters.busy_s += duration_s
            if len(self._records) >= self._capacity:
                self._records.popleft()
                self._dropped += 1
            self._records.append((pending, duration_s))

    def add_poller(self, poll: Callable[[], None]) -> None:
        """`poll` is called before each snapshot: it completes what a device finished without telling."""
        self._pollers.append(poll)

    def cells(self, phase: Phase | None = None) -> list[Cell]:
        """Snapshot of the cumulative counters, of one phase or of all, sorted by (phase, op, axis, group size)."""
        for poll in self._pollers:
            poll()
        with self._lock:
            chosen = sorted((item for item in self._cells.items() if phase in (None, item[0][0])), key=_by_key)
            return [_cell(key, counters) for key, counters in chosen]

    def drain(self) -> tuple[list[Record], int]:
        """Completed collectives since the last drain, oldest first, and how many were dropped so far."""
        with self._lock:
            kept, self._records = self._records, deque()
            dropped = self._dropped
        return [self._record(pending, duration_s) for pending, duration_s in kept], dropped

    def _record(self, pending: Pending, duration_s: float) -> Record:
        phase, op, axis, _ = pending.key
        start = pending.started_s + self._unix_offset_s
        return Record(op, axis, pending.group, pending.payload_bytes, start, duration_s, pending.step, phase)


def _by_key(item: tuple[_Key, _Counters]) -> _Key:
    return item[0]


def _cell(key: _Key, counters: _Counters) -> Cell:
    phase, op, axis, group_size = key
    even_sent_bytes = algorithmic_bytes(op, counters.payload_bytes - counters.uneven_bytes, group_size)
    return {
        "phase": phase,
        "op": op,
        "axis": axis,
        "group_size": group_size,
        "count": counters.count,
        "completed": counters.completed,
        "payload_bytes": counters.payload_bytes,
        "algorithmic_bytes": even_sent_bytes + counters.uneven_sent_bytes,
        "busy_s": counters.busy_s,
    }
