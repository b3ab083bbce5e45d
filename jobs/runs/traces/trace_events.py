"""Define the traced events of steps, their columns in the history tables `calls` and `spans`, and last arrivals.

Times are Unix seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from typing_extensions import TypedDict

Columns = dict[str, list[Any]]
GroupKey = tuple[str, tuple[int, ...], int]  # axis, ranks, number among identical groups


class CollectiveCall(NamedTuple):
    """Describe a collective on one rank. `blocked_s`, `ended`, and `payload_bytes` are None if not recorded."""

    step: int
    rank: int
    axis: str
    ranks: tuple[int, ...]
    nth: int
    sequence: int
    op: str
    issued: float
    blocked_s: float | None
    ended: float | None
    payload_bytes: int | None
    peer: int  # the other rank of a send or receive, -1 for other collectives

    @property
    def group(self) -> GroupKey:
        return self.axis, self.ranks, self.nth


class WorkSpan(NamedTuple):
    """Describe what the training thread of a rank did. Chunk and micro-batch are -1 if none applies."""

    step: int
    rank: int
    work: str
    chunk: int
    micro_batch: int
    began: float
    ended: float


class EventTrace(NamedTuple):
    """Hold events in the order of time. `left_out`: the number of events that ranks dropped."""

    calls: list[CollectiveCall]
    spans: list[WorkSpan]
    left_out: int = 0

    @property
    def began(self) -> float:
        """Return the time of the first event, or 0 for an empty trace."""
        return min([*(call.issued for call in self.calls), *(span.began for span in self.spans)], default=0.0)

    def get_ranks(self) -> list[int]:
        return sorted({call.rank for call in self.calls} | {span.rank for span in self.spans})


class EventTable(TypedDict):
    """Hold columns of equal length."""

    columns: dict[str, list[Any]]


class EventTables(TypedDict):
    """Hold collectives and spans. Columns have the names of the fields of `CollectiveCall` and `WorkSpan`."""

    calls: EventTable
    spans: EventTable
    left_out: int


class StepColumns(EventTables):
    """Hold the events of one step in columns."""

    step: int


def serialize_trace(trace: EventTrace) -> EventTables:
    """Convert a trace to columns."""
    return {
        "calls": {"columns": _to_columns(CollectiveCall._fields, trace.calls)},
        "spans": {"columns": _to_columns(WorkSpan._fields, trace.spans)},
        "left_out": trace.left_out,
    }


def _to_columns(names: tuple[str, ...], rows: Sequence[tuple[Any, ...]]) -> Columns:
    return {name: [row[index] for row in rows] for index, name in enumerate(names)}


def parse_trace(calls: Columns, spans: Columns, left_out: int = 0) -> EventTrace:
    """Convert columns to a trace. Further columns are ignored."""
    call_rows = zip(*(calls[name] for name in CollectiveCall._fields), strict=True)
    span_rows = zip(*(spans[name] for name in WorkSpan._fields), strict=True)
    trace_calls = [CollectiveCall(*row)._replace(ranks=tuple(row[3])) for row in call_rows]
    return EventTrace(trace_calls, [WorkSpan(*row) for row in span_rows], left_out)


POINT_TO_POINT = {"send", "recv"}


class Arrival(NamedTuple):
    """Record when the last rank arrived, and which one. `number` identifies the collective."""

    time: float
    rank: int
    number: int


CallKey = tuple[int, GroupKey, int, str, int]
Arrivals = dict[CallKey, Arrival]


def get_arrival(event: CollectiveCall | WorkSpan, arrivals: Arrivals) -> Arrival | None:
    """Return the arrival of an event's collective, or None for compute and if the arrival is unknown."""
    return arrivals.get(_get_call_key(event)) if isinstance(event, CollectiveCall) else None


def _get_call_key(call: CollectiveCall) -> CallKey:
    """Return a key that is unique on a rank. Sends and receives are numbered per peer."""
    return call.rank, call.group, call.sequence, call.op, call.peer


def find_arrivals(calls: Iterable[CollectiveCall]) -> Arrivals:
    """Return the last arrival of each call. Collectives that a rank did not report have no arrival."""
    matched: dict[tuple[GroupKey, object], list[CollectiveCall]] = defaultdict(list)
    num_messages: dict[tuple[GroupKey, int, int, str], int] = defaultdict(int)
    for call in sorted(calls, key=lambda call: (call.issued, call.sequence)):
        if call.op not in POINT_TO_POINT:
            matched[call.group, (call.step, call.sequence)].append(call)
            continue
        direction = (call.rank, call.peer) if call.op == "send" else (call.peer, call.rank)
        num_messages[call.group, *direction, call.op] += 1
        matched[call.group, (call.step, *direction, num_messages[call.group, *direction, call.op])].append(call)
    arrivals: Arrivals = {}
    for number, (key, same_call) in enumerate(matched.items(), start=1):
        group_size = 2 if same_call[0].op in POINT_TO_POINT else len(key[0][1])
        if len({call.rank for call in same_call}) < group_size:
            continue
        last = max(same_call, key=lambda call: call.issued)
        arrival = Arrival(last.issued, last.rank, number)
        arrivals |= {_get_call_key(call): arrival for call in same_call}
    return arrivals
