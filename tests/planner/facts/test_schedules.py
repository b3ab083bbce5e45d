"""Pipeline schedules: torch's action lists, published bubbles, and rules that every order obeys."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from planner.cost.pipeline_simulation import compute_bubble_ratio, count_chunks_in_flight, simulate, stretch_timeline
from planner.facts.parse_spec import parse_fields
from planner.facts.schedules import Action, build_actions
from planner.facts.spec import Layout, Schedule
from planner.facts.spec_rules import find_pipeline_problems

CASES: list[tuple[Schedule, int]] = [
    ("naive", 1),
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 3),
    ("looped_bfs", 2),
    ("interleaved_zero_bubble", 1),
    ("interleaved_zero_bubble", 2),
    ("zbv", 2),
    ("dualpipev", 2),
]


def build_layout(schedule: Schedule, pp: int, v: int) -> Layout:
    return Layout(pp=pp, schedule=schedule, virtual_stages=v)


def obeys_schedule_rules(layout: Layout, m: int) -> bool:
    spec = parse_fields(
        {
            "model": {"preset": "megatron-1t"},
            "layout": layout.model_dump(),
            "train": {"global_batch": m, "micro_batches": m},
        }
    )
    return not find_pipeline_problems(spec)


# A private interface of torch, checked with 2.13: the classes' own generators of one rank's list.
_TORCH = {
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


def get_torch_actions(schedule: Schedule, rank: int, pp: int, v: int, m: int) -> list[Action]:
    """Return torch's actions of a rank. An overlapped pair counts as two actions."""
    rounds = max(1, m // pp)
    numbers = SimpleNamespace(
        pp_group_size=pp,
        n_local_stages=v,
        _n_microbatches=m,
        number_of_rounds=rounds,
        microbatches_per_round=m // rounds,
        num_stages=pp * v,
        _num_stages=pp * v,
        _stages=[SimpleNamespace(stage_index=c) for c in range(rank, pp * v, pp)],
        rank=rank,
    )
    made: list[Any] = getattr(torch_schedules, _TORCH[schedule])._calculate_single_rank_operations(numbers, rank)
    flat = [sub for action in made if action is not None for sub in (action.sub_actions or (action,))]
    return [Action(a.computation_type.value, a.microbatch_index, a.stage_index) for a in flat]


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize(("schedule", "v"), [(s, v) for s, v in CASES if s in _TORCH])
def test_action_lists_equal_torch(schedule: Schedule, v: int, pp: int) -> None:
    assert torch.__version__.startswith("2.13")
    for m in (pp, 2 * pp, 4 * pp):
        layout = build_layout(schedule, pp, v)
        if not obeys_schedule_rules(layout, m):
            continue
        for rank in range(pp):
            assert build_actions(layout, rank, m) == get_torch_actions(schedule, rank, pp, v, m), (m, rank)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.sampled_from(CASES), st.integers(2, 9), st.integers(1, 30))
def test_valid_schedule_runs_each_action_once_without_deadlock(case: tuple[Schedule, int], pp: int, m: int) -> None:
    schedule, v = case
    layout = build_layout(schedule, pp, v)
    if not obeys_schedule_rules(layout, m):
        return
    timeline = simulate(layout, m, forward_s=1.0, inputs_s=1.0, weights_s=1.0)
    done = Counter((cell.kind, cell.chunk, cell.micro_batch) for cell in timeline.cells)
    for chunk in range(pp * v):
        for i in range(m):
            assert done["F", chunk, i] == 1
            whole, inputs, weights = (done[kind, chunk, i] for kind in ("B", "I", "W"))
            assert (whole, inputs, weights) in ((1, 0, 0), (0, 1, 1))
    assert max(timeline.busy_s) <= timeline.step_s
    assert len(done) == len(timeline.cells)


