"""Planning over REST: estimates on named hardware, search, explanations, and unsupported features."""

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
from planner.hardware.own_accelerator import OWN_EXAMPLE
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


def test_plan_names_its_hardware(owner: User, api: Api) -> None:
    response = post(api(owner), "plan?cluster=a100-80gb", GOOD).json()
    assert response["problems"] == []
    assert response["estimate"]["cluster"]["accelerator"] == "A100 80GB"
    assert response["estimate"]["time"]["basis"] == "data sheet"
    assert sum(p["seconds"] for p in response["estimate"]["time"]["parts"]) == pytest.approx(
        response["estimate"]["time"]["step_s"]
    )
    assert len(response["matrix"]) == 4
    assert response["timeline"] is None


def test_unknown_hardware_is_a_problem_of_the_plan(owner: User, api: Api) -> None:
    response = post(api(owner), "plan?cluster=abacus", GOOD).json()
    assert response["estimate"] is None
    assert response["problems"][0]["field"] == "cluster"
    assert "h100" in response["problems"][0]["message"]


def test_pipeline_plan_has_its_schedule(owner: User, api: Api) -> None:
    layout = {"pp": 4, "schedule": "zbv", "virtual_stages": 2}
    spec = {**GOOD, "model": {"preset": "gpt-mini"}, "layout": layout, "train": {"global_batch": 8, "micro_batches": 8}}
    response = post(api(owner), "plan", spec).json()
    timeline = response["timeline"]
    assert (timeline["stages"], timeline["micro_batches"], timeline["whole"]) == (4, 8, True)
    kinds = [cell[1] for cell in timeline["cells"]]
    assert (kinds.count("F"), kinds.count("I"), kinds.count("W")) == (64, 64, 64)
    assert response["not_runnable"] == []


def test_timeline_shows_unequal_stages(owner: User, api: Api) -> None:
    """The last stage of gpt2 has the output head, which costs more than three layers."""
    train = {"global_batch": 16, "micro_batches": 16, "seq_len": 1024}
    spec = {**GOOD, "model": {"preset": "gpt2"}, "layout": {"pp": 4}, "train": train}
    response = post(api(owner), "plan?cluster=h100", spec).json()
    busy = [0.0] * 4
    for stage, _kind, _micro_batch, _chunk, start, end in response["timeline"]["cells"]:
        busy[stage] += end - start
    assert busy[3] > 1.5 * max(busy[:3])
    assert response["timeline"]["bubble"] > 0.3


def test_rejects_jobs_that_can_only_be_planned(owner: User, api: Api) -> None:
    spec = {**GOOD, "train": {**GOOD["train"], "dropout": True}}
    assert post(api(owner), "plan", spec).json()["estimate"] is not None
    response = post(api(owner), "jobs", spec)
    assert response.status_code == 422
    (error,) = response.json()["errors"]
    assert (error["field"], error["pointer"]) == ("train.dropout", "/train/dropout")
    assert error["message"] == (
        "`train.dropout`: the trainer does not support dropout. Change this field, or only plan the layout."
    )
    assert Job.objects.count() == 0


def test_plan_of_an_unfit_layout_has_suggestions(owner: User, api: Api) -> None:
    train = {"global_batch": 64, "micro_batches": 8, "seq_len": 4096, "precision": "bf16"}
    spec = {"model": {"preset": "llama3-8b"}, "layout": {"dp": 8}, "train": train}
    response = post(api(owner), "plan?cluster=h100", spec).json()
    assert response["estimate"]["fits"] is False
    assert any(s["change"].startswith("ZeRO") for s in response["suggestions"])


def test_search_ranks_layouts_and_counts_rejected_ones(owner: User, api: Api) -> None:
    response = post(api(owner), "plan/search", {**SEARCH, "fixed": {"zero": 1}, "limit": 3})
    assert response.status_code == 200
    found = response.json()
    assert len(found["best"]) == 3
    assert found["considered"] == found["fitting"] + sum(found["refused"].values())
    assert {f["layout"]["zero"] for f in found["best"]} == {1}
    assert found["neighbours"]
    for f in found["best"]:
        train = {**SEARCH["spec"]["train"], "micro_batches": f["micro_batches"]}
        parse_spec({**SEARCH["spec"], "layout": f["layout"], "train": train})


