"""State of the collectives, process groups and steps of one rank, which the recorder updates.

Times are seconds of `time.perf_counter`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import itemgetter
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from contracts.telemetry.items import MAX_RECENT_CALLS, GroupRanks, Label, Op, Phase, StepBreakdown, Work

MAX_GROUPS = 4096  # with the same ranks; later ones share the index of the last
MAX_CALLS_PER_STEP = 4_000  # and the same number of spans, which fit into one entry of a stream

CellKey = tuple[Phase, Op, Label, int]  # with the group size


class AxisTime:
    """Seconds of communication on one axis in the current step."""

    __slots__ = ("exposed_in_flight_s", "exposed_s", "in_flight_s", "num_in_flight", "since_s")

    def __init__(self) -> None:
        self.exposed_s = 0.0  # the training thread waited
        self.exposed_in_flight_s = 0.0  # of these, for collectives that count as in flight
        self.in_flight_s = 0.0  # at least one collective was in flight
        self.num_in_flight = 0
        self.since_s = 0.0

    def start_collective(self, now_s: float) -> None:
        if self.num_in_flight == 0:
            self.since_s = now_s
        self.num_in_flight += 1

    def end_collective(self, now_s: float) -> None:
        self.num_in_flight -= 1
        if self.num_in_flight == 0:
            self.in_flight_s += now_s - self.since_s

    def begin_step(self, now_s: float) -> None:
        self.exposed_s = self.exposed_in_flight_s = self.in_flight_s = 0.0
        self.since_s = now_s

    def end_step(self, now_s: float) -> None:
        if self.num_in_flight:
            self.in_flight_s += now_s - self.since_s
            self.since_s = now_s


class StepTimes:
    """Seconds of communication by axis, and of other work, in the current step.

    A device reports its times late, and a script does not wait for its device at the end of a step. The times of device
    groups are therefore separate. `detach_step` returns them with their step.
    """

    def __init__(self) -> None:
        self._by_axis: dict[Label, AxisTime] = {}
        self._on_device: dict[Label, AxisTime] = {}
        self.work_s: dict[Work, float] = {}

    def get_axis(self, axis: Label, *, on_device: bool = False) -> AxisTime:
        times = self._on_device if on_device else self._by_axis
        axis_time = times.get(axis)
        if axis_time is None:
            axis_time = times[axis] = AxisTime()
        return axis_time

    def begin_step(self) -> None:
        now_s = time.perf_counter()
        self.work_s = {}
        for axis_time in (*self._by_axis.values(), *self._on_device.values()):
            axis_time.begin_step(now_s)

    def end_step(self) -> StepBreakdown:
        """Return the breakdown of a step whose device has finished."""
        now_s = time.perf_counter()
        for axis_time in self._by_axis.values():
            axis_time.end_step(now_s)
        exposed, hidden = sum_axis_times(self._by_axis, self._on_device)
        return StepBreakdown(
            data=self.work_s.get("data", 0.0),
            optimizer=self.work_s.get("optimizer", 0.0),
            exposed=exposed,
            hidden=hidden,
        )

    def detach_step(self) -> DetachedTimes:
        """End the current step, begin the next one, and return the times of the ended step."""
        now_s = time.perf_counter()
        for axis_time in self._by_axis.values():
            axis_time.end_step(now_s)
        detached = DetachedTimes(sum_axis_times(self._by_axis), self._on_device, self.work_s)
        self._on_device, self.work_s = {}, {}
        for axis_time in self._by_axis.values():
            axis_time.begin_step(now_s)
        return detached


class DetachedTimes(NamedTuple):
    """Times of an ended step. Pollers still add the times of the device."""

    on_host: tuple[dict[Label, float], dict[Label, float]]  # exposed and hidden
    on_device: dict[Label, AxisTime]
    work_s: dict[Work, float]

    def get_axis_times(self) -> tuple[dict[Label, float], dict[Label, float]]:
        """Return exposed and hidden seconds by axis."""
        if not self.on_device:
            return self.on_host
        sums = zip(self.on_host, sum_axis_times(self.on_device), strict=True)
        exposed, hidden = ({axis: a.get(axis, 0.0) + b.get(axis, 0.0) for axis in sorted({*a, *b})} for a, b in sums)
        return exposed, hidden


def sum_axis_times(*times: Mapping[Label, AxisTime]) -> tuple[dict[Label, float], dict[Label, float]]:
    """Return exposed and hidden seconds by axis. Axes without seconds are left out."""
    exposed: dict[Label, float] = {}
    hidden: dict[Label, float] = {}
    for axis, axis_time in sorted((entry for by_axis in times for entry in by_axis.items()), key=itemgetter(0)):
        if axis_time.exposed_s:
            exposed[axis] = exposed.get(axis, 0.0) + axis_time.exposed_s
        if axis_time.in_flight_s > axis_time.exposed_in_flight_s:
            hidden[axis] = hidden.get(axis, 0.0) + axis_time.in_flight_s - axis_time.exposed_in_flight_s
    return exposed, hidden


class CollectiveTotals:
    """Cumulative totals of one (phase, op, axis, group size)."""

    __slots__ = ("busy_s", "completed", "count", "payload_bytes", "uneven_bytes", "uneven_sent_bytes")

    def __init__(self) -> None:
        self.count = 0
        self.completed = 0
        self.payload_bytes = 0
        self.uneven_bytes = 0  # payload of collectives with explicit splits
        self.uneven_sent_bytes = 0  # of these, sent to other ranks
        self.busy_s = 0.0

    def copy(self) -> CollectiveTotals:
        copied = CollectiveTotals.__new__(CollectiveTotals)
        copied.count, copied.completed, copied.busy_s = self.count, self.completed, self.busy_s
        copied.payload_bytes, copied.uneven_bytes = self.payload_bytes, self.uneven_bytes
        copied.uneven_sent_bytes = self.uneven_sent_bytes
        return copied


class GroupState:
    """Operations of this rank on one process group.

    All ranks of a group issue the same collectives in the same order, so a sequence number identifies a collective on
    all ranks. A send has the same sequence number as its receive on the peer.
    """

    __slots__ = ("creation_index", "ended", "in_flight", "issued", "name", "on_device", "p2p_counts", "ranks", "recent")

    def __init__(self, name: str, ranks: tuple[int, ...], creation_index: int, on_device: bool) -> None:
        self.name, self.ranks, self.creation_index, self.on_device = name, ranks, creation_index, on_device
        self.issued = self.ended = 0  # collectives, without sends and receives
        self.p2p_counts: dict[tuple[Op, int], int] = {}  # sends and receives by peer
        self.in_flight: dict[Collective, None] = {}  # oldest first
        self.recent: deque[Collective] = deque(maxlen=MAX_RECENT_CALLS)  # last collectives, also after their end

    def next_sequence_number(self, op: Op, peer: int) -> int:
        """Count an operation that is being issued, and return its sequence number from 1."""
        if op != "send" and op != "recv":
            self.issued += 1
            return self.issued
        count = self.p2p_counts[op, peer] = self.p2p_counts.get((op, peer), 0) + 1
        return count

    def undo_issue(self, op: Op, peer: int) -> None:
        """Release the last sequence number after the backend refused its operation."""
        if op == "send" or op == "recv":
            self.p2p_counts[op, peer] -= 1
            return
        self.issued -= 1
        self.ended -= 1
        if self.recent:
            self.recent.pop()


class CollectiveListener(Protocol):
    """Receiver of the ends of collectives, which is the recorder."""

    step: int
    blocking: Collective | None

    def complete(self, collective: Collective, duration_s: float) -> None: ...
    def abandon(self, collective: Collective) -> None: ...


class Collective:
    """A collective, send or receive that this rank issued. Calling it, as a future does, completes it.

    `blocked_s` is the time that the training thread waited for it. `axis_time` is None outside of steps.
    """

    __slots__ = (
        "_listener",
        "axis_time",
        "blocked_s",
        "counters",
        "dtype",
        "ended_s",
        "group",
        "key",
        "payload_bytes",
        "peer",
        "recorder",
        "root",
        "sequence_number",
        "started_s",
        "step",
    )

    def __init__(
        self,
        recorder: CollectiveListener,
        key: CellKey,
        counters: CollectiveTotals,
        group: GroupState,
        payload_bytes: int,
        peer: int,
        dtype: Any = None,
        root: int = -1,
    ) -> None:
        """Count a collective.

        Args:
            dtype: Type of the elements, None if ranks may choose their sizes.
            root: Global rank of the root, -1 without a root.
        """
        self.recorder = recorder
        self._listener: CollectiveListener | None = recorder  # None after the end
        self.key, self.counters, self.group, self.payload_bytes, self.peer = key, counters, group, payload_bytes, peer
        self.dtype, self.root = dtype, root
        self.sequence_number = group.next_sequence_number(key[1], peer)
        if peer < 0 and key[1] != "recv":
            group.recent.append(self)
        self.axis_time: AxisTime | None = None
        self.step = recorder.step
        self.blocked_s = self.ended_s = 0.0
        self.started_s = time.perf_counter()

    def __call__(self, _future: object = None) -> None:
        self.complete(time.perf_counter() - self.started_s)

    def complete(self, duration_s: float) -> None:
        """Record the end once. Later calls have no effect, because a work may be waited for twice."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.complete(self, duration_s)

    def abandon(self) -> None:
        """Record that the end will never be observed. No effect after the end."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.abandon(self)

    def add_blocked_time(self, seconds: float) -> None:
        """Add time that the training thread waited for this collective."""
        self.blocked_s += seconds
        axis_time = self.axis_time
        if axis_time is not None:
            axis_time.exposed_s += seconds
            if self.key[1] != "recv":
                axis_time.exposed_in_flight_s += seconds


class GroupRegistry:
    """Process groups of one rank by torch's name of them."""

    def __init__(self) -> None:
        self._by_name: dict[str, GroupState] = {}
        self._names: dict[tuple[int, ...], list[str]] = {}  # by ranks, in order of creation

    def add(self, name: str, ranks: Sequence[int], *, on_device: bool = False) -> GroupState:
        """Register a new group. It replaces an earlier group of this name."""
        names = self._names.setdefault(tuple(ranks), [])
        group = self._by_name[name] = GroupState(name, tuple(ranks), len(names), on_device)
        if len(names) < MAX_GROUPS:
            names.append(name)
        return group

    def rename(self, group: GroupState, name: str) -> None:
        """Update the name of a group that torch renamed after its creation."""
        if group.name == name:
            return
        if self._by_name.get(group.name) is group:
            del self._by_name[group.name]
        if group.creation_index < MAX_GROUPS:
            self._names[group.ranks][group.creation_index] = name
        group.name = name
        self._by_name[name] = group

    def get(self, name: str, size: int) -> GroupState:
        """Return a group by name. An unknown group is registered with the first `size` ranks."""
        group = self._by_name.get(name)
        return self.add(name, range(size)) if group is None else group

    def all(self) -> list[GroupState]:
        return list(self._by_name.values())

    def get_group_ranks(self, group: GroupState, get_label: Callable[[str], Label]) -> GroupRanks:
        """Return the identity of a group that is equal on all its ranks."""
        axis = get_label(group.name)
        earlier = self._names[group.ranks][: group.creation_index]
        nth = sum(get_label(name) == axis for name in earlier)
        return GroupRanks(axis=axis, ranks=list(group.ranks), nth=nth)