@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 8), (8, 16)])
def test_bubbles_equal_published_formulas(pp: int, m: int) -> None:
    """Expect (p - 1) / m for 1F1B and GPipe, and (p - 1) / (v m) for interleaved. Naive keeps one rank busy."""

    def ratio(schedule: Schedule, v: int) -> float:
        t = simulate(build_layout(schedule, pp, v), m, forward_s=1 / v, inputs_s=1 / v, weights_s=1 / v)
        return t.step_s / max(t.busy_s) - 1

    assert ratio("gpipe", 1) == pytest.approx((pp - 1) / m)
    assert ratio("1f1b", 1) == pytest.approx((pp - 1) / m)
    assert ratio("interleaved_1f1b", 2) == pytest.approx((pp - 1) / (2 * m))
    assert ratio("looped_bfs", 2) == pytest.approx((pp - 1) / (2 * m))
    assert ratio("naive", 1) == pytest.approx(pp - 1)
    # 2401.10241 section 3: (p - 1) (F + I - W), of m (F + I + W)
    assert ratio("interleaved_zero_bubble", 1) == pytest.approx((pp - 1) / (3 * m))
    assert ratio("zbv", 2) == pytest.approx((pp - 1) / (6 * m))


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.sampled_from(CASES), st.integers(2, 9), st.integers(1, 30))
def test_in_flight_count_equals_maximum_of_action_list(case: tuple[Schedule, int], pp: int, m: int) -> None:
    schedule, v = case
    layout = build_layout(schedule, pp, v)
    if not obeys_schedule_rules(layout, m):
        return
    timeline = simulate(layout, m, forward_s=1.0, inputs_s=1.0, weights_s=1.0)
    assert tuple(count_chunks_in_flight(layout, rank, m) for rank in range(pp)) == timeline.in_flight


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    st.sampled_from(CASES),
    st.integers(2, 8),
    st.integers(2, 4),
    st.tuples(*[st.floats(0.2, 3.0)] * 3),
)
def test_search_bubble_equals_simulated_bubble(
    case: tuple[Schedule, int], pp: int, rounds: int, work: tuple[float, float, float]
) -> None:
    schedule, v = case
    layout, m = build_layout(schedule, pp, v), rounds * pp
    f, i, w = work
    assert obeys_schedule_rules(layout, m)
    t = simulate(layout, m, forward_s=f / v, inputs_s=i / v, weights_s=w / v)
    idle = t.step_s - max(t.busy_s)
    told = compute_bubble_ratio(layout, m, f, i, w) * (pp - 1) * sum(work)
    few = schedule == "zbv" and m < 2 * pp - 1  # durations differ by a twentieth at most
    assert told == pytest.approx(idle, rel=0.1 if few else 1e-6)


@pytest.mark.parametrize("pp", [2, 3, 8])
@pytest.mark.parametrize("v", [1, 2, 4])
@pytest.mark.parametrize("work", [(1.0, 1.0, 1.0), (1.0, 2.0, 0.5)])
def test_looped_chunks_wait_if_micro_batches_are_fewer_than_stages(
    pp: int, v: int, work: tuple[float, float, float]
) -> None:
    f, i, w = work
    layout = build_layout("looped_bfs", pp, v)
    for m in range(1, pp + 2):
        t = simulate(layout, m, forward_s=f / v, inputs_s=i / v, weights_s=w / v)
        assert compute_bubble_ratio(layout, m, f, i, w) * (pp - 1) * sum(work) == pytest.approx(
            t.step_s - max(t.busy_s)
        ), m


def test_concurrent_ranks_on_shared_cores_stretch_time() -> None:
    """Both stages of GPipe's 6 seconds compute from second 1 to 2 and from 4 to 5."""
    timeline = simulate(build_layout("gpipe", 2, 1), 2, forward_s=1.0, inputs_s=0.5, weights_s=0.5)
    assert stretch_timeline(timeline, [1.0, 1.0]) == (6.0, (4.0, 4.0))
    assert stretch_timeline(timeline, [1.0, 2.0]) == (8.0, (6.0, 6.0))


def test_rank_with_more_layers_takes_longer() -> None:
    timeline = simulate(build_layout("1f1b", 2, 1), 1, forward_s=1.0, inputs_s=1.0, weights_s=1.0, slowdowns=[1.0, 2.0])
    assert timeline.busy_s == (3.0, 6.0)
    assert timeline.step_s == 9.0
