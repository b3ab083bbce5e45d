"""Pipeline schedules keep what their papers promise, and the learning rate its shape."""

from __future__ import annotations

from itertools import pairwise

import pytest

from planner.spec import Schedule, TrainSpec
from workers.trainer.optimizer import learning_rate
from workers.trainer.pipeline_parallel import Action, actions

SHAPES = [(pp, m) for pp in (1, 2, 3, 4, 8) for m in (1, 2, 4, 8, 16)]


def most_in_flight(order: list[Action]) -> int:
    in_flight = most = 0
    for action in order:
        in_flight += 1 if action.kind == "F" else -1
        most = max(most, in_flight)
    return most


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_each_micro_batch_goes_forward_once_and_then_back_once(schedule: Schedule) -> None:
    for pp, m in SHAPES:
        for stage in range(pp):
            order = actions(schedule, stage, pp, m)
            assert sorted(order) == sorted(Action(kind, i) for kind in "BF" for i in range(m))  # type: ignore[arg-type]
            assert all(order.index(Action("F", i)) < order.index(Action("B", i)) for i in range(m))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_that_only_wait_for_their_neighbours_all_finish(schedule: Schedule) -> None:
    for pp, m in SHAPES:
        left = [actions(schedule, stage, pp, m) for stage in range(pp)]
        done: set[tuple[int, Action]] = set()

        def ready(stage: int, action: Action, pp: int = pp, done: set[tuple[int, Action]] = done) -> bool:
            neighbour = stage - 1 if action.kind == "F" else stage + 1
            return not 0 <= neighbour < pp or (neighbour, action) in done

        while any(left):
            movable = [stage for stage in range(pp) if left[stage] and ready(stage, left[stage][0])]
            assert movable, f"{schedule} with {pp} stages and {m} micro-batches stops half way"
            for stage in movable:
                done.add((stage, left[stage].pop(0)))


def test_1f1b_keeps_as_many_micro_batches_as_stages_lie_ahead_and_gpipe_all() -> None:
    for pp, m in SHAPES:
        for stage in range(pp):
            assert most_in_flight(actions("1f1b", stage, pp, m)) == min(m, pp - stage)
            assert most_in_flight(actions("gpipe", stage, pp, m)) == (m if pp > 1 else 1)


def test_the_learning_rate_climbs_then_falls_along_a_cosine_to_a_tenth() -> None:
    train = TrainSpec(learning_rate=1.0, warmup_steps=4, steps=24)
    rates = [learning_rate(step, train) for step in range(24)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[14] == pytest.approx(0.55)
    assert all(later < earlier for earlier, later in pairwise(rates[4:]))
    assert learning_rate(24, train) == pytest.approx(0.1)
    assert learning_rate(0, TrainSpec(learning_rate=1.0, warmup_steps=0, steps=1)) == 1.0
