"""Predictions of famous published runs with unknown software, compared with their published speed."""

from __future__ import annotations

import pytest

from planner.cost.estimate import estimate, parse_plannable
from planner.cost.learning import compute_error, is_within_margin
from planner.facts.famous_runs import FAMOUS_RUNS
from planner.facts.model_shapes import count_parameters
from planner.facts.presets import PRESETS, TEMPLATES
from planner.hardware.catalog import CLUSTERS


@pytest.mark.parametrize("name", FAMOUS_RUNS)
def test_published_speed_is_in_the_interval(name: str) -> None:
    run, template = FAMOUS_RUNS[name], TEMPLATES[name]
    found = estimate(parse_plannable(template.spec), CLUSTERS[template.cluster])
    time = found["time"]
    shares = {"mfu": time["mfu"], "hfu": time["hfu"]}
    published_s = run.value if run.figure == "step_s" else time["step_s"] * shares[run.figure] / run.value
    assert found["fits"]
    assert is_within_margin(time["interval"]["share"], published_s, time["step_s"])
    assert compute_error(published_s, time["step_s"]) <= 0.2


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [("bloom-176b", 176_247_271_424), ("gpt-neox-20b", 20_554_567_680), ("nemotron-4-340b", 341_029_195_776)],
)
def test_famous_models_have_their_published_size(preset: str, parameters: int) -> None:
    """The first two counts are those of the model cards. Nemotron-4's paper states 331.6 + 9.4 billion."""
    assert count_parameters(PRESETS[preset].model) == parameters
