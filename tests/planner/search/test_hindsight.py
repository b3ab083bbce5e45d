"""Advice after a run: the parts of its step, and layouts that are faster beyond the error."""

from __future__ import annotations

from typing import Any

import pytest

from planner.cost.estimate import estimate
from planner.cost.learning import Interval, compute_time_interval
from planner.cost.timing import Timer
from planner.facts.parse_spec import parse_spec
from planner.hardware.catalog import CLUSTERS
from planner.hardware.stacks import STACKS
from planner.search.neighbors import BARELY_FITS, find_neighbors
from planner.search.post_run_advice import RunMeasurement, apportion_step, find_faster_layouts, get_parts
from tests.planner.wrong_specs import GOOD

CPU = CLUSTERS["cpu"]
SPEC = parse_spec(GOOD)
PREDICTED = {part["name"]: part["seconds"] for part in estimate(SPEC, CPU)["time"]["parts"]}


def build_measurement(
    step_s: float, share: float, parts_s: dict[str, float] | None = None, **busy_s: float
) -> RunMeasurement:
    sure = Interval(share=share, basis="runs", runs=3, words="so surely")
    return RunMeasurement(step_s, busy_s, parts_s or {}, None, PREDICTED, sure)


def test_overlapped_axis_gets_no_more_time_than_its_ranks_were_busy() -> None:
    here = {"compute": 1.0, "dp": 1.0, "tp": 2.0}
    took = apportion_step(here, build_measurement(8.0, 0.1, dp=7.9, tp=1.0))
    assert took == pytest.approx({"compute": 3.5, "dp": 3.5, "tp": 1.0}), "tp's 4 s of 8 are more than the 1 s it had"
    took = apportion_step(here, build_measurement(8.0, 0.1, dp=7.0, tp=7.0))
    assert took == pytest.approx({"compute": 2.0, "dp": 2.0, "tp": 4.0})


def test_traced_parts_scale_to_the_median_step_and_fixed_parts_stay() -> None:
    apart = {"compute": 0.05, "optimizer": 0.01, "tp": 0.12, "data": 0.1}
    told = find_faster_layouts(SPEC, CPU, build_measurement(0.56, 0.01, apart, tp=0.1, dp=0.1))
    parts = {part["part"]: (part["measured_s"], part["apportioned_s"]) for part in told["parts"]}
    assert parts["compute"] == pytest.approx((0.06, 0.12))
    assert parts["tp"] == pytest.approx((0.12, 0.24))
    assert parts["data"] == pytest.approx((0.1, 0.2))
    assert parts["dp"] == (0.0, 0.0), "it was hidden whole"
    busy = "tp was busy for 0.1 s in the mean of all steps, which bounds no mean of others"
    assert all(part["measured_at_most_s"] is None for part in told["parts"]), busy
    near = [*told["options"], *told["unsure"]]
    assert near
    alone = next(option for option in near if option["change"] == "tp 1, dp 4")
    assert alone["because"]["part"] == "tp"
    assert alone["step_s"] > 0.12 + 0.2, "a slow loader is as slow in another layout"


def test_uncalibrated_cpu_run_uses_the_margin_of_its_stack() -> None:
    apart = {"compute": 0.05, "tp": 0.25}
    told = compute_time_interval(CPU, SPEC, None, 0.0)
    assert (told["share"], told["words"]) == (9.0, "an uncalibrated CPU, within a factor of 10")
    found = find_faster_layouts(SPEC, CPU, build_measurement(0.3, 0.0, apart)._replace(sure=told))
    assert found["options"][0]["change"] == "tp 1, dp 4"
    assert found["options"][0]["faster"] > STACKS["ours"].time_margin
    assert "from the measured step of this run, Meshboard's trainer, ±45%" in found["text"]
    assert found["interval"] == told, "as told at submit"
    runs = find_faster_layouts(SPEC, CPU, build_measurement(0.3, 4.0, apart))
    assert runs["options"] == [], "runs that lay so far apart are no measure"


