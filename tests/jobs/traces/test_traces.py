"""Trace a step and export it to Perfetto and Chrome. Exports are read back with the protos and rules of the format."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
import pytest
import redis
from django.contrib.auth.models import User
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace as Proto
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent
from rest_framework.test import APIClient

from contracts.names import requested_timelines_key, telemetry_stream
from contracts.telemetry.items import TimelineItem
from jobs.models import Attempt, Host, Job, Status
from jobs.queue import actions
from jobs.runs.history.queries.results import HELD_BY_HOSTS
from jobs.runs.traces import export
from jobs.runs.traces.export import assign_lanes
from jobs.runs.traces.trace_events import CollectiveCall, EventTrace, find_arrivals, get_arrival
from jobs.runs.traces.traced_steps import _parse_batch, combine_items
from tests.jobs.conftest import make_member
from tests.jobs.history.sample_telemetry import generate_run, record_batches
from tests.support.telemetry import build_late_rank_step, build_timeline, build_timeline_batch
from workers.host.supervisor.telemetry_buffer import MAX_STEPS

SPEC = {"model": {"preset": "gpt-tiny"}, "layout": {"dp": 2}, "train": {"steps": 5}}


def combine(items: list[TimelineItem]) -> EventTrace:
    return combine_items((traced_job, 0.0) for traced_job in items)


def make_overlapping() -> EventTrace:
    """Return three overlapping all-reduces per rank, and one that ends as it begins."""
    calls = [(0, "all_reduce", n, 10 * n, 0, 100 - 10 * n if n < 3 else 90, 8, -1) for n in (1, 2, 3)]
    calls.append((0, "all_reduce", 4, 95, 0, 95, 8, -1))
    return combine([build_timeline(rank, calls=calls, spans=[("forward", 0, 0, 0, 50)]) for rank in (0, 1)])


def test_last_rank_causes_the_wait() -> None:
    found = combine(build_late_rank_step())
    arrivals = find_arrivals(found.calls)
    assert {(arrival.rank, round(arrival.time, 6)) for arrival in arrivals.values()} == {(1, 1000.08)}
    waits = {call.rank: round(1000.08 - call.issued, 6) for call in found.calls}
    assert waits == {0: 0.03, 1: 0.0}


def test_incomplete_collective_has_no_arrival() -> None:
    assert find_arrivals(combine(build_late_rank_step()[:1]).calls) == {}


def test_matches_send_with_receive() -> None:
    group = [{"axis": "pp", "ranks": [0, 1], "nth": 0}]
    sends = [(0, "send", 1, 10, 0, 60, 4, 1), (0, "send", 2, 70, 0, 90, 4, 1), (0, "recv", 3, 75, 5, 95, 4, 1)]
    takes = [(0, "recv", 1, 50, 10, 60, 4, 0), (0, "send", 2, 72, 0, 95, 4, 0), (0, "recv", 3, 80, 10, 90, 4, 0)]
    found = combine([build_timeline(0, groups=group, calls=sends), build_timeline(1, groups=group, calls=takes)])
    last = {(key[0], key[2]): arrival.rank for key, arrival in find_arrivals(found.calls).items()}
    assert last == {(0, 1): 1, (1, 1): 1, (0, 2): 1, (1, 3): 1, (1, 2): 0, (0, 3): 0}


def test_matches_messages_per_direction() -> None:
    """A message from the last stage was matched with one from the first stage."""
    calls = [
        CollectiveCall(1, rank, "pp", (0, 1, 2), 0, 1, op, issued, 0.0, issued + 9, 8, peer)
        for rank, op, peer, issued in [
            *((0, "send", 1, 10.0), (1, "recv", 0, 9.0), (1, "send", 2, 20.0), (2, "recv", 1, 20.5)),
            *((2, "send", 1, 31.0), (1, "recv", 2, 30.0), (1, "send", 0, 40.0), (0, "recv", 1, 40.5)),
        ]
    ]
    arrivals = find_arrivals(calls)
    traced_job = [(one.rank, one.time) for call in calls if (one := get_arrival(call, arrivals))]
    assert traced_job == [(0, 10.0), (0, 10.0), (2, 20.5), (2, 20.5), (2, 31.0), (2, 31.0), (0, 40.5), (0, 40.5)]


def test_applies_the_clock_offset_of_a_host() -> None:
    first, second = build_late_rank_step()
    traced_job = combine_items([(first, 0.0), ({**second, "began": 700.0}, 300.0)])
    assert {round(call.issued, 3) for call in traced_job.calls} == {1000.05, 1000.08}


def test_lanes_hold_all_events_without_overlap() -> None:
    found = assign_lanes(make_overlapping())
    for events in found.values():
        assert all(one.ended <= other.began for one, other in pairwise(events))
    assert sum(map(len, found.values())) == 10
    assert [lane.title for lane in found if lane.rank == 0] == ["compute", "dp", "dp (2)", "dp (3)"]


def read_perfetto(data: bytes) -> tuple[dict[int, Any], dict[int, list[Any]]]:
    """Return tracks by uuid, and the slices (begin, end, event) of each track."""
    proto = Proto()
    proto.ParseFromString(data)
    tracks = {
        packet.track_descriptor.uuid: packet.track_descriptor
        for packet in proto.packet
        if packet.HasField("track_descriptor")
    }
    stacks: dict[int, list[Any]] = defaultdict(list)
    slices: dict[int, list[Any]] = defaultdict(list)
    events = [packet for packet in proto.packet if packet.HasField("track_event")]
    assert all(packet.trusted_packet_sequence_id for packet in events)
    for packet in sorted(events, key=lambda packet: packet.timestamp):
        event = packet.track_event
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            stacks[event.track_uuid].append(packet)
        else:
            begin = stacks[event.track_uuid].pop()
            slices[event.track_uuid].append((begin.timestamp, packet.timestamp, begin.track_event))
    assert not any(stacks.values()), "each begin has an end"
    return tracks, slices


@pytest.mark.parametrize("made", [combine(build_late_rank_step()), make_overlapping()], ids=["late", "overlapping"])
def test_perfetto_has_tracks_and_flows(made: EventTrace) -> None:
    tracks, slices = read_perfetto(export.write_perfetto(made, "a run"))
    assert set(slices) <= set(tracks)
    ranks = {uuid: track.name for uuid, track in tracks.items() if track.HasField("process")}
    assert sorted(ranks.values()) == ["rank 0", "rank 1"]
    named = {uuid: (ranks[tracks[uuid].parent_uuid], tracks[uuid].name) for uuid in slices}
    assert {name for name in named.values() if "(" not in name[1]} == {
        (f"rank {rank}", track) for rank in (0, 1) for track in ("compute", "dp")
    }
    calls = [event for uuid, found in slices.items() if named[uuid][1] != "compute" for _, _, event in found]
    assert len(calls) == len(made.calls)
    assert set(Counter(flow for event in calls for flow in event.flow_ids).values()) == {2}
    for found in slices.values():
        assert all(begin < end for begin, end, _ in found)


def test_perfetto_shows_wait_and_last_rank() -> None:
    tracks, slices = read_perfetto(export.write_perfetto(combine(build_late_rank_step()), "a run"))
    mine = next(uuid for uuid, track in tracks.items() if track.name == "dp" and track.parent_uuid == 1)
    ((began, ended, event),) = slices[mine]
    notes = {note.name: getattr(note, note.WhichOneof("value")) for note in event.debug_annotations}
    assert (event.name, ended - began) == ("all_reduce", 40_000_000)
    assert (notes["waited_us"], notes["last_rank"], notes["payload_bytes"]) == (pytest.approx(30_000), 1, 4000)


def test_perfetto_has_wall_clock_time() -> None:
    proto = Proto()
    proto.ParseFromString(export.write_perfetto(combine(build_late_rank_step()), "a run"))
    clocks = {clock.clock_id: clock.timestamp for clock in proto.packet[0].clock_snapshot.clocks}
    assert clocks == {1: 1000 * 10**9, 6: 1000 * 10**9}


@pytest.mark.parametrize("began", [0.0, 8e9, 2.0**33, 1.9e10, 2.0**40 - 1])
def test_exports_steps_at_any_accepted_time(began: float) -> None:
    """Perfetto has 63 bits of nanoseconds since 1970."""
    traced_job = build_timeline(
        0, began=began, calls=[(0, "all_reduce", 1, -(10**13), 0, 10**13, 4, -1)], spans=[("forward", 0, 0, 0, 9)]
    )
    found = combine_items(_parse_batch(msgpack.packb(build_timeline_batch("j", traced_job))))
    assert len(found.calls) == (began < 2**33)
    _, slices = read_perfetto(export.write_perfetto(found, "a run"))
    assert sum(map(len, slices.values())) == len(found.calls) + len(found.spans)
    assert len(export.write_chrome(found, "a run")) > 0


@pytest.mark.parametrize("made", [combine(build_late_rank_step()), make_overlapping()], ids=["late", "overlapping"])
def test_chrome_trace_is_well_formed(made: EventTrace) -> None:
    """Each B has an E of the same name on its thread, time never decreases, and flows begin before they end."""
    traced_job = json.loads(export.write_chrome(made, "a run"))
    events = traced_job["traceEvents"]
    assert {event["ph"] for event in events} >= {"M", "B", "E", "s", "f"}
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    timed = [event for event in events if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    open_ones: dict[Any, list[str]] = defaultdict(list)
    flows: dict[int, list[str]] = defaultdict(list)
    for event in timed:
        track = event["pid"], event["tid"]
        assert track in named
        if event["ph"] == "B":
            assert not open_ones[track], "events of a thread do not overlap"
            open_ones[track].append(event["name"])
        elif event["ph"] == "E":
            assert open_ones[track].pop() == event["name"]
        else:
            assert open_ones[track], "a flow leaves from a slice"
            flows[event["id"]].append(event["ph"])
    assert not any(open_ones.values())
    assert all(phases == ["s", "f"] for phases in flows.values())
    assert len([event for event in timed if event["ph"] == "B"]) == len(made.calls) + len(made.spans)


def test_chrome_orders_end_before_begin_at_equal_times() -> None:
    made = combine([build_timeline(0, spans=[("forward", 0, 0, 0, 20), ("forward", 0, 1, 20, 40)], groups=[])])
    events = json.loads(export.write_chrome(made, "a run"))["traceEvents"]
    assert [event["ph"] for event in events if event["ph"] in "BE"] == ["B", "E", "B", "E"]


def test_call_without_end_is_a_point() -> None:
    call = CollectiveCall(0, 0, "dp", (0, 1), 0, 1, "all_reduce", 5.0, 0.0, None, 8, -1)
    _, slices = read_perfetto(export.write_perfetto(EventTrace([call], []), "a run"))
    ((began, ended, event),) = next(iter(slices.values()))
    assert ended - began == 1
    assert "not recorded" in [note.string_value for note in event.debug_annotations]


@pytest.fixture
def traced_job(owner: User, make_host: Callable[..., Host], live_redis: redis.Redis) -> Job:
    """Return a running job whose stream has steps 8 and 16 of all ranks."""
    host = make_host()
    job, _ = actions.submit(owner, SPEC)
    Job.objects.filter(id=job.id).update(status=Status.RUNNING)
    make_member(Attempt.objects.create(job=job, number=1), host)
    for step in (8, 16):
        packed = msgpack.packb(build_timeline_batch(job.id, *build_late_rank_step(step=step)))
        live_redis.xadd(telemetry_stream(job.id, 1), {"b": packed, "n": step})
    live_redis.xadd(telemetry_stream(job.id, 1), {"b": b"timeline \xc1 of no sense", "n": 17})
    job.refresh_from_db()
    return job


def test_user_with_access_downloads_both_formats(
    traced_job: Job, owner: User, stranger: User, viewer: User, api: Callable[[User | None], APIClient]
) -> None:
    path = f"/api/v1/jobs/{traced_job.id}/trace"
    answer = api(owner).get(path, {"format": "chrome", "step": 8})
    assert answer["Content-Disposition"] == f'attachment; filename="{traced_job.id}-1-step-8.json"'
    assert {event["args"]["step"] for event in json.loads(answer.content)["traceEvents"] if event["ph"] == "B"} == {8}
    answer = api(viewer).get(path)
    assert f"{traced_job.id}-1-step-16.pftrace" in answer["Content-Disposition"]
    assert read_perfetto(answer.content)[1]
    assert api(stranger).get(path).status_code == 404
    assert api(None).get(path).status_code == 401


@pytest.mark.parametrize(
    ("query", "status", "field"),
    [
        ({"step": "9"}, 404, "step"),
        ({"step": "-1"}, 400, "step"),
        ({"step": "²"}, 400, "step"),
        ({"attempt": "7"}, 404, "step"),
        ({"attempt": "0"}, 400, "attempt"),
        ({"format": "svg"}, 400, "format"),
    ],
)
def test_rejects_invalid_queries(
    traced_job: Job,
    owner: User,
    api: Callable[[User | None], APIClient],
    query: dict[str, str],
    status: int,
    field: str,
) -> None:
    answer = api(owner).get(f"/api/v1/jobs/{traced_job.id}/trace", query)
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (status, field)


def test_requests_a_step_of_a_running_job(
    traced_job: Job, owner: User, stranger: User, api: Callable[[User | None], APIClient], live_redis: redis.Redis
) -> None:
    path = f"/api/v1/jobs/{traced_job.id}/trace"
    Job.objects.filter(id=traced_job.id).update(
        spec={**traced_job.spec, "train": {**traced_job.spec["train"], "steps": 2000}}
    )
    client = api(owner)
    assert client.post(path, {"step": 120}, format="json").json() == {"steps": [120]}
    assert client.post(path, {"step": 7.0}, format="json").json() == {"steps": [7, 120]}, (
        "7.0 is a whole number of JSON"
    )
    assert live_redis.smembers(requested_timelines_key(traced_job.id, 1)) == {b"7", b"120"}
    assert 0 < live_redis.ttl(requested_timelines_key(traced_job.id, 1)) <= 3600
    for body in ({"step": -1}, {"step": "7"}, {"step": True}, {"step": 7.5}, {}, {"step": 1, "more": 1}, [], 7):
        answer = client.post(path, body, format="json")
        assert answer.status_code == 422, body
    assert api(stranger).post(path, {"step": 1}, format="json").status_code == 404
    live_redis.sadd(requested_timelines_key(traced_job.id, 1), *range(1000, 1062))
    assert client.post(path, {"step": 120}, format="json").status_code == 202, "step 120 is already requested"
    assert client.post(path, {"step": 121}, format="json").status_code == 409
    Job.objects.filter(id=traced_job.id).update(status=Status.SUCCEEDED)
    assert client.post(path, {"step": 122}, format="json").status_code == 409


def test_rejects_a_step_that_no_rank_can_trace(
    traced_job: Job, owner: User, api: Callable[[User | None], APIClient], tmp_path: Path, settings: Any
) -> None:
    path, settings.HISTORY_DIR = f"/api/v1/jobs/{traced_job.id}/trace", tmp_path
    Job.objects.filter(id=traced_job.id).update(
        spec={**traced_job.spec, "train": {**traced_job.spec["train"], "steps": 200}}
    )
    record_batches(tmp_path, list(generate_run(2, 100)), traced_job.id)
    refused = {}
    for step in (201, 36, 37, 200):
        answer = api(owner).post(path, {"step": step}, format="json")
        if answer.status_code == 422:
            (refused[step],) = answer.json()["errors"]
    assert {step: error["pointer"] for step, error in refused.items()} == {201: "/step", 36: "/step"}
    assert refused[201]["message"] == "`step` is 201, but the run has 200 steps. Use a step from 1 to 200."
    assert "hosts keep the last 64 steps and the run is at step 100. Use step 37 or later." in refused[36]["message"]
    assert HELD_BY_HOSTS == MAX_STEPS
