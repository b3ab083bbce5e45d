"""The prediction of a script uses its plan, and the layout that its process groups show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from rest_framework.test import APIClient

from contracts.codec import validate_item
from jobs.core.errors import NotFoundError
from jobs.models import Attempt, Job
from jobs.queue import actions
from jobs.runs.history.recording.row_builder import RowBuilder
from jobs.runs.history.store.folder import HistoryFolder, make_empty_manifest
from jobs.runs.script_prediction import NO_STEPS, predict_script
from planner.cost.estimate import estimate
from planner.facts.model_shapes import count_parameters
from planner.facts.parse_spec import parse_spec
from planner.facts.validation import SpecError

pytestmark = pytest.mark.django_db
GRADIENTS = 4 * count_parameters(parse_spec({"model": {"preset": "gpt-tiny"}}).model)
TRAIN = {"global_batch": 8, "seq_len": 64}
PLAN: dict[str, Any] = {"model": {"preset": "gpt-tiny"}, "train": TRAIN}
SCRIPT: dict[str, Any] = {"kind": "script", "name": "mine", "layout": {"dp": 2}}


def make_spec(**plan: Any) -> dict[str, Any]:
    return {**SCRIPT, "script": {"path": "train.py", "plan": {**PLAN, **plan}}}


@pytest.fixture
def root(tmp_path: Path, settings: Any) -> Path:
    settings.HISTORY_DIR = tmp_path / "history"
    return tmp_path / "history"


@pytest.fixture
def run(owner: User, root: Path) -> Callable[..., Job]:
    """Return a function that stores a run of two ranks with a median step time of 0.5 s."""

    def store(spec: dict[str, Any], cells: list[dict[str, Any]] | None = None, steps: int = 10) -> Job:
        job, _ = actions.submit(owner, spec)
        Job.objects.filter(id=job.id).update(attempt=1, status="running")
        job.refresh_from_db()
        Attempt.objects.create(job=job, number=1, diagnosis={"measured": {"step_s": 0.5}})
        rows = RowBuilder()
        for rank in range(2 if steps else 0):
            item: Any = validate_item(
                {
                    "kind": "step",
                    "rank": rank,
                    "time": 1000.0,
                    "step": steps,
                    "ran": steps,
                    "steps": None,
                    "step_s": 0.5,
                    "tokens": None,
                    "loss": None,
                    "grad_norm": None,
                    "learning_rate": None,
                    "counted": steps,
                    "cells": cells or [],
                    "parts": {"exposed": {}, "hidden": {}},
                }
            )
            rows.add_item(item)
        folder = HistoryFolder(root, job.id, 1)
        folder.path.mkdir(parents=True)
        folder.commit(make_empty_manifest(job.id, 1), rows.take(), rows.state)
        return job

    return store


def reduce_gradients(payload_bytes: int, **changes: Any) -> dict[str, Any]:
    """Return the cell of an all-reduce per step, for 10 steps."""
    return {
        "phase": "step",
        "op": "all_reduce",
        "axis": "world",
        "group_size": 2,
        "count": 10,
        "completed": 10,
        "payload_bytes": 10 * payload_bytes,
        "algorithmic_bytes": 10 * payload_bytes,
        "busy_s": 0.1,
        **changes,
    }


def test_a_layout_is_inferred_and_marked(run: Callable[..., Job]) -> None:
    expected = estimate(parse_spec({**PLAN, "layout": {"dp": 2}}))
    prediction = predict_script(run(make_spec(), [reduce_gradients(GRADIENTS)]))
    assert prediction["inferred"]
    assert prediction["layout"] is not None
    assert prediction["layout"]["dp"] == 2
    assert prediction["assumptions"] == ["Group 'world' of 2 ranks is assumed to be dp, because of its all_reduce."]
    step, *traffic = prediction["values"]
    assert (step["name"], step["measured"]) == ("step_time", 0.5)
    assert step["predicted"] == pytest.approx(expected["time"]["step_s"])
    assert step["difference"] == pytest.approx(0.5 / expected["time"]["step_s"] - 1)
    by_axis = {value["axis"]: (value["predicted"], value["measured"]) for value in traffic}
    assert by_axis["dp"] == (expected["stages"][0]["step_bytes"]["dp"], GRADIENTS)


def test_a_given_layout_is_predicted_before_the_run(run: Callable[..., Job]) -> None:
    prediction = predict_script(run(make_spec(layout={"tp": 2}), steps=0))
    assert not prediction["inferred"]
    assert prediction["layout"] is not None
    assert prediction["layout"]["tp"] == 2
    assert {value["axis"] for value in prediction["values"]} >= {None, "tp"}
    assert all(value["measured"] is None for value in prediction["values"][1:])


def test_groups_outside_of_the_given_layout_are_listed_as_other(run: Callable[..., Job]) -> None:
    cells = [reduce_gradients(1000, axis="tp"), reduce_gradients(10, axis="mine", op="broadcast")]
    values = {v["axis"]: v["measured"] for v in predict_script(run(make_spec(layout={"tp": 2}), cells))["values"]}
    assert values["tp"] == 1000
    assert values["other"] == 10


@pytest.mark.parametrize(
    ("plan", "cells", "problem"),
    [
        ({}, [reduce_gradients(1, group_size=1)], "The groups of the script explain 1 of 2 ranks"),
        ({}, [reduce_gradients(1000)], "The all_reduce of group 'world' does not have the size"),
        ({"train": {**TRAIN, "global_batch": 3}}, [reduce_gradients(GRADIENTS)], "`train.global_batch` is 3"),
    ],
)
def test_a_plan_without_prediction_has_a_reason(
    run: Callable[..., Job], plan: dict[str, Any], cells: list[dict[str, Any]], problem: str
) -> None:
    prediction = predict_script(run(make_spec(**plan), cells))
    assert prediction["values"] == []
    assert problem in prediction["problems"][0]


def test_a_run_without_steps_has_a_reason(run: Callable[..., Job]) -> None:
    assert predict_script(run(make_spec(), steps=0))["problems"] == [NO_STEPS]


def test_a_script_without_plan_has_no_prediction(run: Callable[..., Job], owner: User, client: Client) -> None:
    job = run({**SCRIPT, "script": {"path": "train.py"}})
    with pytest.raises(NotFoundError, match=r"no `script\.plan`"):
        predict_script(job)
    client.force_login(owner)
    assert b"prediction-title" not in client.get(f"/jobs/{job.id}/").content


def test_page_and_rest_show_the_prediction(
    run: Callable[..., Job], owner: User, stranger: User, client: Client, api: Callable[[User], APIClient]
) -> None:
    job = run(make_spec(), [reduce_gradients(GRADIENTS)])
    client.force_login(owner)
    assert f'hx-get="/jobs/{job.id}/prediction/"' in client.get(f"/jobs/{job.id}/").content.decode()
    page = client.get(f"/jobs/{job.id}/prediction/").content.decode()
    for text in ("Step time", "500.00 ms", "Traffic per step and rank, dp", "3.567 MB", "inferred", "dp 2"):
        assert text in page
    answer = api(owner).get(f"/api/v1/jobs/{job.id}/prediction")
    assert answer.json()["values"][0]["measured"] == 0.5
    assert api(stranger).get(f"/api/v1/jobs/{job.id}/prediction").status_code == 404


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        ({"model": {"preset": "gpt-none"}}, r"`script\.plan\.model\.preset` is \"gpt-none\", which is unknown"),
        ({"layout": {"dp": 4}}, r"`script\.plan\.layout` has dp 4 x pp 1 x tp 1 = 4 ranks, but the job has 2"),
        ({"train": {"seq_len": 0}}, r"`script\.plan\.train\.seq_len` is 0\. Use at least 1"),
        ({"modle": {}}, r"`script\.plan\.modle` is not a known field"),
    ],
)
def test_bad_plans_are_rejected_with_their_field(plan: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        parse_spec(make_spec(**plan))
