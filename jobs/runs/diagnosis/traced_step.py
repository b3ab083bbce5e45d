"""Collect the traced events of a step from all ranks, on the board's clock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from contracts.telemetry.batches import ClockOffset
from contracts.telemetry.items import Op, TimelineItem


class HostClocks:
    """Convert times of hosts to the board's clock. Hosts are identified by their node."""

    def __init__(self) -> None:
        self._clocks: dict[int, ClockOffset] = {}

    def update(self, node: int, clock: ClockOffset | None) -> None:
        if clock is not None:
            self._clocks[node] = clock

    def to_board_time(self, node: int, time: float) -> float:
        """Convert a time of a host's clock to the board's clock."""
        clock = self._clocks.get(node)
        return time + clock["offset_s"] if clock else time

    def get_uncertainty_s(self, one: int, other: int) -> float:
        """Return the seconds within which the order of events on two nodes is unknown, 0 on one node."""
        if one == other:
            return 0.0
        return sum(self._clocks[node]["within_s"] for node in (one, other) if node in self._clocks)


MAX_PENDING_EVENTS = 400_000  # of incomplete steps: above it, the oldest step is dropped
US = 1e-6
MAX_END_DIFFERENCE_S = 2e-3  # a span that ends this soon after a collective waited for it
OTHER = "other"
POINT_TO_POINT = ("send", "recv")


class ProcessGroup(NamedTuple):
    """Identify a process group."""

    axis: str
    ranks: tuple[int, ...]
    nth: int


class TracedCall(NamedTuple):
    """Describe a collective on one rank. The training thread was blocked in the last `blocked_s` before `ended`."""

    rank: int
    group: ProcessGroup
    op: Op
    sequence: int
    issued: float
    blocked_s: float
    ended: float
    payload_bytes: int
    peer: int


class TracedSpan(NamedTuple):
    """Describe what a training thread did. Chunk and micro-batch are -1 if none applies."""

    work: str
    chunk: int
    micro_batch: int
    began: float
    ended: float


class RankStep(NamedTuple):
    """Hold a step of one rank. `inferred_s`: blocked time inside torch by axis, which the meter cannot see."""

    rank: int
    node: int
    began: float
    step_s: float
    calls: tuple[TracedCall, ...]
    spans: tuple[TracedSpan, ...]
    inferred_s: dict[str, float]


class TracedStep(NamedTuple):
    """Hold a step of all ranks."""

    number: int
    ranks: dict[int, RankStep]

    @property
    def step_s(self) -> float:
        return max(one.step_s for one in self.ranks.values())


class StepCollector:
    """Collect steps until all ranks have reported them."""

    def __init__(self, world_size: int, clocks: HostClocks) -> None:
        self._world_size, self._clocks = world_size, clocks
        self._pending: dict[int, dict[int, RankStep]] = {}
        self._events = 0

    def add(self, item: TimelineItem, node: int) -> TracedStep | None:
        """Return the step if this was the item of its last rank."""
        rank_step = parse_timeline(item, node, self._clocks)
        ranks = self._pending.setdefault(item["step"], {})
        self._events += _count_events(rank_step)
        self._events -= _count_events(ranks[rank_step.rank]) if rank_step.rank in ranks else 0
        ranks[rank_step.rank] = rank_step
        if len(ranks) == self._world_size:
            self._drop(item["step"])
            return TracedStep(item["step"], ranks)
        while self._events > MAX_PENDING_EVENTS and len(self._pending) > 1:
            self._drop(min(self._pending))
        return None

    def _drop(self, step: int) -> None:
        self._events -= sum(map(_count_events, self._pending.pop(step).values()))


def _count_events(step: RankStep) -> int:
    return len(step.calls) + len(step.spans) + 1


