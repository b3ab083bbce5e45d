"""Count the collectives of one rank: exact cumulative counters, and a buffer of the last records.

Counters count a collective when it is issued and again when it completes, both in the cell (phase, op, axis) of its
issue. They never lose a byte. Records are stored in a bounded buffer: if no caller drains it, the oldest records are
dropped and counted in `dropped`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

from contracts.telemetry.items import Axis, Cell, GroupRanks, Label, Op, Phase, StepBreakdown, Work
from planner.facts.collectives import compute_algorithmic_bytes
from workers.meter.collectives import (
    MAX_CALLS_PER_STEP,
    CellKey,
    Collective,
    CollectiveTotals,
    ComputeSpan,
    DetachedTimes,
    GroupRegistry,
    GroupState,
    SpanTimer,
    StepTimes,
    StepTrace,
)

AXES: frozenset[str] = frozenset(get_args(Axis))
PHASES: frozenset[str] = frozenset(get_args(Phase))
MAX_GROUP_LABELS = 64  # a script may create thousands of groups
OTHER_GROUPS_LABEL = "other groups"
CellCounters = list[tuple[CellKey, CollectiveTotals]]
MAX_TRACES = 8  # traces of steps that wait for the exporter


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
    """Counters and records of one rank. Thread safe, because collectives end on threads of the backend."""

    def __init__(self, rank: int, capacity: int = 65536) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}, expected at least 1 record")
        self.rank = rank
        self.step = 0
        self.groups = GroupRegistry()
        self.completed_steps = 0
        self.blocking: Collective | None = None  # the training thread waits for it
        self.last_progress_s = time.perf_counter()  # last issue or end of a collective, step or phase
        self._phase: Phase = "setup"
        # Returns the label and size under which a send or receive is counted, from its label, group, and peer.
        self.find_p2p_axis: Callable[[Label, GroupState, int], tuple[Label, int]] | None = None
        self.label_changes = 0  # new groups and labels so far
        self._labels: dict[str, Label] = {}
        self._phases: dict[str, Phase] = {}  # of groups that are always counted in one phase
        self._cells: dict[CellKey, CollectiveTotals] = {}
        self._records: deque[tuple[Collective, float]] = deque()
        self._capacity = capacity
        self._dropped = 0
        self._pollers: list[Callable[[], None]] = []
        self._times = StepTimes()
        self._trace: StepTrace | None = None
        self._traces: deque[StepTrace] | None = None
        # Reentrant: a signal handler may take a snapshot while its own thread is counting.
        self._lock = threading.RLock()

    @property
    def phase(self) -> Phase:
        """Return the phase in which new collectives are counted."""
        return self._phase

    @property
    def dropped(self) -> int:
        """Return the number of records that the bounded buffer dropped so far."""
        return self._dropped

    def set_phase(self, phase: Phase) -> None:
        """Count new collectives in `phase`. Collectives in flight stay in the phase of their issue."""
        if phase not in PHASES:
            raise ValueError(f"phase is {phase!r}, expected one of {sorted(PHASES)}")
        self._phase = phase
        self.last_progress_s = time.perf_counter()

    def begin_step(self, step: int) -> None:
        """Start step number `step`."""
        self.close_trace()
        with self._lock:
            self._times.begin_step()
        if self._traces is not None:
            self._trace = StepTrace(step)
        self.last_progress_s = time.perf_counter()

    def end_step(self, step: int) -> StepBreakdown:
        """End a step, discard its records, and return the time of its parts."""
        self.poll_devices()
        with self._lock:
            breakdown = self._times.end_step()
            self._records.clear()
        self.completed_steps = step
        if self._trace is not None:
            self._trace.ended_s = time.perf_counter()
        return breakdown

    def split_step(self, step: int) -> tuple[DetachedTimes, CellCounters]:
        """End step number `step` of a script, and begin the next one at once.

        Return the times of the ended step, and a copy of the counters of phase "step".
        """
        with self._lock:
            times = self._times.detach_step()
            self._records.clear()
            counters = [(key, counters.copy()) for key, counters in self._cells.items() if key[0] == "step"]
        self.begin_trace(step + 1)
        self.completed_steps = step
        self.last_progress_s = time.perf_counter()
        return times, counters

    def begin_trace(self, step: int) -> None:
        """End the trace of the last step, and begin to trace step number `step`."""
        self.end_trace()
        if self._traces is not None:
            self._trace = StepTrace(step)

    def end_trace(self) -> None:
        """End the trace of the current step."""
        if self._trace is not None:
            self._trace.ended_s = time.perf_counter()
            self.close_trace()

    def enable_tracing(self) -> None:
        """Trace each step from the next one on."""
        self._traces = deque(maxlen=MAX_TRACES)

    def close_trace(self) -> None:
        """Make the trace of the last step available. Discard it if the step did not end."""
        trace, self._trace = self._trace, None
        if trace is not None and trace.ended_s and self._traces is not None:
            self._traces.append(trace)

    def take_traces(self) -> list[StepTrace]:
        """Remove and return the closed traces, oldest first."""
        traces = self._traces
        return [traces.popleft() for _ in range(len(traces))] if traces else []

    def time_span(self, work: Work, chunk: int = -1, micro_batch: int = -1) -> SpanTimer:
        """Return a context manager that times work of the training thread."""
        return SpanTimer(self._trace, self._times, work, chunk, micro_batch)

    def add_span(self, work: Work, from_s: float, to_s: float) -> None:
        """Add work of the training thread that has ended."""
        times = self._times.work_s
        times[work] = times.get(work, 0.0) + to_s - from_s
        if self._trace is not None:
            self._trace.add_span(ComputeSpan(work, -1, -1, from_s, to_s))

    def add_group(self, name: str, ranks: Sequence[int], *, on_device: bool = False) -> GroupState:
        """Register a new process group."""
        with self._lock:
            self.label_changes += 1
            return self.groups.add(name, ranks, on_device=on_device)

    def get_group_ranks(self, group: GroupState) -> GroupRanks:
        """Return the identity of a group that is equal on all its ranks."""
        return self.groups.get_group_ranks(group, self.get_label)

    def get_progress(self, group: GroupState) -> tuple[int, int, Collective | None]:
        """Return the issued and ended collectives of a group, and the oldest one in flight."""
        with self._lock:
            return group.issued, group.ended, next(iter(group.in_flight), None)

    def label_group(self, group_name: str, axis: Axis, phase: Phase | None = None) -> None:
        """Count new collectives of a group under `axis`.

        Args:
            phase: Always count the group in this phase, because it communicates concurrently with training.
        """
        if axis not in AXES:
            raise ValueError(f"axis is {axis!r}, expected one of {sorted(AXES)}")
        self.label_changes += 1
        self._labels[group_name] = axis
        if phase is not None:
            self._phases[group_name] = phase

    def name_group(self, group_name: str, label: str) -> None:
        """Count a group of a user's script under `label`, or under a common label above MAX_GROUP_LABELS."""
        self.label_changes += 1
        known = set(self._labels.values())
        self._labels[group_name] = label if label in known or len(known) < MAX_GROUP_LABELS else OTHER_GROUPS_LABEL

    def get_label(self, group_name: str) -> Label:
        """Return the label of a group, "world" by default."""
        return self._labels.get(group_name, "world")

    def issue(
        self,
        op: Op,
        group_name: str,
        group_size: int,
        payload_bytes: int,
        sent_bytes: int | None = None,
        peer: int | None = None,
        dtype: Any = None,
        root: int = -1,
    ) -> Collective:
        """Count a collective that is being issued. The caller completes the returned object.

        Args:
            sent_bytes: Bytes to other ranks, if the caller specifies the splits.
            peer: Group rank at the other end of a send or receive.
            dtype: Type of the elements, None if ranks may choose their sizes.
            root: Group rank of the root, -1 without a root.
        """
        phase = self._phases.get(group_name, self._phase)
        label = self._labels.get(group_name, "world")
        with self._lock:
            group = self.groups.get(group_name, group_size)
            global_peer = -1 if peer is None else group.ranks[peer]
            global_root = -1 if root < 0 else group.ranks[root]
            if peer is not None and self.find_p2p_axis is not None:
                label, group_size = self.find_p2p_axis(label, group, global_peer)
            key = (phase, op, label, group_size)
            counters = self._cells.get(key)
            if counters is None:
                counters = self._cells[key] = CollectiveTotals()
            counters.count += 1
            counters.payload_bytes += payload_bytes
            if sent_bytes is not None:
                counters.uneven_bytes += payload_bytes
                counters.uneven_sent_bytes += sent_bytes
            collective = Collective(self, key, counters, group, payload_bytes, global_peer, dtype, global_root)
            group.in_flight[collective] = None
            if phase == "step":
                collective.axis_time = self._times.get_axis(key[2], on_device=group.on_device)
                if op != "recv" and not group.on_device:
                    collective.axis_time.start_collective(collective.started_s)
            trace = self._trace
            if trace is not None:
                if len(trace.calls) < MAX_CALLS_PER_STEP:
                    trace.calls.append(collective)
                else:
                    trace.left_out += 1
        self.last_progress_s = collective.started_s
        return collective

    def complete(self, collective: Collective, duration_s: float) -> None:
        """Count the end of a collective. Called once by `Collective`."""
        counters = collective.counters
        now_s = time.perf_counter()
        with self._lock:
            counters.completed += 1
            counters.busy_s += duration_s
            if len(self._records) >= self._capacity:
                self._records.popleft()
                self._dropped += 1
            self._records.append((collective, duration_s))
            _end(collective, now_s, duration_s)
        self.last_progress_s = now_s

    def abandon(self, collective: Collective) -> None:
        """End a collective that failed, or whose end is never observed. Called once by `Collective`."""
        now_s = time.perf_counter()
        with self._lock:
            _end(collective, now_s, 0.0)
        self.last_progress_s = now_s

    def undo_issue(self, collective: Collective, sent_bytes: int | None) -> None:
        """Subtract a collective that the backend refused."""
        collective.abandon()
        counters = collective.counters
        with self._lock:
            counters.count -= 1
            counters.payload_bytes -= collective.payload_bytes
            if sent_bytes is not None:
                counters.uneven_bytes -= collective.payload_bytes
                counters.uneven_sent_bytes -= sent_bytes
            collective.group.undo_issue(collective.key[1], collective.peer)
            if self._trace is not None and collective in self._trace.calls[-1:]:
                self._trace.calls.pop()

    def add_poller(self, poll: Callable[[], None]) -> None:
        """Call `poll` before each snapshot, to complete collectives that ended on a device."""
        self._pollers.append(poll)

    def get_cells(self, phase: Phase | None = None) -> list[Cell]:
        """Return a snapshot of the counters of one or all phases, sorted by (phase, op, axis, group size)."""
        self.poll_devices()
        with self._lock:
            keys = sorted(key for key in self._cells if phase in (None, key[0]))
            return [build_cell(key, self._cells[key]) for key in keys if self._cells[key].count]

    def drain(self) -> tuple[list[Record], int]:
        """Remove and return the records, oldest first, and the number of records dropped so far."""
        with self._lock:
            records, self._records = self._records, deque()
            dropped = self._dropped
        offset_s = measure_unix_offset_s()
        return [_build_record(collective, duration_s, offset_s) for collective, duration_s in records], dropped

    def to_unix_s(self, seconds: float) -> float:
        """Convert a time of `time.perf_counter` to unix seconds."""
        return seconds + measure_unix_offset_s()

    def poll_devices(self) -> None:
        """Complete the collectives that ended on a device."""
        for poll in self._pollers:
            poll()