STEP = {"layout": {"dp": 8, "tp": 2}, "micro_batches": 8, "step_s": 60.0}


def test_measured_step_corrects_plan_and_search_and_explanation(owner: User, api: Api) -> None:
    spec = {**SEARCH["spec"], "layout": {"dp": 16, "zero": 3}, "resources": {"device": "cuda"}}
    plain, corrected = (
        post(api(owner), "plan?cluster=h100", body).json()["estimate"]["time"]
        for body in (spec, {**spec, "measured_steps": [STEP]})
    )
    assert corrected["step_s"] > 2 * plain["step_s"]
    assert corrected["interval"]["words"] == "from 1 measured step, ±35%"
    search = {**SEARCH, "fixed": {"zero": 1, "pp": 1}, "limit": 1, "measured_steps": [STEP]}
    assert post(api(owner), "plan/search", search).json()["best"][0]["interval"]["basis"] == "measured steps"
    explanations = post(api(owner), "plan/explain", {"spec": spec, "cluster": "h100", "measured_steps": [STEP]}).json()
    assert any("because of measured steps" in one["kind"] for one in explanations)


def test_measured_step_corrects_the_reason_of_an_automatic_layout(owner: User, api: Api) -> None:
    spec = {**SEARCH["spec"], "layout": {"auto": {"ranks": 16, "pp": 1, "zero": 1}}, "resources": {"device": "cuda"}}
    plan = post(api(owner), "plan?cluster=h100", {**spec, "measured_steps": [STEP]}).json()
    assert plan["chosen"]["step_s"] == plan["estimate"]["time"]["step_s"]
    assert "(from 1 measured step, ±35%)" in plan["chosen"]["why"]


@pytest.mark.parametrize(
    ("step", "field"), [({**STEP, "step_s": 0}, "step_s"), ({**STEP, "layout": {"tp": 3}}, "layout.tp")]
)
def test_invalid_measured_step_is_a_problem(owner: User, api: Api, step: dict[str, Any], field: str) -> None:
    plan = post(api(owner), "plan?cluster=h100", {**SEARCH["spec"], "measured_steps": [step]}).json()
    assert plan["estimate"] is None
    assert [problem["field"] for problem in plan["problems"]] == [f"measured_steps.0.{field}"]
    response = post(api(owner), "plan/search", {**SEARCH, "measured_steps": [step]})
    assert response.status_code == 422
    (error,) = response.json()["errors"]
    assert error["field"] == f"measured_steps.0.{field}"
    assert error["pointer"] == "/measured_steps/0/" + field.replace(".", "/")


def test_submit_refuses_measured_steps(owner: User, api: Api) -> None:
    response = post(api(owner), "jobs", {**GOOD, "measured_steps": [STEP]})
    assert (response.status_code, response.json()["errors"][0]["field"]) == (422, "measured_steps")


def test_search_ignores_ranks_of_a_dry_run(owner: User, api: Api) -> None:
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
def test_rejects_an_invalid_search_by_field(owner: User, api: Api, change: dict[str, Any], field: str) -> None:
    response = post(api(owner), "plan/search", {**SEARCH, **change})
    assert response.status_code == 422
    assert field in [e["field"] for e in response.json()["errors"]]


def test_explains_every_figure(owner: User, api: Api) -> None:
    response = post(api(owner), "plan/explain", {"spec": GOOD, "cluster": "h100"})
    assert response.status_code == 200
    explanations = {e["figure"]: e for e in response.json()}
    assert set(explanations) == {"parameters", "memory", "traffic", "step time", "MFU"}
    assert explanations["traffic"]["kind"] == "exact"
    assert explanations["memory"]["kind"] == "estimated"
    assert post(api(owner), "plan/explain", {"spec": GOOD, "stage": 7}).json()["errors"][0]["field"] == "stage"
    assert post(api(owner), "plan/explain", [1]).status_code == 422


def test_lists_hardware_and_templates(owner: User, api: Api) -> None:
    client = api(owner)
    assert [c["id"] for c in client.get("/api/v1/clusters").json()] == list(CLUSTERS)
    assert [t["id"] for t in client.get("/api/v1/templates").json()] == list(TEMPLATES)


