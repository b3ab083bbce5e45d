"""Measured steps of a user correct the step time of every layout with the same software."""

from __future__ import annotations

from typing import Any

import pytest

from planner.cost.estimate import estimate
from planner.cost.learning import REFERENCE_MARGINS, scale_to_measured
from planner.cost.measured_steps import (
    MAX_MEASURED_STEPS,
    StepMeasurement,
    add_measured_steps,
    parse_flag,
    parse_measured_steps,
)
from planner.cost.timing import Timer
from planner.explain import explain
from planner.facts.parse_spec import parse_spec
from planner.facts.spec import JobSpec
from planner.facts.validation import SpecError
from planner.hardware.catalog import CLUSTERS
from planner.hardware.profile import MeasuredRun, strip_spec
from planner.search.layout_search import Constraints, compute_margins, search

H100, CPU = CLUSTERS["h100"], CLUSTERS["cpu"]
LAYOUT = {"dp": 4, "tp": 2, "zero": 1, "recompute": "full"}


def build_spec(stack: str = "unknown", **layout: Any) -> JobSpec:
    train = {"global_batch": 64, "seq_len": 2048, "precision": "bf16"}
    resources = {"device": "cuda", "stack": stack}
    model = {"preset": "llama3-8b"}
    return parse_spec({"model": model, "layout": layout or LAYOUT, "train": train, "resources": resources})


def measure(ratio: float, **layout: Any) -> StepMeasurement:
    """Return a step that took `ratio` times as long as predicted."""
    predicted = Timer(H100).predict(build_spec(**layout)).step_s
    return StepMeasurement(layout=layout or LAYOUT, step_s=ratio * predicted)


def test_one_measured_step_corrects_the_estimates_of_other_layouts() -> None:
    other = build_spec(dp=8, zero=3)
    plain, corrected = (
        estimate(other, cluster)["time"] for cluster in (H100, add_measured_steps(H100, other, [measure(1.5)]))
    )
    ratio = scale_to_measured([1.5]).ratio
    assert 1 < ratio < 1.5
    assert corrected["step_s"] == pytest.approx(ratio * plain["step_s"])
    assert sum(part["seconds"] for part in corrected["parts"]) == pytest.approx(corrected["step_s"])
    assert corrected["interval"] == {
        "share": REFERENCE_MARGINS[0],
        "basis": "measured steps",
        "runs": 1,
        "words": "from 1 measured step, ±35%",
    }
    assert "assumptions" in plain
    assert "assumptions" not in corrected, "the measured step has the properties of the software"


def test_two_measured_steps_narrow_the_interval() -> None:
    spec = build_spec()
    cluster = add_measured_steps(H100, spec, [measure(1.5), measure(1.3, dp=8, zero=3)])
    interval = estimate(spec, cluster)["time"]["interval"]
    assert interval["words"] == "from 2 measured steps, ±30%"


def test_search_uses_measured_steps_and_keeps_the_order() -> None:
    spec, limits = build_spec(), Constraints(8, {"pp": 1, "recompute": "full"})
    cluster = add_measured_steps(H100, spec, [measure(2.0)])
    plain, corrected = (search(spec, each, limits, limit=2).best for each in (H100, cluster))  # others tie
    ratio = scale_to_measured([2.0]).ratio
    assert [found.spec for found in corrected] == [found.spec for found in plain]
    for before, after in zip(plain, corrected, strict=True):
        assert after.timing.step_s == pytest.approx(ratio * before.timing.step_s)
    assert compute_margins(corrected, cluster)[0].time["basis"] == "measured steps"


def test_measured_step_has_the_software_of_the_planned_spec() -> None:
    cluster = add_measured_steps(H100, build_spec("megatron"), [measure(1.5)])
    assert [step.spec.resources.stack for step in cluster.measured_steps] == ["megatron"]
    spec = build_spec("deepspeed")
    assert Timer(cluster).get_step(spec).step_s == Timer(H100).get_step(spec).step_s, "other software"


