"""Parts of a step as the mean of all ranks, if stages differ."""

from __future__ import annotations

from typing import Any

import pytest

from planner.cost.estimate import estimate
from planner.cost.stage_time import Timing
from planner.cost.timing import Timer
from planner.facts.parse_spec import parse_fields
from planner.facts.spec import JobSpec
from planner.hardware.catalog import CLUSTERS, use_cores

H100 = CLUSTERS["h100"]


def _spec(model: dict[str, Any], **layout: Any) -> JobSpec:
    train = {"global_batch": 16 * layout.get("dp", 1), "micro_batches": 8, "seq_len": 512}
    return parse_fields({"model": {"preset": "llama-mini", **model}, "layout": layout, "train": train})


HEAVY_HEAD = {"vocab_size": 50_257}
PIPES = [
    _spec(HEAVY_HEAD, pp=2, recompute="full"),
    _spec(HEAVY_HEAD, pp=4, dp=2, zero=1, schedule="zbv", virtual_stages=2),
    _spec({"num_layers": 7}, pp=2, tp=2, schedule="interleaved_1f1b", virtual_stages=2),
]


def _sum_parts(t: Timing) -> float:
    return t.compute_s + t.recompute_s + sum(t.exposed_s.values()) + t.launch_s + t.bubble_s + t.optimizer_s


@pytest.mark.parametrize("spec", PIPES, ids=lambda spec: spec.layout.schedule)
def test_mean_parts_of_all_ranks_add_up_to_the_step(spec: JobSpec) -> None:
    timer = Timer(H100)
    slowest, mean = timer.get_step(spec), timer.get_rank_mean(spec)
    assert _sum_parts(mean) == pytest.approx(mean.step_s) == pytest.approx(slowest.step_s)
    assert mean.compute_s < 0.95 * slowest.compute_s
    assert mean.exposed_s["pp"] > slowest.exposed_s["pp"] + 0.01 * slowest.step_s, "they wait for the slowest"
    told = {part["name"]: part["seconds"] for part in estimate(spec, H100)["time"]["parts"]}
    assert told["compute"] == pytest.approx(mean.compute_s)


def test_pipeline_head_counts_half_in_the_mean_of_two_stages() -> None:
    """Only one of two stages computes the head."""
    timer, alone = Timer(H100), _spec(HEAVY_HEAD)
    whole, piped = timer.get_step(alone), timer.get_rank_mean(_spec(HEAVY_HEAD, pp=2))
    assert piped.compute_s == pytest.approx(whole.compute_s / 2, rel=0.01)
    assert timer.get_step(_spec(HEAVY_HEAD, pp=2)).compute_s > 1.4 * piped.compute_s, "the stage that has the head"


def test_bubble_equals_that_of_even_stages() -> None:
    spec = _spec(HEAVY_HEAD, pp=2)
    made = Timer(H100).get_rank_mean(spec)
    work = made.compute_s + made.launch_s
    assert made.bubble_s == pytest.approx(work / spec.train.micro_batches, rel=0.01), "(p - 1) / m of 1F1B"


@pytest.mark.parametrize("layout", [{"pp": 4}, {"pp": 4, "schedule": "gpipe"}, {"dp": 4}])
def test_mean_of_equal_stages_equals_each_stage(layout: dict[str, Any]) -> None:
    timer, spec = Timer(H100), _spec({"vocab_size": 256, "num_layers": 64}, **layout)
    slowest, mean = timer.get_step(spec), timer.get_rank_mean(spec)
    assert mean.compute_s == pytest.approx(slowest.compute_s, rel=0.01)
    assert mean.bubble_s == pytest.approx(slowest.bubble_s, rel=0.01)


def test_ranks_share_cores_only_while_they_compute() -> None:
    """Ranks of a pipeline do not all compute at once."""
    own = CLUSTERS["cpu"]
    two, four = (use_cores(own, cores, None) for cores in (2, 4))
    wide, pipe = _spec({}, dp=4), _spec({}, pp=4)
    alone = Timer(own).get_step(wide)
    assert Timer(four).get_step(wide) == alone
    assert Timer(two).get_step(wide).step_s == pytest.approx(2 * alone.step_s)
    assert Timer(two).get_step(wide).mfu == pytest.approx(alone.mfu / 2)
    idle = Timer(own).get_step(pipe)
    at_work = 1 - idle.bubble_s / idle.step_s
    assert 0.5 < at_work < 0.9
    assert Timer(two).get_step(pipe).step_s == pytest.approx(2 * at_work * idle.step_s)
    mean = Timer(two).get_rank_mean(pipe)
    assert _sum_parts(mean) == pytest.approx(mean.step_s) == pytest.approx(Timer(two).get_step(pipe).step_s)


@pytest.mark.parametrize("layout", [{"dp": 4}, {"pp": 2, "dp": 2}], ids=str)
def test_links_measured_on_shared_cores_are_not_slowed_again(layout: dict[str, int]) -> None:
    spec, told = _spec({}, **layout), use_cores(CLUSTERS["cpu"], 2, None).model_copy(update={"link_runs": 1})
    alone, crowded = (Timer(one).get_step(spec) for one in (told.model_copy(update={"cores": None}), told))
    assert crowded.exposed_s == alone.exposed_s
    assert crowded.compute_s > 1.4 * alone.compute_s
    assert _sum_parts(crowded) == pytest.approx(crowded.step_s)
    assert crowded.mfu * crowded.step_s == pytest.approx(alone.mfu * alone.step_s)
    assert _sum_parts(Timer(told).get_rank_mean(spec)) == pytest.approx(crowded.step_s)
