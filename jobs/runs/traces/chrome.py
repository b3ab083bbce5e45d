"""A trace as Chrome's JSON (the Trace Event Format), which chrome://tracing, Perfetto and speedscope read.

A process for each rank, a thread for its compute and each axis. Events are sorted by time; every B has its E on the
same thread, and nothing on a thread overlaps.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from typing_extensions import TypedDict

from jobs.runs.traces.arrivals import arrival_of, meetings
from jobs.runs.traces.lanes import lanes
from jobs.runs.traces.shapes import Trace
from jobs.runs.traces.written import said, title

CONTENT_TYPE = "application/json"
SUFFIX = "json"


class ChromeTrace(TypedDict):
    """Chrome's JSON. Times are microseconds since the trace began."""

    displayTimeUnit: str
    traceEvents: list[dict[str, Any]]


def write(trace: Trace, name: str) -> bytes:
    """The file."""
    origin = round(trace.began * 1e9)
    arrivals = meetings(trace.calls)
    head: list[dict[str, Any]] = []
    events: list[tuple[int, dict[str, Any]]] = []
    flows: dict[int, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for rank in trace.ranks():
        named = {"name": f"rank {rank} · {name}"}
        head.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": named})
    for thread, (lane, found) in enumerate(lanes(trace).items(), start=1):
        where = {"pid": lane.rank, "tid": thread}
        head.append({"ph": "M", "name": "thread_name", **where, "args": {"name": lane.title}})
        head.append({"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": thread}})
        for event in found:
            of = event.of
            arrival = arrival_of(of, arrivals)
            slice_of = {"name": title(of), "cat": lane.name, **where}
            began, ended = ((time - origin) / 1e3 for time in event[:2])
            events.append((event.began, {"ph": "B", "ts": began, **slice_of, "args": said(of, arrival)}))
            events.append((event.ended, {"ph": "E", "ts": ended, **slice_of}))
            if arrival is not None:
                flows[arrival.number].append((event.began, {"ts": began, **slice_of}))
    for number, points in flows.items():
        points.sort(key=lambda point: point[0])
        for place, (time, at) in enumerate(points):
            phase = "s" if place == 0 else "f" if place == len(points) - 1 else "t"
            events.append((time, {"ph": phase, "id": number, "bp": "e", **at}))
    # What is at one moment stays as it came: an end before the next begin of its lane, flows after both.
    events.sort(key=lambda event: event[0])
    written: ChromeTrace = {"displayTimeUnit": "ms", "traceEvents": [*head, *(event for _, event in events)]}
    return json.dumps(written).encode()