def test_measured_steps_precede_runs_of_the_host() -> None:
    spec = build_spec()
    runs = tuple(MeasuredRun(spec=strip_spec(spec), steps=20, step_s=1.0) for _ in range(3))
    cluster = add_measured_steps(H100.model_copy(update={"runs": runs}), spec, [measure(1.5)])
    assert estimate(spec, cluster)["time"]["interval"]["words"] == "from 1 measured step, ±35%"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cpu", "an uncalibrated CPU, scaled by 1 measured step, within a factor of 10"),
        ("v100-32gb", "without a measured step on this device"),
    ],
)
def test_interval_stays_wide_where_no_measurement_narrows_it(name: str, words: str) -> None:
    cluster = CLUSTERS[name]
    spec = build_spec().model_copy(update={"train": build_spec().train.model_copy(update={"precision": "fp32"})})
    spec = spec.model_copy(update={"resources": spec.resources.model_copy(update={"device": cluster.device})})
    plain = estimate(spec, cluster)["time"]
    found = estimate(spec, add_measured_steps(cluster, spec, [StepMeasurement(layout=LAYOUT, step_s=9)]))["time"]
    assert found["step_s"] != plain["step_s"]
    assert found["interval"]["share"] == plain["interval"]["share"]
    assert ", scaled by 1 measured step" in found["interval"]["words"]
    assert words in found["interval"]["words"]


def test_tokens_per_second_and_gpu_replace_seconds() -> None:
    step = StepMeasurement(layout=LAYOUT, global_batch=128, micro_batches=4, tokens_per_s_per_gpu=8192)
    (found,) = add_measured_steps(H100, build_spec(), [step]).measured_steps
    assert found.step_s == 128 * 2048 / (8192 * 8)
    assert (found.spec.train.global_batch, found.spec.train.micro_batches) == (128, 4)


def test_explanation_names_the_measured_steps() -> None:
    spec = build_spec()
    (kind,) = [
        one["kind"]
        for one in explain(spec, add_measured_steps(H100, spec, [measure(1.5)]))
        if one["figure"] == "step time"
    ]
    assert kind.endswith("because of measured steps")


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ({"step_s": 1}, "`measured_steps` is an object. Use a list."),
        ([{"step_s": 1}] * (MAX_MEASURED_STEPS + 1), "`measured_steps` is a list. Use a list of at most 8 entries."),
        ([{"step_s": 0}], "`measured_steps.0.step_s` is 0. Use more than 0."),
        ([{"step_s": "1"}], '`measured_steps.0.step_s` is "1". Use a number.'),
        ([{"step_s": 1e7}], "`measured_steps.0.step_s` is 10000000.0. Use at most 1e+06."),
        ([{"layout": {}}], "Set either `step_s` or `tokens_per_s_per_gpu`."),
        ([{"step_s": 1, "tokens_per_s_per_gpu": 1}], "Set either `step_s` or `tokens_per_s_per_gpu`."),
        ([{"step_s": 1}, {"step_s": 1, "layout": {"tp": 3}}], "`measured_steps.1.layout.tp` is 3, but 32 heads"),
        ([{"step_s": 1, "micro_batches": 0}], "`measured_steps.0.micro_batches` is 0. Use at least 1."),
        ([{"step_s": 1, "micro_batches": 7}], "`measured_steps.0.global_batch` is 64, which is not divisible"),
        ([{"step_s": 1, "layout": {"colour": 1}}], "`measured_steps.0.layout.colour` is not a known field."),
        ([{"step_s": 1, "layout": "auto"}], '`measured_steps.0.layout` is "auto". Use an object.'),
    ],
)
def test_errors_name_the_field_the_value_and_the_fix(steps: object, words: str) -> None:
    with pytest.raises(SpecError) as refused:
        add_measured_steps(H100, build_spec(), parse_measured_steps(steps))
    assert words in str(refused.value)


def test_flag_separates_the_layout_from_the_measurement() -> None:
    assert parse_flag("tp=2, recompute=full,sequence_parallel=true,micro_batches=8,step_s=1.35") == {
        "layout": {"tp": 2, "recompute": "full", "sequence_parallel": True},
        "micro_batches": 8,
        "step_s": 1.35,
    }
    with pytest.raises(SpecError, match=r"has the part '1\.35'\. Use NAME=VALUE"):
        parse_flag("tp=2,1.35")