def test_axis_hidden_only_in_the_plan_keeps_its_measured_time_in_every_layout() -> None:
    """The plan overlaps a ring's messages with attention, but they took time in the run."""
    spec = parse_spec({**GOOD, "model": {"preset": "llama-tiny"}, "layout": {"cp": 2}, "train": {"precision": "bf16"}})
    predicted = {part["name"]: part["seconds"] for part in estimate(spec, CPU)["time"]["parts"]}
    apart = {"compute": 1.8, "dp": 0.1, "cp": 0.6}
    assert "cp" not in predicted
    found = find_faster_layouts(spec, CPU, build_measurement(2.5, 0.01, apart)._replace(predicted_s=predicted))
    near = {option["change"]: option for option in [*found["options"], *found["unsure"]]}
    assert near["cp 1, dp 2"]["because"] == {"part": "cp", "apportioned_s": pytest.approx(0.6), "there_s": 0.0}
    assert [change for change, option in near.items() if option["because"]["part"] == "cp"] == ["cp 1, dp 2"]


def test_axis_hidden_in_the_run_stays_hidden_if_the_plan_adds_no_traffic() -> None:
    apart = {"compute": 0.1, "tp": 0.2}
    assert PREDICTED["dp"] > 0
    found = find_faster_layouts(SPEC, CPU, build_measurement(0.3, 0.01, apart))
    near = next(option for option in found["options"] if option["change"] == "tp 1, dp 4")
    layout = SPEC.layout.model_copy(update={"dp": 4, "tp": 1})
    train = SPEC.train.model_copy(update={"micro_batches": near["micro_batches"]})
    here = get_parts(Timer(CPU).get_rank_mean(SPEC))
    there = get_parts(Timer(CPU).get_rank_mean(SPEC.model_copy(update={"layout": layout, "train": train})))
    more = max(0.0, there["dp"] - here["dp"]) * 0.3 / sum(here.values())
    assert there["world"] == here["world"]
    assert near["step_s"] == pytest.approx(there["compute"] * 0.1 / here["compute"] + more)


def test_gain_within_the_interval_is_not_advised() -> None:
    sure, unsure = (find_faster_layouts(SPEC, CPU, build_measurement(0.3, share, tp=0.1)) for share in (0.01, 1.15))
    assert sure["options"][0]["text"] in sure["text"]
    assert all(option["faster"] > 0.01 for option in sure["options"])
    assert unsure["options"] == []
    assert unsure["unsure"][0]["change"] == sure["options"][0]["change"]
    assert "No change is faster beyond the margin of error" in unsure["text"]
    assert "of the step time (so surely)" in unsure["text"]


def test_advice_names_step_time_saved_time_and_largest_gain() -> None:
    first = find_faster_layouts(SPEC, CPU, build_measurement(0.311, 0.01, {"compute": 0.16, "tp": 0.15}))["options"][0]
    assert first["change"] == "tp 1, dp 4"
    now, then = 1e3 * first["because"]["apportioned_s"], first["because"]["there_s"]
    saved = f"an estimated {1e3 * first['step_s']:.3g} ms per step, {first['faster']:.0%} less than the measured 311 ms"
    assert then == 0.0
    assert first["text"] == (
        f"tp 1, dp 4: {saved}. Communication on tp takes {now:.3g} ms in this run, and no time with this change."
    )


def test_advice_reports_memory_that_barely_fits() -> None:
    (first, *_) = find_faster_layouts(SPEC, CPU, build_measurement(0.3, 0.01, tp=0.1))["options"]
    assert BARELY_FITS not in first["text"]
    there = CPU.accelerator.model_copy(update={"memory_bytes": first["memory_bytes"] + 1})
    (again, *_) = find_faster_layouts(
        SPEC, CPU.model_copy(update={"accelerator": there}), build_measurement(0.3, 0.01, tp=0.1)
    )["options"]
    assert again["change"] == first["change"]
    assert BARELY_FITS in again["text"]


@pytest.mark.parametrize("layout", [{"pp": 2}, {"pp": 2, "dp": 2, "tp": 2, "schedule": "zbv", "virtual_stages": 2}])
def test_run_at_predicted_speed_keeps_predicted_choices(layout: dict[str, Any]) -> None:
    """Measured values are means of all ranks, including a stage that the head makes slowest."""
    model = {"preset": "llama-mini", "vocab_size": 50_257}
    spec = parse_spec({"model": model, "layout": layout, "train": {"global_batch": 16, "micro_batches": 4}})
    timer = Timer(CPU)
    went = timer.get_rank_mean(spec)
    found = find_faster_layouts(spec, CPU, build_measurement(went.step_s, 0.01, get_parts(went)))
    predicted = {near.change: near.step_s for near in find_neighbors(spec, CPU)}
    options = [*found["options"], *found["unsure"]]
    assert len(options) > 1
    for option in options:
        assert option["step_s"] == pytest.approx(predicted[option["change"]]), option["change"]
