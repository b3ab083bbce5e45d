"""Export traces to Perfetto and to Chrome's JSON."""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackDescriptor, TrackEvent
from perfetto.trace_builder.proto_builder import TraceProtoBuilder
from typing_extensions import TypedDict

from jobs.runs.traces.trace_events import (
    Arrival,
    Arrivals,
    CollectiveCall,
    EventTrace,
    WorkSpan,
    find_arrivals,
    get_arrival,
)

COMPUTE = "compute"
SEQUENCE_ID = 1
REALTIME, BOOTTIME = 1, 6  # ids of Perfetto's clocks: traces use BOOTTIME


class Lane(NamedTuple):
    """Identify a track of a rank: compute, or the collectives of an axis. `part` numbers parallel tracks."""

    rank: int
    name: str
    part: int

    @property
    def title(self) -> str:
        return self.name if self.part == 0 else f"{self.name} ({self.part + 1})"


class LaneEvent(NamedTuple):
    """Hold a traced event with times in nanoseconds since 1970."""

    began: int
    ended: int
    source: CollectiveCall | WorkSpan


def assign_lanes(trace: EventTrace) -> dict[Lane, list[LaneEvent]]:
    """Assign each event to a lane without overlaps. Lanes are sorted by rank, compute first."""
    rows: dict[tuple[int, str], list[LaneEvent]] = defaultdict(list)
    for span in trace.spans:
        rows[span.rank, COMPUTE].append(_convert(span.began, span.ended, span))
    for call in trace.calls:
        rows[call.rank, call.axis].append(_convert(call.issued, call.ended, call))
    by_lane: dict[Lane, list[LaneEvent]] = {}
    for (rank, name), events in sorted(rows.items(), key=lambda row: (row[0][0], row[0][1] != COMPUTE, row[0][1])):
        for part, event in _assign_lanes(events):
            by_lane.setdefault(Lane(rank, name, part), []).append(event)
    return dict(sorted(by_lane.items(), key=lambda item: (item[0].rank, item[0].name != COMPUTE, *item[0][1:])))


def _convert(began: float, ended: float | None, source: CollectiveCall | WorkSpan) -> LaneEvent:
    first = max(0, round(began * 1e9))
    return LaneEvent(first, max(first + 1, first if ended is None else round(ended * 1e9)), source)


def _assign_lanes(events: list[LaneEvent]) -> Iterator[tuple[int, LaneEvent]]:
    """Yield each event with the lowest lane that is free when the event begins."""
    busy: list[tuple[int, int]] = []  # end of the event, lane
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


Annotations = dict[str, int | float | str]


def format_title(event: CollectiveCall | WorkSpan) -> str:
    """Return the name of a slice: "forward 3" for micro-batch 3, or "all_reduce"."""
    if isinstance(event, CollectiveCall):
        return event.op
    return event.work if event.micro_batch < 0 else f"{event.work} {event.micro_batch}"


def get_annotations(event: CollectiveCall | WorkSpan, arrival: Arrival | None) -> Annotations:
    """Return the figures of an event: microseconds (_us) and payload bytes."""
    if isinstance(event, WorkSpan):
        return {"step": event.step, "chunk": event.chunk, "micro_batch": event.micro_batch}
    annotations: Annotations = {
        "step": event.step,
        "axis": event.axis,
        "ranks": ", ".join(map(str, event.ranks)),
        "sequence": event.sequence,
    }
    if event.payload_bytes is not None:
        annotations["payload_bytes"] = event.payload_bytes
    if event.blocked_s is not None:
        annotations["exposed_us"] = round(event.blocked_s * 1e6, 3)
    if event.peer >= 0:
        annotations["peer"] = event.peer
    if event.ended is None:
        annotations["end"] = "not recorded"
    if arrival is not None:
        complete = arrival.time if event.ended is None else min(arrival.time, event.ended)
        annotations |= {"waited_us": round(max(0.0, complete - event.issued) * 1e6, 3), "last_rank": arrival.rank}
    return annotations


class ChromeTrace(TypedDict):
    """Hold Chrome's JSON. Times are microseconds since the begin of the trace."""

    displayTimeUnit: str
    traceEvents: list[dict[str, Any]]


