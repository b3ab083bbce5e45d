"""Division of layers into stages: by number of layers or by compute cost."""

from __future__ import annotations

import pytest

from planner.cost.estimate import estimate
from planner.facts.model_shapes import get_layer_parameters
from planner.facts.parse_spec import parse_fields
from planner.facts.resources import Resources, StackName
from planner.facts.spec import JobSpec, Layout, ModelSpec, Schedule, TrainSpec
from planner.facts.stages import compute_head_cost, get_stage_chunks
from planner.hardware.catalog import CLUSTERS


def get_layer_counts(model: ModelSpec, layout: Layout, stack: StackName = "ours") -> list[int]:
    return [len(get_stage_chunks(model, layout, index, stack).layers) for index in range(layout.pp)]


def get_stage_loads(model: ModelSpec, layout: Layout) -> list[float]:
    """Return each stage's load in layers, including the head."""
    held = [get_stage_chunks(model, layout, index) for index in range(layout.pp)]
    return [len(stage.layers) + stage.last * compute_head_cost(model) for stage in held]


def build_wide_model(layers: int, vocab: int) -> ModelSpec:
    return parse_fields({"model": {"preset": "gpt-mini"}}).model.model_copy(
        update={"num_layers": layers, "vocab_size": vocab}
    )


def test_head_weighs_v_over_12_h_layers() -> None:
    model = build_wide_model(24, 50_257)
    assert compute_head_cost(model) == pytest.approx(50_257 / (12 * model.hidden_size))
    matrices = sum(p.numel for p in get_layer_parameters(model) if len(p.shape) == 2)
    assert matrices == 12 * model.hidden_size**2


def test_division_by_layers_adds_the_remainder_before_the_last_stage() -> None:
    assert get_layer_counts(build_wide_model(10, 256), Layout(pp=4)) == [2, 3, 3, 2]


@pytest.mark.parametrize(
    ("layers", "pp", "held"),
    [
        (40, 2, [20, 20]),  # 21 with the table, 21 with the head
        (40, 4, [10, 11, 10, 9]),
        (60, 16, [3, *[4] * 13, 3, 2]),
        (8, 8, [1] * 8),  # too few layers for that division
        (40, 1, [40]),
    ],
)
def test_scaling_counts_table_and_head_as_one_layer_each(layers: int, pp: int, held: list[int]) -> None:
    assert get_layer_counts(build_wide_model(layers, 256), Layout(pp=pp), "scaling") == held
    spec = JobSpec(
        model=build_wide_model(layers, 256),
        layout=Layout(pp=pp),
        train=TrainSpec(global_batch=pp, micro_batches=pp),
        resources=Resources(device="cuda", stack="scaling"),
    )
    stages = estimate(spec, CLUSTERS["a100-80gb"])["stages"]
    assert [sum(stop - start for start, stop in stage["layers"]) for stage in stages] == held


def test_division_by_cost_gives_the_head_stage_fewer_layers() -> None:
    model = build_wide_model(24, 6 * 12 * 256)  # the head weighs six layers
    assert get_layer_counts(model, Layout(pp=3, balance="cost")) == [10, 10, 4]
    assert get_layer_counts(model, Layout(pp=3)) == [8, 8, 8]
    assert get_layer_counts(build_wide_model(12, 30 * 12 * 256), Layout(pp=3, balance="cost")) == [5, 6, 1], (
        "a stage keeps one layer"
    )


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv", "dualpipev"])
@pytest.mark.parametrize("pp", [2, 4])
def test_division_by_cost_minimizes_the_largest_stage(schedule: Schedule, pp: int) -> None:
    model = build_wide_model(32, 3 * 12 * 256)
    layout = Layout(pp=pp, schedule=schedule, virtual_stages=1 if schedule == "1f1b" else 2, balance="cost")
    found = get_stage_loads(model, layout)
    assert sum(found) == pytest.approx(35)
    assert max(found) - min(found) <= 1
    assert max(found) < max(get_stage_loads(model, layout.model_copy(update={"balance": "layers"})))
    held = sorted(i for index in range(pp) for i in get_stage_chunks(model, layout, index).layers)
    assert held == list(range(32))


def test_bottom_of_a_v_schedule_sends_to_one_stage_only() -> None:
    layout = {"pp": 4, "schedule": "zbv", "virtual_stages": 2}
    train = {"global_batch": 8, "micro_batches": 8, "seq_len": 64}
    fields = {"model": {"preset": "gpt-mini"}, "layout": layout, "train": train}
    stages = estimate(parse_fields(fields), CLUSTERS["h100"])["stages"]
    sent = [sum(r["payload_bytes"] for r in stage["traffic"] if r["op"] == "send") for stage in stages]
    boundary = 8 * 64 * 256 * 4
    assert sent == [2 * boundary, 4 * boundary, 4 * boundary, 2 * boundary]
