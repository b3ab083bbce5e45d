"""A trace for ui.perfetto.dev: a process for each rank, a track for its compute and each axis, and flows between ranks.

Written with the library's own protos (perfetto.dev/docs/reference/synthetic-track-event).
"""

from __future__ import annotations

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackDescriptor, TrackEvent
from perfetto.trace_builder.proto_builder import TraceProtoBuilder

from jobs.runs.traces.arrivals import Arrivals, arrival_of, meetings
from jobs.runs.traces.lanes import Event, lanes
from jobs.runs.traces.shapes import Call, Trace
from jobs.runs.traces.written import said, title

CONTENT_TYPE = "application/octet-stream"
SUFFIX = "pftrace"
SEQUENCE = 1
REALTIME, BOOTTIME = 1, 6  # builtin clocks; a trace's own time is the latter


def write(trace: Trace, name: str) -> bytes:
    """The file. `name` heads every rank."""
    builder = TraceProtoBuilder()
    _clock(builder.add_packet(), max(0, round(trace.began * 1e9)))
    found = lanes(trace)
    arrivals = meetings(trace.calls)
    for rank in trace.ranks():
        _rank(builder.add_packet(), rank, name)
    for uuid, (lane, events) in enumerate(found.items(), start=_first_lane(trace)):
        _lane(builder.add_packet(), uuid, lane.rank, lane.title, uuid)
        for event in events:
            _slice(builder, uuid, event, arrivals)
    told: bytes = builder.serialize()
    return told


def _first_lane(trace: Trace) -> int:
    return max(trace.ranks(), default=0) + 2


def _rank_uuid(rank: int) -> int:
    return rank + 1


def _clock(packet: TracePacket, now: int) -> None:
    """Times of the trace are of the wall: a viewer can say when in the day."""
    packet.trusted_packet_sequence_id = SEQUENCE
    packet.sequence_flags = TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
    for clock in (BOOTTIME, REALTIME):
        packet.clock_snapshot.clocks.add(clock_id=clock, timestamp=now)


def _rank(packet: TracePacket, rank: int, name: str) -> None:
    packet.trusted_packet_sequence_id = SEQUENCE
    track = packet.track_descriptor
    track.uuid = _rank_uuid(rank)
    track.name = f"rank {rank}"
    track.process.pid = rank + 1  # 0 is the kernel's
    track.process.process_name = f"rank {rank} · {name}"
    track.child_ordering = TrackDescriptor.EXPLICIT


def _lane(packet: TracePacket, uuid: int, rank: int, name: str, order: int) -> None:
    packet.trusted_packet_sequence_id = SEQUENCE
    track = packet.track_descriptor
    track.uuid = uuid
    track.parent_uuid = _rank_uuid(rank)
    track.name = name
    track.sibling_order_rank = order


def _slice(builder: TraceProtoBuilder, track: int, event: Event, arrivals: Arrivals) -> None:
    of = event.of
    arrival = arrival_of(of, arrivals)
    begin = builder.add_packet()
    begin.timestamp = event.began
    begin.trusted_packet_sequence_id = SEQUENCE
    begin.track_event.type = TrackEvent.TYPE_SLICE_BEGIN
    begin.track_event.track_uuid = track
    begin.track_event.name = title(of)
    begin.track_event.categories.append("collective" if isinstance(of, Call) else "compute")
    if arrival is not None:
        begin.track_event.flow_ids.append(arrival.number)
    for key, value in said(of, arrival).items():
        note = begin.track_event.debug_annotations.add(name=key)
        if isinstance(value, str):
            note.string_value = value
        elif isinstance(value, float):
            note.double_value = value
        else:
            note.int_value = value
    end = builder.add_packet()
    end.timestamp = event.ended
    end.trusted_packet_sequence_id = SEQUENCE
    end.track_event.type = TrackEvent.TYPE_SLICE_END
    end.track_event.track_uuid = track