def test_plans_for_an_own_accelerator(owner: User, api: Api) -> None:
    own = OWN_EXAMPLE.strip("`")
    plan = post(api(owner), f"plan?cluster={own},name=My%20chip", GOOD).json()
    assert plan["estimate"]["cluster"]["name"] == "My chip"
    assert plan["estimate"]["time"]["interval"]["words"].startswith("own figures, ")
    found = post(api(owner), "plan/search", {**SEARCH, "cluster": own}).json()
    assert found["cluster"] == {"name": "Own accelerator", "memory_bytes": 80 * 10**9, "basis": "own figures"}
    wrong = post(api(owner), "plan/search", {**SEARCH, "cluster": "own:memory_gb=80"})
    assert wrong.status_code == 422
    assert {e["field"] for e in wrong.json()["errors"]} >= {"cluster.bf16_tflops", "cluster.network_gb_s"}


def test_explains_a_layout_on_its_own_hardware(owner: User, api: Api) -> None:
    spec = {**GOOD, "layout": {"auto": {"ranks": 2, "cluster": "h100"}}}
    explicit, from_spec = (
        post(api(owner), "plan/explain", {"spec": spec, **more}).json() for more in ({"cluster": "h100"}, {})
    )
    assert from_spec == explicit


@pytest.mark.parametrize("path", ["plan/search", "plan/explain"])
def test_planning_needs_a_login(api: Api, path: str) -> None:
    assert post(api(None), path, SEARCH).status_code == 401


@pytest.mark.parametrize("name", TEMPLATES)
def test_template_fills_the_form_and_its_small_variant_runs(owner: User, client: Any, api: Api, name: str) -> None:
    client.force_login(owner)
    page = client.get(f"/jobs/new/?template={name}")
    assert page.context["values"]["model.preset"] == TEMPLATES[name].spec["model"]["preset"]
    twin = client.get(f"/jobs/new/?template={name}&twin=1").context["values"]
    response = client.post("/jobs/new/", twin)
    assert response.status_code == 302, response.context["errors"]
    assert Job.objects.get().world_size <= 4


def test_link_with_a_layout_fills_the_form(owner: User, client: Any) -> None:
    client.force_login(owner)
    spec = '{"model": {"preset": "llama-tiny"}, "layout": {"dp": 4, "cp": 2}}'
    page = client.get("/jobs/new/", {"spec": spec, "cluster": "h100"})
    assert (page.context["values"]["layout.dp"], page.context["values"]["layout.cp"]) == ("4", "2")
    assert page.context["folds"].open == ["parallelism"]
    assert client.get("/jobs/new/", {"spec": "{"}).status_code == 422
    assert client.get("/jobs/new/?template=none").status_code == 404


def test_traffic_calculator_works_without_scripts(owner: User, client: Any) -> None:
    assert client.get("/planner/traffic/").status_code == 302
    client.force_login(owner)
    page = client.get("/planner/traffic/?b=1&s=512&h=8192&over=h")
    assert page.context["lesson"]["order"].startswith("DP > TP")
    assert "unusual order" in page.content.decode()
    assert page.context["curves"]["variable"] == "h"


def test_traffic_numbers_reject_invalid_values_by_name(owner: User, client: Any) -> None:
    client.force_login(owner)
    numbers = client.get("/planner/traffic/numbers/?b=8&over=h").json()
    assert numbers["curves"]["variable"] == "h"
    assert numbers["lesson"]["setting"]["b"] == 8
    refused = client.get("/planner/traffic/numbers/?b=none&k=2").json()
    assert [e["field"] for e in refused["errors"]] == ["b"]
    assert 'role="alert"><code>b</code>' in client.get("/planner/traffic/?b=0").content.decode()


def test_old_planner_addresses_redirect(owner: User, client: Any) -> None:
    client.force_login(owner)
    for old, new in {
        "/what-if/?cluster=h100": "/planner/?cluster=h100",
        "/learn/?b=8&over=h": "/planner/traffic/?b=8&over=h",
    }.items():
        response = client.get(old)
        assert (response.status_code, response["Location"]) == (301, new)
