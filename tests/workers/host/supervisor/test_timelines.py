"""Steps event by event: told with all their ranks or not at all, kept within bytes, told when they are asked for."""

from __future__ import annotations

import msgpack
import pytest

from contracts.telemetry.steps import PhaseItem
from contracts.telemetry.timeline import CollectiveCalls, ComputeSpans, TimelineItem
from workers.host.supervisor import timelines
from workers.host.supervisor.board import ENVELOPE_BYTES, STEPS_BYTES, Board
from workers.host.supervisor.timelines import KEPT_BYTES, KEPT_STEPS, LAST_STEPS, MOST_WANTED, StepLane, Timelines

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
    """What came out, as (step, ranks)."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, list[int]]] = []

    def __call__(self, items: list[TimelineItem]) -> None:
        (step,) = {item["step"] for item in items}
        self.steps.append((step, [item["rank"] for item in items]))


def test_a_step_is_told_when_its_last_rank_has_and_once() -> None:
    told = Told()
    kept = Timelines(RANKS, told)
    kept.add(item(5, 1))
    assert told.steps == []
    kept.add(item(4, 1))
    kept.add(item(4, 1))
    assert told.steps == [(1, [4, 5])]


def test_of_more_than_may_be_told_every_second_power_s_step_is_whole() -> None:
    told = Told()
    kept = Timelines(RANKS, told)
    for step in range(1, 600):
        for rank in RANKS:
            kept.add(item(rank, step, 100_000, step_s=0.1))  # 2 MB a second, eight times what may be
    steps = [step for step, ranks in told.steps if ranks == list(RANKS)]
    assert len(steps) == len(told.steps)
    late = [step for step in steps if step > 100]
    assert late == [step for step in range(101, 600) if step % 8 == 0]


def test_what_was_not_told_is_told_when_asked_for_from_what_is_kept_or_when_it_comes() -> None:
    told = Told()
    kept = Timelines(RANKS, told)
    kept._thinning.level = 10
    for step in (1, 2, 3):
        for rank in RANKS:
            kept.add(item(rank, step))
    assert told.steps == []
    kept.want([2, 7, 10_000])
    kept.want([2, 7, 10_000])
    assert told.steps == [(2, [4, 5])]
    for rank in RANKS:
        kept.add(item(rank, 7))
    assert told.steps == [(2, [4, 5]), (7, [4, 5])]


def test_a_step_that_does_not_become_whole_is_told_only_when_asked_for_and_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = Told()
    kept = Timelines(RANKS, told)
    kept.add(item(4, 1))
    kept.want([1])
    assert told.steps == []
    monkeypatch.setattr(timelines, "WHOLE_S", 0.0)
    kept.want([1])
    assert told.steps == [(1, [4])]
    kept.add(item(5, 1))
    assert told.steps == [(1, [4]), (1, [5])]


def test_the_last_steps_are_told_at_the_end_whole_or_not() -> None:
    told = Told()
    kept = Timelines(RANKS, told)
    kept._thinning.level = 10
    for step in range(1, 20):
        kept.add(item(4, step))
        if step < 19:
            kept.add(item(5, step))
    kept.want([17])
    kept.finish()
    assert told.steps == [(17, [4, 5]), (15, [4, 5]), (16, [4, 5]), (18, [4, 5]), (19, [4])]
    kept.add(item(5, 19))
    for rank in RANKS:
        kept.add(item(rank, 20))
    assert told.steps[5:] == [(19, [5]), (20, [4, 5])], "what was on its way when the last process ended"
    assert LAST_STEPS == 5


def test_what_is_kept_is_bounded_in_steps_and_in_bytes() -> None:
    kept = Timelines(RANKS, Told())
    for step in range(1, 200):
        kept.add(item(4, step))
    assert sorted(kept._steps) == list(range(200 - KEPT_STEPS, 200))
    for step in range(200, 300):
        kept.add(item(4, step, 190_000))
    assert kept._num_bytes == sum(step.num_bytes for step in kept._steps.values()) <= KEPT_BYTES
    assert len(kept._steps) == KEPT_BYTES // 190_000
    kept.want(range(1000))
    assert len(kept._wanted) == MOST_WANTED


def test_steps_on_their_way_go_whole_when_there_are_too_many_and_one_begun_is_ended() -> None:
    lane = StepLane(10_000)
    for step in range(1, 4):
        lane.add([item(rank, step, 1600) for rank in RANKS])
    begun, used = lane.take(2000)
    assert [(one["step"], one["rank"]) for one in begun] == [(1, 4)]
    assert used == len(msgpack.packb(begun[0]))
    lane.add([item(rank, 4, 1600) for rank in RANKS])
    taken, _ = lane.take(PLENTY)
    assert [(one["step"], one["rank"]) for one in taken] == [(1, 5), (3, 4), (3, 5), (4, 4), (4, 5)]
    assert lane.num_bytes == 0


def test_on_the_board_steps_wait_behind_everything_else() -> None:
    board = Board()
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
    assert len(msgpack.packb(load.items)) <= STEPS_BYTES
    assert len(load.items) % len(RANKS) == 0
