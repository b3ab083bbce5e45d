"""What one rank sent: exact cumulative counters, and the last records one by one.

Counters are counted when a collective is issued and again when it completes, always in the cell (phase, op,
axis) it was issued in. They never lose a byte. Records are kept in a bounded buffer: when nobody drains it,
the oldest go and are counted in `dropped`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, get_args

from contracts.telemetry.steps import Cell, StepBreakdown
from contracts.telemetry.timeline import GroupRanks
from contracts.telemetry.vocabulary import Axis, Label, Op, Phase, Work
from planner.facts.collectives import compute_algorithmic_bytes
from workers.meter.collectives import (
    MAX_CALLS_PER_STEP,
    CellKey,
    Collective,
    Counters,
    GroupRegistry,
    GroupState,
    SpanTimer,
    StepTimes,
    StepTrace,
)

AXES: frozenset[str] = frozenset(get_args(Axis))
MAX_GROUP_LABELS = 64  # a script may make thousands of groups
OTHER_GROUPS_LABEL = "other groups"
PHASES: frozenset[str] = frozenset(get_args(Phase))
MAX_TRACES = 8  # of steps that nobody took yet


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


class Recorder:
    """Counters and records of one rank. Thread safe: collectives end on the backend's own threads."""

    def __init__(self, rank: int, capacity: int = 65536) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}, expected at least 1 record")
        self.rank = rank
        self.step = 0
        self._phase: Phase = "setup"
        self._axes: dict[str, Label] = {}
        self._phases: dict[str, Phase] = {}
        self._cells: dict[CellKey, Counters] = {}
        self._records: deque[tuple[Collective, float]] = deque()
        self._capacity = capacity
        self._dropped = 0
        self._pollers: list[Callable[[], None]] = []
        self.groups = GroupRegistry()
        self.completed_steps = 0  # steps
        self.blocking: Collective | None = None  # the training thread, now
        self.last_progress_s = time.perf_counter()  # when something was last issued, or ended, or began
        self._shares = StepTimes()
        self._log: StepTrace | None = None
        self._logs: deque[StepTrace] | None = None
        # Reentrant: a signal handler may take a snapshot while its own thread is counting.
        self._lock = threading.RLock()

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
            raise ValueError(f"phase is {phase!r}, expected one of {sorted(PHASES)}")
        self._phase = phase
        self.last_progress_s = time.perf_counter()

    def enable_tracing(self) -> None:
        """From the next step on, keep what each was, for `take_steps`."""
        self._logs = deque(maxlen=MAX_TRACES)

    def begin_step(self, step: int) -> None:
        """What is issued from now on is of this step, which is the `step`th."""
        self.close_trace()
        with self._lock:
            self._shares.begin_step()
        if self._logs is not None:
            self._log = StepTrace(step)
        self.last_progress_s = time.perf_counter()

    def end_step(self, step: int) -> StepBreakdown:
        """The step is over; what comes before the next is kept with it. Records of it are let go."""
        for poll in self._pollers:
            poll()
        with self._lock:
            parts = self._shares.end_step()
            self._records.clear()
        self.completed_steps = step
        if self._log is not None:
            self._log.ended_s = time.perf_counter()
        return parts

    def close_trace(self) -> None:
        """Nothing more belongs to the step that ended; of one that did not, nothing is kept."""
        log, self._log = self._log, None
        if log is not None and log.ended_s and self._logs is not None:
            self._logs.append(log)

    def take_traces(self) -> list[StepTrace]:
        """Those that are closed, in their order."""
        logs = self._logs
        return [logs.popleft() for _ in range(len(logs))] if logs else []

    def time_span(self, work: Work, chunk: int = -1, micro_batch: int = -1) -> SpanTimer:
        """The training thread does this while what is given is entered."""
        return SpanTimer(self._log, self._shares, work, chunk, micro_batch)

    def add_group(self, name: str, ranks: Sequence[int], *, on_device: bool = False) -> GroupState:
        """A group has been made."""
        with self._lock:
            return self.groups.add(name, ranks, on_device=on_device)

    def get_group_ranks(self, group: GroupState) -> GroupRanks:
        """By what all its ranks know a group."""
        return self.groups.get_group_ranks(group, self.get_label)

    def get_progress(self, group: GroupState) -> tuple[int, int, Collective | None]:
        """Collectives issued and ended on a group, and the oldest of what is on its way there."""
        with self._lock:
            return group.issued, group.ended, next(iter(group.in_flight), None)

    def label_group(self, group_name: str, axis: Axis, phase: Phase | None = None) -> None:
        """Count the collectives of the group so named under `axis` from now on.

        With a `phase`, always in that one: a group whose work goes on beside training.
        """
        if axis not in AXES:
            raise ValueError(f"axis is {axis!r}, expected one of {sorted(AXES)}")
        self._axes[group_name] = axis
        if phase is not None:
            self._phases[group_name] = phase

    def name_group(self, group_name: str, words: str) -> None:
        """Count a group of a user's own script under the words for it; beyond MAX_NAMES, under those for the rest."""
        known = set(self._axes.values())
        self._axes[group_name] = words if words in known or len(known) < MAX_GROUP_LABELS else OTHER_GROUPS_LABEL

    def get_label(self, group_name: str) -> Label:
        """What a group is counted under; "world" until it is labelled."""
        return self._axes.get(group_name, "world")

    def issue(
        self,
        op: Op,
        group_name: str,
        group_size: int,
        payload_bytes: int,
        sent_bytes: int | None = None,
        peer: int | None = None,
    ) -> Collective:
        """Count a collective that is being issued now; call what is returned when it completes.

        `sent_bytes`: what leaves this rank, where the caller says how much goes to whom. `peer`: the rank in the group
        at the other end of a send or receive.
        """
        phase = self._phases.get(group_name, self._phase)
        key = (phase, op, self._axes.get(group_name, "world"), group_size)
        with self._lock:
            counters = self._cells.get(key)
            if counters is None:
                counters = self._cells[key] = Counters()
            counters.count += 1
            counters.payload_bytes += payload_bytes
            if sent_bytes is not None:
                counters.uneven_bytes += payload_bytes
                counters.uneven_sent_bytes += sent_bytes
            group = self.groups.get(group_name, group_size)
            other = -1 if peer is None else group.ranks[peer]
            pending = Collective(self, key, counters, group, payload_bytes, other)
            group.in_flight[pending] = None
            if phase == "step":
                pending.axis_time = share = self._shares.get_axis(key[2])
                if op != "recv" and not group.on_device:
                    share.start_collective(pending.started_s)
            log = self._log
            if log is not None:
                if len(log.calls) < MAX_CALLS_PER_STEP:
                    log.calls.append(pending)
                else:
                    log.left_out += 1
        self.last_progress_s = pending.started_s
        return pending

    def complete(self, pending: Collective, duration_s: float) -> None:
        """It is over: `Pending` says so, once."""
        counters = pending.counters
        now_s = time.perf_counter()
        with self._lock:
            counters.completed += 1
            counters.busy_s += duration_s
            if len(self._records) >= self._capacity:
                self._records.popleft()
                self._dropped += 1
            self._records.append((pending, duration_s))
            _end(pending, now_s, duration_s)
        self.last_progress_s = now_s

    def abandon(self, pending: Collective) -> None:
        """It failed, or nobody will ever ask for its end: issued, not complete. `Pending` says so, once."""
        now_s = time.perf_counter()
        with self._lock:
            _end(pending, now_s, 0.0)
        self.last_progress_s = now_s

    def undo_issue(self, pending: Collective, sent_bytes: int | None) -> None:
        """The backend refused what was issued: nothing was sent."""
        pending.abandon()
        counters = pending.counters
        with self._lock:
            counters.count -= 1
            counters.payload_bytes -= pending.payload_bytes
            if sent_bytes is not None:
                counters.uneven_bytes -= pending.payload_bytes
                counters.uneven_sent_bytes -= sent_bytes
            pending.group.undo_issue(pending.key[1], pending.peer)
            if self._log is not None and pending in self._log.calls[-1:]:
                self._log.calls.pop()

    def add_poller(self, poll: Callable[[], None]) -> None:
        """`poll` is called before each snapshot: it completes what a device finished without telling."""
        self._pollers.append(poll)

    def get_cells(self, phase: Phase | None = None) -> list[Cell]:
        """Snapshot of the cumulative counters, of one phase or of all, sorted by (phase, op, axis, group size)."""
        for poll in self._pollers:
            poll()
        with self._lock:
            chosen = sorted((item for item in self._cells.items() if phase in (None, item[0][0])), key=_by_key)
            return [_cell(key, counters) for key, counters in chosen if counters.count]

    def drain(self) -> tuple[list[Record], int]:
        """Completed collectives since the last drain, oldest first, and how many were dropped so far."""
        with self._lock:
            kept, self._records = self._records, deque()
            dropped = self._dropped
        ahead_s = measure_unix_offset_s()
        return [_record(pending, duration_s, ahead_s) for pending, duration_s in kept], dropped

    def to_unix_s(self, seconds: float) -> float:
        """Of a time by `time.perf_counter`, as the clock stands now."""
        return seconds + measure_unix_offset_s()


