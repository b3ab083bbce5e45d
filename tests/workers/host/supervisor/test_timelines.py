"""Timelines: whole steps, limited storage, requested steps, and traced steps within the byte rate."""

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
from workers.step_sampling import StepSampler

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
    result = Told()
    stored = TimelineSampler(RANKS, result)
    stored.add(item(5, 1))
    assert result.steps == []
    stored.add(item(4, 1))
    stored.add(item(4, 1))
    assert result.steps == [(1, [4, 5])]


def test_thins_steps_to_multiples_of_a_power_of_two() -> None:
    result = Told()
    stored = TimelineSampler(RANKS, result)
    for step in range(1, 600):
        for rank in RANKS:
            stored.add(item(rank, step, 100_000, step_s=0.1))  # 2 MB a second, eight times what may be
    steps = [step for step, ranks in result.steps if ranks == list(RANKS)]
    assert len(steps) == len(result.steps)
    late = [step for step in steps if step > 100]
    assert late == [step for step in range(101, 600) if step % 8 == 0]


def test_sends_requested_steps_from_storage_or_on_arrival() -> None:
    result = Told()
    stored = TimelineSampler(RANKS, result)
    stored._sampler.level = 10
    for step in (1, 2, 3):
        for rank in RANKS:
            stored.add(item(rank, step))
    assert result.steps == []
    stored.request([2, 7, 10_000])
    stored.request([2, 7, 10_000])
    assert result.steps == [(2, [4, 5])]
    for rank in RANKS:
        stored.add(item(rank, 7))
    assert result.steps == [(2, [4, 5]), (7, [4, 5])]


def test_sends_an_incomplete_step_only_on_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = Told()
    stored = TimelineSampler(RANKS, result)
    stored.add(item(4, 1))
    stored.request([1])
    assert result.steps == []
    monkeypatch.setattr(telemetry_buffer, "MAX_RANK_WAIT_S", 0.0)
    stored.request([1])
    assert result.steps == [(1, [4])]
    stored.add(item(5, 1))
    assert result.steps == [(1, [4]), (1, [5])]


def test_sends_the_last_steps_at_the_end() -> None:
    result = Told()
    stored = TimelineSampler(RANKS, result)
    stored._sampler.level = 10
    for step in range(1, 20):
        stored.add(item(4, step))
        if step < 19:
            stored.add(item(5, step))
    stored.request([17])
    stored.finish()
    assert result.steps == [(17, [4, 5]), (15, [4, 5]), (16, [4, 5]), (18, [4, 5]), (19, [4])]
    stored.add(item(5, 19))
    for rank in RANKS:
        stored.add(item(rank, 20))
    assert result.steps[5:] == [(19, [5]), (20, [4, 5])], "items sent before the last process ended"
    assert LAST_STEPS == 5


def test_limits_stored_steps_and_bytes() -> None:
    stored = TimelineSampler(RANKS, Told())
    for step in range(1, 200):
        stored.add(item(4, step))
    assert sorted(stored._steps) == list(range(200 - MAX_STEPS, 200))
    for step in range(200, 300):
        stored.add(item(4, step, 190_000))
    assert stored._num_bytes == sum(step.num_bytes for step in stored._steps.values()) <= MAX_STEPS_BYTES
    assert len(stored._steps) == MAX_STEPS_BYTES // 190_000
    stored.request(range(1000))
    assert len(stored._requested) == MAX_REQUESTED


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


def run(thinning: StepSampler, steps: range, step_bytes: int, step_s: float) -> list[int]:
    """Return the traced steps."""
    result, last = [], None
    for step in steps:
        if thinning.should_trace(step):
            result.append(step)
            thinning.record_traced_step(step_bytes, step_s)
            last = step
    assert last is not None
    return result


@pytest.mark.parametrize("step_bytes", [100, 1_000, 9_000, 100_000])
def test_traced_steps_stay_within_byte_rate(step_bytes: int) -> None:
    result = run(StepSampler(10_000), range(1, 4001), step_bytes, step_s=0.1)[10:]
    if step_bytes * 10 <= 10_000:
        assert len(result) > 3980
    rate = (len(result) - 1) * step_bytes / ((result[-1] - result[0]) * 0.1)
    assert rate <= 10_000
    assert rate > 10_000 * 0.3 or step_bytes * 10 <= 10_000, "the smallest level that fits"


def test_steps_of_higher_level_are_a_subset() -> None:
    some = run(StepSampler(10_000), range(1, 2001), 3_000, step_s=0.1)
    few = run(StepSampler(10_000), range(1, 2001), 30_000, step_s=0.1)
    assert len(few) < len(some) < 2000
    assert set(few[5:]) <= set(some)


def test_traces_all_steps_again_when_they_become_small() -> None:
    thinning = StepSampler(10_000)
    run(thinning, range(1, 500), 100_000, step_s=0.1)
    assert thinning.level > 3
    run(thinning, range(512, 4000), 100, step_s=0.1)
    assert thinning.level == 0