class ComputeSpan(NamedTuple):
    """Work of the training thread between two times."""

    work: Work
    chunk: int
    micro_batch: int
    from_s: float
    to_s: float


class StepTrace:
    """Collectives and compute spans from the start of one step to the start of the next.

    Work between two steps, such as a validation, belongs to the first of them.
    """

    __slots__ = ("began_s", "calls", "ended_s", "left_out", "spans", "step")

    def __init__(self, step: int) -> None:
        self.step = step
        self.began_s, self.ended_s = time.perf_counter(), 0.0
        self.calls: list[Collective] = []
        self.spans: list[ComputeSpan] = []
        self.left_out = 0

    def add_span(self, span: ComputeSpan) -> None:
        """Add a span, or count it as left out above the limit."""
        if len(self.spans) < MAX_CALLS_PER_STEP:
            self.spans.append(span)
        else:
            self.left_out += 1


class SpanTimer(AbstractContextManager[None]):
    """Time a span of the training thread."""

    __slots__ = ("_chunk", "_from_s", "_micro_batch", "_times", "_trace", "_work")

    def __init__(self, trace: StepTrace | None, times: StepTimes, work: Work, chunk: int, micro_batch: int) -> None:
        self._trace, self._times, self._work, self._chunk, self._micro_batch = trace, times, work, chunk, micro_batch

    def __enter__(self) -> None:
        self._from_s = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        now_s, step = time.perf_counter(), self._trace
        self._times.work_s[self._work] = self._times.work_s.get(self._work, 0.0) + now_s - self._from_s
        if step is not None:
            step.add_span(ComputeSpan(self._work, self._chunk, self._micro_batch, self._from_s, now_s))
