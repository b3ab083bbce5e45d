"""Events that overlap stand in lanes of their own: a viewer's track holds one at a time."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from jobs.runs.traces.shapes import Call, Span, Trace

COMPUTE = "compute"


class Lane(NamedTuple):
    """A track of a rank: what the training thread did, or the collectives of an axis, `part` telling several apart."""

    rank: int
    name: str
    part: int

    @property
    def title(self) -> str:
        return self.name if self.part == 0 else f"{self.name} ({self.part + 1})"


class Event(NamedTuple):
    """Nanoseconds since 1970."""

    began: int
    ended: int
    of: Call | Span


def lanes(trace: Trace) -> dict[Lane, list[Event]]:
    """Every event once, each lane in the order of time and without overlap; lanes by rank, compute first."""
    rows: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for span in trace.spans:
        rows[span.rank, COMPUTE].append(_event(span.began, span.ended, span))
    for call in trace.calls:
        rows[call.rank, call.axis].append(_event(call.issued, call.ended, call))
    found: dict[Lane, list[Event]] = {}
    for (rank, name), events in sorted(rows.items(), key=lambda row: (row[0][0], row[0][1] != COMPUTE, row[0][1])):
        for part, event in _placed(events):
            found.setdefault(Lane(rank, name, part), []).append(event)
    return dict(sorted(found.items(), key=lambda item: (item[0].rank, item[0].name != COMPUTE, *item[0][1:])))


def _event(began: float, ended: float | None, of: Call | Span) -> Event:
    first = max(0, round(began * 1e9))
    return Event(first, max(first + 1, first if ended is None else round(ended * 1e9)), of)


def _placed(events: list[Event]) -> Iterator[tuple[int, Event]]:
    """Each into the lowest lane that is free again as it begins."""
    busy: list[tuple[int, int]] = []  # when it is free again, lane
    free: list[int] = []
    number = 0
    for event in sorted(events, key=lambda event: (event.began, event.ended)):
        while busy and busy[0][0] <= event.began:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            heapq.heappush(free, number)
            number += 1
        lane = heapq.heappop(free)
        heapq.heappush(busy, (event.ended, lane))
        yield lane, event
