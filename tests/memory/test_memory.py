"""A sample of what `make memory` holds, and the shortcuts that make the plan quick."""

from __future__ import annotations

from itertools import islice

import pytest

from planner.cost.memory import memory, most_bytes
from planner.cost.memory.moments import Pipe, _moments
from planner.cost.timing import alike_stages
from planner.facts.parse import parse_fields
from planner.facts.spec import Schedule
from tests.memory.__main__ import MOST_OFF, holds
from tests.memory.cases import specs
from tests.memory.compare import found
from workers.dry_run.rank import dry_step


def test_random_layouts_need_what_the_plan_says() -> None:
    rows = [row for spec in islice(specs(seed=7), 5) for row in found(spec)]
    assert holds(rows), [(row.words, row.stage, row.off) for row in rows if abs(row.off) > MOST_OFF / 2]


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_zero_bubble", 1), ("zbv", 2), ("dualpipev", 2), ("naive", 1)],
)
@pytest.mark.parametrize("pp", [2, 4])
def test_a_schedule_shows_all_its_moments_early(schedule: Schedule, chunks: int, pp: int) -> None:
    for stage in range(pp):
        pipe = Pipe(schedule, pp, chunks, stage, tuple(range(chunks)))
        assert set(_moments(pipe, 4 * pp)) == set(_moments(pipe, 9 * pp))


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_zero_bubble", 1), ("zbv", 2), ("dualpipev", 2), ("gpipe", 1)],
)
@pytest.mark.parametrize("zero", [0, 1])
def test_a_search_finds_the_fullest_of_all_stages(schedule: Schedule, chunks: int, zero: int) -> None:
    layout = {"pp": 8, "dp": 2, "zero": zero, "schedule": schedule, "virtual_stages": chunks}
    model = {"preset": "gpt-mini", "num_layers": 19}
    for micro_batches in (16, 32):
        train = {"global_batch": 2 * micro_batches, "micro_batches": micro_batches, "precision": "bf16"}
        spec = parse_fields({"model": model, "layout": layout, "train": train})
        every = [sum(memory(spec, stage).values()) for stage in range(8)]
        assert max(most_bytes(spec, stages) for stages in alike_stages(spec)) == max(every)


def test_a_split_backward_lets_go_of_a_micro_batch_when_its_weights_are_done() -> None:
    """The bags that weight gradients wait in once stayed full: a circle of graph and bag that nothing broke."""

    def peak(micro_batches: int) -> int:
        layout = {"pp": 2, "schedule": "interleaved_zero_bubble"}
        train = {"global_batch": micro_batches, "micro_batches": micro_batches, "seq_len": 256}
        spec = parse_fields({"model": {"preset": "gpt-mini"}, "layout": layout, "train": train})
        return dry_step(spec, 1).peak_bytes

    assert peak(12) == pytest.approx(peak(6), rel=1e-3)