def measure_unix_offset_s() -> float:
    """Return unix time minus `time.perf_counter`.

    The thread may be preempted between the clocks, so the shortest of three measurements is used.
    """
    measured = []  # duration, and the offset
    for _ in range(3):
        before, unix, after = time.perf_counter(), time.time(), time.perf_counter()
        measured.append((after - before, unix - (before + after) / 2))
    return min(measured)[1]


def _end(collective: Collective, now_s: float, duration_s: float) -> None:
    group, axis_time, op = collective.group, collective.axis_time, collective.key[1]
    # A device reports only the duration, and the poller notices the end some time later.
    collective.ended_s = min(now_s, collective.started_s + duration_s) if group.on_device and duration_s else now_s
    group.in_flight.pop(collective, None)
    if op != "send" and op != "recv":
        group.ended += 1
    if axis_time is None or op == "recv":
        return
    if group.on_device:
        axis_time.in_flight_s += duration_s
    else:
        axis_time.end_collective(now_s)


def _build_record(collective: Collective, duration_s: float, offset_s: float) -> Record:
    phase, op, axis, _ = collective.key
    start = collective.started_s + offset_s
    group = collective.group.name
    return Record(op, axis, group, collective.payload_bytes, start, duration_s, collective.step, phase)


def build_cell(key: CellKey, counters: CollectiveTotals) -> Cell:
    """Return the cell of a counter."""
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
