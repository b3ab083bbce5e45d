"""Planning over REST: estimates on named hardware, the search, explanations, and what cannot run yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.cache import cache
from rest_framework.test import APIClient

from jobs.models import Job
from planner.facts.parse_spec import parse_spec
from planner.facts.presets import TEMPLATES
from planner.hardware.catalog import CLUSTERS
from tests.planner.wrong_specs import GOOD

Api = Callable[[User | None], APIClient]

SEARCH: dict[str, Any] = {
    "spec": {"model": {"preset": "llama3-8b"}, "train": {"global_batch": 64, "seq_len": 4096, "precision": "bf16"}},
    "ranks": 16,
    "cluster": "h100",
}


@pytest.fixture(autouse=True)
def _fresh_throttle() -> None:
    cache.clear()


def post(client: APIClient, path: str, body: object) -> Any:
    return client.post(f"/api/v1/{path}", body, format="json")


def test_a_plan_names_the_hardware_it_is_for(owner: User, api: Api) -> None:
    answer = post(api(owner), "plan?cluster=a100-80gb", GOOD).json()
    assert answer["problems"] == []
    assert answer["estimate"]["cluster"]["accelerator"] == "A100 80GB"
    assert answer["estimate"]["time"]["basis"] == "data sheet"
    assert sum(p["seconds"] for p in answer["estimate"]["time"]["parts"]) == pytest.approx(
        answer["estimate"]["time"]["step_s"]
    )
    assert len(answer["matrix"]) == 4
    assert answer["timeline"] is None


def test_hardware_nobody_named_is_a_problem_not_a_crash(owner: User, api: Api) -> None:
    answer = post(api(owner), "plan?cluster=abacus", GOOD).json()
    assert answer["estimate"] is None
    assert answer["problems"][0]["field"] == "cluster"
    assert "h100" in answer["problems"][0]["message"]


def test_a_pipeline_comes_with_its_schedule(owner: User, api: Api) -> None:
    layout = {"pp": 4, "schedule": "zbv", "virtual_stages": 2}
    spec = {**GOOD, "model": {"preset": "gpt-mini"}, "layout": layout, "train": {"global_batch": 8, "micro_batches": 8}}
    answer = post(api(owner), "plan", spec).json()
    drawn = answer["timeline"]
    assert (drawn["stages"], drawn["micro_batches"], drawn["whole"]) == (4, 8, True)
    kinds = [cell[1] for cell in drawn["cells"]]
    assert (kinds.count("F"), kinds.count("I"), kinds.count("W")) == (64, 64, 64)
    assert answer["not_runnable"] == []


def test_stages_are_drawn_as_long_as_they_take(owner: User, api: Api) -> None:
    """The head of gpt2 costs more than three of its layers: the others idle beside the stage that has it."""
    train = {"global_batch": 16, "micro_batches": 16, "seq_len": 1024}
    spec = {**GOOD, "model": {"preset": "gpt2"}, "layout": {"pp": 4}, "train": train}
    answer = post(api(owner), "plan?cluster=h100", spec).json()
    busy = [0.0] * 4
    for stage, _kind, _micro_batch, _chunk, start, end in answer["timeline"]["cells"]:
        busy[stage] += end - start
    assert busy[3] > 1.5 * max(busy[:3])
    assert answer["timeline"]["bubble"] > 0.3


def test_what_can_only_be_planned_is_refused_at_submit_with_the_reason(owner: User, api: Api) -> None:
    spec = {**GOOD, "train": {**GOOD["train"], "dropout": True}}
    assert post(api(owner), "plan", spec).json()["estimate"] is not None
    answer = post(api(owner), "jobs", spec)
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert (error["field"], error["pointer"]) == ("train.dropout", "/train/dropout")
    assert error["message"] == (
        "`train.dropout`: the trainer does not support dropout. Change this field, or only plan the layout."
    )
    assert Job.objects.count() == 0


def test_what_does_not_fit_is_told_with_what_would(owner: User, api: Api) -> None:
    train = {"global_batch": 64, "micro_batches": 8, "seq_len": 4096, "precision": "bf16"}
    spec = {"model": {"preset": "llama3-8b"}, "layout": {"dp": 8}, "train": train}
    answer = post(api(owner), "plan?cluster=h100", spec).json()
    assert answer["estimate"]["fits"] is False
    assert any(s["change"].startswith("ZeRO") for s in answer["suggestions"])


def test_search_ranks_layouts_and_counts_what_it_refused(owner: User, api: Api) -> None:
    answer = post(api(owner), "plan/search", {**SEARCH, "fixed": {"zero": 1}, "limit": 3})
    assert answer.status_code == 200
    found = answer.json()
    assert len(found["best"]) == 3
    assert found["considered"] == found["fitting"] + sum(found["refused"].values())
    assert {f["layout"]["zero"] for f in found["best"]} == {1}
    assert found["neighbours"]
    for f in found["best"]:
        train = {**SEARCH["spec"]["train"], "micro_batches": f["micro_batches"]}
        parse_spec({**SEARCH["spec"], "layout": f["layout"], "train": train})


def test_a_search_from_a_dry_run_s_spec_tries_worlds_without_the_ranks_it_names(owner: User, api: Api) -> None:
    spec = {**SEARCH["spec"], "kind": "dry_run", "dry_ranks": [1_000]}
    found = post(api(owner), "plan/search", {**SEARCH, "spec": spec}).json()
    assert found["fitting"] > 0
    assert [why for why in found["refused"] if why.startswith("dry_ranks")] == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"ranks": 0}, "ranks"),
        ({"ranks": "16"}, "ranks"),
        ({"cluster": "abacus"}, "cluster"),
        ({"cluster": 3}, "cluster"),
        ({"fixed": {"colour": 1}}, "layout.colour"),
        ({"fixed": {"tp": "8"}}, "layout.tp"),
        ({"fixed": {"dp_replicas": 2}}, "fixed.dp_replicas"),
        ({"fixed": []}, "fixed"),
        ({"limit": 1000}, "limit"),
        ({"max_micro_batch": True}, "max_micro_batch"),
        ({"runnable": 1}, "runnable"),
        ({"spec": {"model": {"preset": "gpt-9"}}}, "model.preset"),
        ({"surprise": 1}, "surprise"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_senseless_search_is_422_and_names_the_field(
    owner: User, api: Api, change: dict[str, Any], field: str
) -> None:
    answer = post(api(owner), "plan/search", {**SEARCH, **change})
    assert answer.status_code == 422
    assert field in [e["field"] for e in answer.json()["errors"]]


def test_every_figure_is_explained_with_formula_and_source(owner: User, api: Api) -> None:
    answer = post(api(owner), "plan/explain", {"spec": GOOD, "cluster": "h100"})
    assert answer.status_code == 200
    told = {e["figure"]: e for e in answer.json()}
    assert set(told) == {"parameters", "memory", "traffic", "step time", "MFU"}
    assert told["traffic"]["kind"] == "exact"
    assert told["memory"]["kind"] == "estimated"
    assert post(api(owner), "plan/explain", {"spec": GOOD, "stage": 7}).json()["errors"][0]["field"] == "stage"
    assert post(api(owner), "plan/explain", [1]).status_code == 422


def test_hardware_and_templates_are_listed(owner: User, api: Api) -> None:
    client = api(owner)
    assert [c["id"] for c in client.get("/api/v1/clusters").json()] == list(CLUSTERS)
    assert [t["id"] for t in client.get("/api/v1/templates").json()] == list(TEMPLATES)


def test_a_layout_is_explained_on_the_hardware_that_it_was_chosen_for(owner: User, api: Api) -> None:
    spec = {**GOOD, "layout": {"auto": {"ranks": 2, "cluster": "h100"}}}
    named, inside = (
        post(api(owner), "plan/explain", {"spec": spec, **more}).json() for more in ({"cluster": "h100"}, {})
    )
    assert inside == named


@pytest.mark.parametrize("path", ["plan/search", "plan/explain"])
def test_planning_needs_a_login(api: Api, path: str) -> None:
    assert post(api(None), path, SEARCH).status_code == 401


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_fills_the_form_and_its_twin_can_be_submitted(owner: User, client: Any, api: Api, name: str) -> None:
    client.force_login(owner)
    page = client.get(f"/jobs/new/?template={name}")
    assert page.context["values"]["model.preset"] == TEMPLATES[name].spec["model"]["preset"]
    twin = client.get(f"/jobs/new/?template={name}&twin=1").context["values"]
    answer = client.post("/jobs/new/", twin)
    assert answer.status_code == 302, answer.context["errors"]
    assert Job.objects.get().world_size <= 4


def test_a_link_with_a_layout_fills_the_form(owner: User, client: Any) -> None:
    client.force_login(owner)
    spec = '{"model": {"preset": "llama-tiny"}, "layout": {"dp": 4, "cp": 2}}'
    page = client.get("/jobs/new/", {"spec": spec, "cluster": "h100"})
    assert (page.context["values"]["layout.dp"], page.context["values"]["layout.cp"]) == ("4", "2")
    assert page.context["folds"].open == ["parallelism"]
    assert client.get("/jobs/new/", {"spec": "{"}).status_code == 422
    assert client.get("/jobs/new/?template=none").status_code == 404
