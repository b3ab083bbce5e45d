"""Timelines: whole steps, limited storage, and requested steps."""

from __future__ import annotations

import msgpack
import pytest

from contracts.telemetry.items import CollectiveCalls, ComputeSpans, PhaseItem, TimelineItem
from workers.host.supervisor import telemetry_buffer
from workers.host.supervisor.telemetry_buffer import (
    ENVELOPE_BYTES,
    LAST_STEPS,
    MAX_REQUESTED,
    MAX_STEPS,
    MAX_STEPS_BYTES,
    MAX_TIMELINE_BYTES,
    TelemetryBuffer,
    TimelineQueue,
    TimelineSampler,
)

RANKS = (4, 5)
PLENTY = 2**40


def item(rank: int, step: int, num_bytes: int = 300, step_s: float = 1.0) -> TimelineItem:
    nothing: list[int] = []
    calls = CollectiveCalls(
        group=nothing,
        op=[],
        sequence=nothing,
        issued_us=nothing,
        blocked_us=nothing,
        ended_us=nothing,
        payload_bytes=[0] * (num_bytes - 300),
        peer=nothing,
    )
    spans = ComputeSpans(work=[], chunk=[], micro_batch=[], from_us=[], to_us=[])
    return TimelineItem(
        kind="timeline",
        rank=rank,
        time=0.0,
        step=step,
        began=step * step_s,
        step_s=step_s,
        groups=[],
        calls=calls,
        spans=spans,
        left_out=0,
    )


class Told:
    """The steps that were sent, as (step, ranks)."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, list[int]]] = []

    def __call__(self, items: list[TimelineItem]) -> None:
        (step,) = {item["step"] for item in items}
        self.steps.append((step, [item["rank"] for item in items]))


def test_sends_a_step_once_when_its_last_rank_arrives() -> None:
    told = Told()
    kept = TimelineSampler(RANKS, told)
    kept.add(item(5, 1))
    assert told.steps == []
    kept.add(item(4, 1))
    kept.add(item(4, 1))
    assert told.steps == [(1, [4, 5])]


def test_thins_steps_to_multiples_of_a_power_of_two() -> None:
    told = Told()
    kept = TimelineSampler(RANKS, told)
    for step in range(1, 600):
        for rank in RANKS:
            kept.add(item(rank, step, 100_000, step_s=0.1))  # 2 MB a second, eight times what may be
    steps = [step for step, ranks in told.steps if ranks == list(RANKS)]
    assert len(steps) == len(told.steps)
    late = [step for step in steps if step > 100]
    assert late == [step for step in range(101, 600) if step % 8 == 0]


def test_sends_requested_steps_from_storage_or_on_arrival() -> None:
    told = Told()
    kept = TimelineSampler(RANKS, told)
    kept._sampler.level = 10
    for step in (1, 2, 3):
        for rank in RANKS:
            kept.add(item(rank, step))
    assert told.steps == []
    kept.request([2, 7, 10_000])
    kept.request([2, 7, 10_000])
    assert told.steps == [(2, [4, 5])]
    for rank in RANKS:
        kept.add(item(rank, 7))
    assert told.steps == [(2, [4, 5]), (7, [4, 5])]


def test_sends_an_incomplete_step_only_on_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = Told()
    kept = TimelineSampler(RANKS, told)
    kept.add(item(4, 1))
    kept.request([1])
    assert told.steps == []
    monkeypatch.setattr(telemetry_buffer, "MAX_RANK_WAIT_S", 0.0)
    kept.request([1])
    assert told.steps == [(1, [4])]
    kept.add(item(5, 1))
    assert told.steps == [(1, [4]), (1, [5])]


def test_sends_the_last_steps_at_the_end() -> None:
    told = Told()
    kept = TimelineSampler(RANKS, told)
    kept._sampler.level = 10
    for step in range(1, 20):
        kept.add(item(4, step))
        if step < 19:
            kept.add(item(5, step))
    kept.request([17])
    kept.finish()
    assert told.steps == [(17, [4, 5]), (15, [4, 5]), (16, [4, 5]), (18, [4, 5]), (19, [4])]
    kept.add(item(5, 19))
    for rank in RANKS:
        kept.add(item(rank, 20))
    assert told.steps[5:] == [(19, [5]), (20, [4, 5])], "items sent before the last process ended"
    assert LAST_STEPS == 5


def test_limits_stored_steps_and_bytes() -> None:
    kept = TimelineSampler(RANKS, Told())
    for step in range(1, 200):
        kept.add(item(4, step))
    assert sorted(kept._steps) == list(range(200 - MAX_STEPS, 200))
    for step in range(200, 300):
        kept.add(item(4, step, 190_000))
    assert kept._num_bytes == sum(step.num_bytes for step in kept._steps.values()) <= MAX_STEPS_BYTES
    assert len(kept._steps) == MAX_STEPS_BYTES // 190_000
    kept.request(range(1000))
    assert len(kept._requested) == MAX_REQUESTED


def test_drops_whole_steps_but_finishes_a_partial_one() -> None:
    lane = TimelineQueue(10_000)
    for step in range(1, 4):
        lane.add([item(rank, step, 1600) for rank in RANKS])
    begun, used = lane.take(2000)
    assert [(one["step"], one["rank"]) for one in begun] == [(1, 4)]
    assert used == len(msgpack.packb(begun[0]))
    lane.add([item(rank, 4, 1600) for rank in RANKS])
    taken, _ = lane.take(PLENTY)
    assert [(one["step"], one["rank"]) for one in taken] == [(1, 5), (3, 4), (3, 5), (4, 4), (4, 5)]
    assert lane.num_bytes == 0


def test_sends_timelines_after_everything_else() -> None:
    board = TelemetryBuffer()
    board.add_step([item(rank, 1, 50_000) for rank in RANKS])
    board.add(PhaseItem(kind="phase", rank=4, time=0.0, phase="step"))
    load = board.take(ENVELOPE_BYTES + 60_000, PLENTY)
    assert load is not None
    assert [one["kind"] for one in load.items] == ["phase", "timeline"]
    assert len(msgpack.packb(load.items)) <= load.size + 16 <= ENVELOPE_BYTES + 60_016
    load = board.take(PLENTY, PLENTY)
    assert load is not None
    assert [(one["kind"], one["rank"]) for one in load.items] == [("timeline", 5)]
    for step in range(1, 200):
        board.add_step([item(rank, step, 50_000) for rank in RANKS])
    load = board.take(PLENTY, PLENTY)
    assert load is not None
    assert {one["kind"] for one in load.items} == {"timeline"}, "samples leave no gap"
    assert len(msgpack.packb(load.items)) <= MAX_TIMELINE_BYTES
    assert len(load.items) % len(RANKS) == 0