def write_chrome(trace: EventTrace, name: str) -> bytes:
    """Write the Trace Event Format of Chrome, which chrome://tracing, Perfetto, and speedscope read.

    Each rank is a process, with a thread for compute and for each axis. Events are sorted by time. Every B has an E on
    its thread, and events of a thread do not overlap.
    """
    origin = round(trace.began * 1e9)
    arrivals = find_arrivals(trace.calls)
    head: list[dict[str, Any]] = []
    events: list[tuple[int, dict[str, Any]]] = []
    flows: dict[int, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for rank in trace.get_ranks():
        process_args = {"name": f"rank {rank} · {name}"}
        head.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": process_args})
    for thread, (lane, lane_events) in enumerate(assign_lanes(trace).items(), start=1):
        thread_id = {"pid": lane.rank, "tid": thread}
        head.append({"ph": "M", "name": "thread_name", **thread_id, "args": {"name": lane.title}})
        head.append({"ph": "M", "name": "thread_sort_index", **thread_id, "args": {"sort_index": thread}})
        for event in lane_events:
            source = event.source
            arrival = get_arrival(source, arrivals)
            common = {"name": format_title(source), "cat": lane.name, **thread_id}
            began, ended = ((time - origin) / 1e3 for time in event[:2])
            events.append((event.began, {"ph": "B", "ts": began, **common, "args": get_annotations(source, arrival)}))
            events.append((event.ended, {"ph": "E", "ts": ended, **common}))
            if arrival is not None:
                flows[arrival.number].append((event.began, {"ts": began, **common}))
    for number, points in flows.items():
        points.sort(key=lambda point: point[0])
        for place, (time, at) in enumerate(points):
            phase = "s" if place == 0 else "f" if place == len(points) - 1 else "t"
            events.append((time, {"ph": phase, "id": number, "bp": "e", **at}))
    # The sort is stable: at one time, an end stays before the next begin of its lane, and flows stay after both.
    events.sort(key=lambda event: event[0])
    written: ChromeTrace = {"displayTimeUnit": "ms", "traceEvents": [*head, *(event for _, event in events)]}
    return json.dumps(written).encode()


def write_perfetto(trace: EventTrace, name: str) -> bytes:
    """Write a trace for ui.perfetto.dev. `name` is in the title of every rank.

    Each rank is a process, with a track for compute and for each axis, and flows between ranks.
    The protos come from the library (perfetto.dev/docs/reference/synthetic-track-event).
    """
    builder = TraceProtoBuilder()
    # Map the time of the trace to wall time, so that viewers show the time of day.
    clock_packet = _add_packet(builder)
    clock_packet.sequence_flags = TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
    for clock in (BOOTTIME, REALTIME):
        clock_packet.clock_snapshot.clocks.add(clock_id=clock, timestamp=max(0, round(trace.began * 1e9)))
    arrivals, ranks = find_arrivals(trace.calls), trace.get_ranks()
    for rank in ranks:
        track = _add_packet(builder).track_descriptor
        track.uuid = _get_rank_uuid(rank)
        track.name = f"rank {rank}"
        track.process.pid = rank + 1  # 0 is the kernel
        track.process.process_name = f"rank {rank} · {name}"
        track.child_ordering = TrackDescriptor.EXPLICIT
    for uuid, (lane, events) in enumerate(assign_lanes(trace).items(), start=max(ranks, default=0) + 2):
        track = _add_packet(builder).track_descriptor
        track.uuid = track.sibling_order_rank = uuid
        track.parent_uuid = _get_rank_uuid(lane.rank)
        track.name = lane.title
        for event in events:
            _write_slice(builder, uuid, event, arrivals)
    data: bytes = builder.serialize()
    return data


def _get_rank_uuid(rank: int) -> int:
    return rank + 1


def _add_packet(builder: TraceProtoBuilder) -> TracePacket:
    packet = builder.add_packet()
    packet.trusted_packet_sequence_id = SEQUENCE_ID
    return packet


def _write_slice(builder: TraceProtoBuilder, track: int, event: LaneEvent, arrivals: Arrivals) -> None:
    source = event.source
    arrival = get_arrival(source, arrivals)
    begin = _add_packet(builder)
    begin.timestamp = event.began
    begin.track_event.type = TrackEvent.TYPE_SLICE_BEGIN
    begin.track_event.track_uuid = track
    begin.track_event.name = format_title(source)
    begin.track_event.categories.append("collective" if isinstance(source, CollectiveCall) else "compute")
    if arrival is not None:
        begin.track_event.flow_ids.append(arrival.number)
    for key, value in get_annotations(source, arrival).items():
        note = begin.track_event.debug_annotations.add(name=key)
        if isinstance(value, str):
            note.string_value = value
        elif isinstance(value, float):
            note.double_value = value
        else:
            note.int_value = value
    end = _add_packet(builder)
    end.timestamp = event.ended
    end.track_event.type = TrackEvent.TYPE_SLICE_END
    end.track_event.track_uuid = track


class TraceFormat(NamedTuple):
    """Describe a file format of traces."""

    content_type: str
    suffix: str
    write: Callable[[EventTrace, str], bytes]


FORMATS = {
    "perfetto": TraceFormat("application/octet-stream", "pftrace", write_perfetto),
    "chrome": TraceFormat("application/json", "json", write_chrome),
}
