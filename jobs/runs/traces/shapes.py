"""What happened in steps, event by event, as the history's tables `calls` and `spans` have it. Unix seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from typing_extensions import TypedDict

Group = tuple[str, tuple[int, ...], int]  # axis, ranks, and which of several alike


class Call(NamedTuple):
    """A collective on one rank. `ended` is None where that was not recorded. `peer`: of a send or receive, else -1."""

    step: int
    rank: int
    axis: str
    ranks: tuple[int, ...]
    nth: int
    sequence: int
    op: str
    issued: float
    blocked_s: float
    ended: float | None
    payload_bytes: int
    peer: int

    @property
    def group(self) -> Group:
        return self.axis, self.ranks, self.nth


class Span(NamedTuple):
    """What the training thread of a rank did; chunk and micro-batch are -1 where none applies."""

    step: int
    rank: int
    work: str
    chunk: int
    micro_batch: int
    began: float
    ended: float


class Trace(NamedTuple):
    """Events in the order of time. `left_out` counts those that a rank could not tell."""

    calls: list[Call]
    spans: list[Span]
    left_out: int = 0

    @property
    def began(self) -> float:
        """The first moment of any event; 0 of an empty trace."""
        return min([*(call.issued for call in self.calls), *(span.began for span in self.spans)], default=0.0)

    def ranks(self) -> list[int]:
        return sorted({call.rank for call in self.calls} | {span.rank for span in self.spans})


class Table(TypedDict):
    """Columns of one length, as the history tells them."""

    columns: dict[str, list[Any]]


class Tables(TypedDict):
    """Calls and spans, columns named as the fields of `Call` and `Span`."""

    calls: Table
    spans: Table
    left_out: int


class StepColumns(Tables):
    """A step in columns."""

    step: int


class TracedSteps(TypedDict):
    """Steps that can be had event by event."""

    steps: list[int]


def tables(trace: Trace) -> Tables:
    """A trace in columns."""
    return {
        "calls": {"columns": _columns(Call._fields, trace.calls)},
        "spans": {"columns": _columns(Span._fields, trace.spans)},
        "left_out": trace.left_out,
    }


def _columns(names: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> dict[str, list[Any]]:
    listed = list(rows)
    return {name: [row[place] for row in listed] for place, name in enumerate(names)}


def of_tables(calls: dict[str, list[Any]], spans: dict[str, list[Any]], left_out: int = 0) -> Trace:
    """The trace that columns hold; further columns are left alone."""
    made = [Call(*row)._replace(ranks=tuple(row[3])) for row in _rows(Call._fields, calls)]
    return Trace(made, [Span(*row) for row in _rows(Span._fields, spans)], left_out)


def _rows(names: tuple[str, ...], columns: dict[str, list[Any]]) -> Iterator[tuple[Any, ...]]:
    return zip(*(columns[name] for name in names), strict=True)