def measure_unix_offset_s() -> float:
    """Unix time less `time.perf_counter`, as the clock stands now. A thread may stand still between looking at the one
    and at the other: of three looks the shortest counts."""
    return min(_compared() for _ in range(3))[1]


def _compared() -> tuple[float, float]:
    """How long it took, and unix time less `time.perf_counter`."""
    before = time.perf_counter()
    unix = time.time()
    after = time.perf_counter()
    return after - before, unix - (before + after) / 2


def _end(pending: Collective, now_s: float, duration_s: float) -> None:
    """It is on its way no more."""
    group, share, op = pending.group, pending.axis_time, pending.key[1]
    # A device tells how long it took, and nobody when it ended: we look a few times a second.
    pending.ended_s = min(now_s, pending.started_s + duration_s) if group.on_device and duration_s else now_s
    group.in_flight.pop(pending, None)
    if op != "send" and op != "recv":
        group.ended += 1
    if share is None or op == "recv":
        return
    if group.on_device:
        share.in_flight_s += duration_s
    else:
        share.end_collective(now_s)


def _record(pending: Collective, duration_s: float, ahead_s: float) -> Record:
    phase, op, axis, _ = pending.key
    start = pending.started_s + ahead_s
    return Record(op, axis, pending.group.name, pending.payload_bytes, start, duration_s, pending.step, phase)


def _by_key(item: tuple[CellKey, Counters]) -> CellKey:
    return item[0]


def _cell(key: CellKey, counters: Counters) -> Cell:
    phase, op, axis, group_size = key
    even_sent_bytes = compute_algorithmic_bytes(op, counters.payload_bytes - counters.uneven_bytes, group_size)
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