def parse_timeline(item: TimelineItem, node: int, clocks: HostClocks) -> RankStep:
    """Convert the columns of an item to rows. Validation and checkpoints after the step are left out."""
    began, rank = clocks.to_board_time(node, item["began"]), item["rank"]
    step_us = item["step_s"] / US
    groups = [ProcessGroup(group["axis"], tuple(group["ranks"]), group["nth"]) for group in item["groups"]]
    calls_in, spans_in = item["calls"], item["spans"]
    call_rows = zip(
        *(calls_in["group"], calls_in["op"], calls_in["sequence"], calls_in["issued_us"]),
        *(
            calls_in["blocked_us"],
            calls_in["ended_us"],
            calls_in["payload_bytes"],
            calls_in["peer"],
        ),
        strict=True,
    )
    calls = [
        TracedCall(rank, groups[index], op, sequence, began + at * US, blocked * US, began + ended * US, size, peer)
        for index, op, sequence, at, blocked, ended, size, peer in call_rows
        if at <= step_us
    ]
    span_rows = zip(
        *(spans_in["work"], spans_in["chunk"], spans_in["micro_batch"]),
        *(spans_in["from_us"], spans_in["to_us"]),
        strict=True,
    )
    spans = tuple(
        TracedSpan(work, chunk, micro_batch, began + start * US, began + end * US)
        for work, chunk, micro_batch, start, end in span_rows
        if start <= step_us
    )
    inferred = dict(_infer_blocked(calls, spans))
    blocked_by_axis: dict[str, float] = {}
    for index, blocked_s in inferred.items():
        blocked_by_axis[calls[index].group.axis] = blocked_by_axis.get(calls[index].group.axis, 0.0) + blocked_s
        calls[index] = calls[index]._replace(blocked_s=blocked_s)
    return RankStep(rank, node, began, item["step_s"], tuple(calls), spans, blocked_by_axis)


def _infer_blocked(calls: list[TracedCall], spans: Iterable[TracedSpan]) -> Iterator[tuple[int, float]]:
    """Yield (index of a call, blocked seconds) for waits of DDP's reducer in C++.

    The reducer issues its last bucket with the last gradient, and ends backward once all buckets are summed. So a
    backward that ends with the last bucket was blocked after its last issue.
    """
    for span in spans:
        if span.work not in ("backward", "weights"):
            continue
        inside = [i for i, call in enumerate(calls) if span.began <= call.issued <= span.ended]
        unblocked = [i for i in inside if not calls[i].blocked_s and calls[i].op == "all_reduce"]
        if not unblocked:
            continue
        last = max(inside, key=lambda i: calls[i].issued)
        last_end = max(calls[i].ended for i in unblocked)
        if last in unblocked and calls[last].issued < last_end and 0 <= span.ended - last_end <= MAX_END_DIFFERENCE_S:
            yield last, calls[last].ended - calls[last].issued


class BlockedTimes:
    """Hold the intervals in which a training thread was blocked by collectives."""

    def __init__(self, one: RankStep) -> None:
        self._spans = sorted((call.ended - call.blocked_s, call.ended) for call in one.calls if call.blocked_s > 0)

    def get_unblocked_s(self, began: float, ended: float) -> float:
        """Return the seconds between two times in which the thread was not blocked."""
        first = bisect_left(self._spans, (began, began))
        blocked_s = 0.0
        for start, end in self._spans[max(0, first - 1) :]:
            if start >= ended:
                break
            blocked_s += max(0.0, min(end, ended) - max(start, began))
        return max(0.0, ended - began - blocked_s)


def compute_own_seconds(one: RankStep) -> dict[str, float]:
    """Return the seconds per kind of work in which the thread was not blocked. `OTHER`: time outside of spans."""
    blocked, seconds_by_work = BlockedTimes(one), dict[str, float]()
    end, inside_s = one.began + one.step_s, 0.0
    for span in one.spans:
        own_s = blocked.get_unblocked_s(span.began, span.ended)
        seconds_by_work[span.work] = seconds_by_work.get(span.work, 0.0) + own_s
        inside_s += own_s if span.ended <= end + MAX_END_DIFFERENCE_S else 0.0
    seconds_by_work[OTHER] = max(0.0, blocked.get_unblocked_s(one.began, end) - inside_s)
    return seconds_by_work
