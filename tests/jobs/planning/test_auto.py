"""Automatic layouts over REST and the form, which are chosen for the connected hosts."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.cache import cache
from django.test import Client
from django.utils import timezone
from rest_framework.test import APIClient

from jobs.models import Host, Job
from planner.facts.parse_spec import parse_spec
from tests.planner.wrong_specs import GOOD

Api = Callable[[User | None], APIClient]
MakeHost = Callable[..., Host]
AUTO: dict[str, Any] = {**GOOD, "layout": "auto"}


@pytest.fixture(autouse=True)
def _fresh_throttle() -> None:
    cache.clear()


def submit(client: APIClient, spec: Any, **headers: str) -> Any:
    return client.post("/api/v1/jobs", spec, format="json", headers=headers)


def test_stores_the_chosen_layout_with_request_and_reason(owner: User, api: Api, make_host: MakeHost) -> None:
    host = make_host(slots=4)
    request = {"zero": [1, 2], "ranks": 4}
    response = submit(api(owner), {**GOOD, "layout": {"auto": request}})
    assert response.status_code == 201
    job = response.json()
    assert job["world_size"] == 4
    assert job["spec"]["layout"]["zero"] in (1, 2)
    assert parse_spec(job["spec"]).model_dump() == job["spec"], "the stored spec is complete"
    assert job["chosen"]["asked"] == request
    assert host.name in job["chosen"]["why"]
    assert all(other["slower"] >= 0 for other in job["chosen"]["runners_up"])
    assert job["estimate"]["time"]["step_s"] == pytest.approx(job["chosen"]["step_s"])
    assert submit(api(owner), GOOD).json()["chosen"] is None


def test_plans_software_settings_and_rejects_unsupported_ones(owner: User, api: Api, make_host: MakeHost) -> None:
    make_host(slots=2)
    client = api(owner)

    def get_plan(stack: str) -> Any:
        resources = {"stack": stack, "device": "cuda", "software": {"cuda_graphs": "whole"}}
        plan = client.post("/api/v1/plan?cluster=h100", {**GOOD, "resources": resources}, format="json")
        assert plan.status_code == 200, plan.content
        return plan.json()

    assert "CUDA graphs of whole layers" in get_plan("megatron")["estimate"]["time"]["interval"]["words"]
    (problem,) = get_plan("ours")["problems"]
    assert problem["field"] == "resources.software.cuda_graphs"
    refused = submit(client, {**GOOD, "resources": {"software": {"fused_norms": True}}})
    fields = [e["field"] for e in refused.json()["errors"]]
    assert (refused.status_code, fields) == (422, ["resources.software.fused_norms"])


def test_plans_other_frameworks_but_rejects_their_jobs(owner: User, api: Api, make_host: MakeHost) -> None:
    make_host(slots=2)
    client, spec = api(owner), {**AUTO, "resources": {"stack": "megatron"}}
    plan = client.post("/api/v1/plan", spec, format="json").json()
    assert plan["estimate"] is not None
    assert [p["field"] for p in plan["not_runnable"]] == ["resources.stack"]
    refused = submit(client, spec)
    assert (refused.status_code, [e["field"] for e in refused.json()["errors"]]) == (422, ["resources.stack"])


def test_repeated_key_returns_the_first_layout(owner: User, api: Api, make_host: MakeHost) -> None:
    make_host(slots=2)
    client = api(owner)
    first = submit(client, {**AUTO, "layout": {"auto": {"max_ranks": 8}}}, **{"Idempotency-Key": "one"})
    Host.objects.update(slots=8)
    again = submit(client, {**AUTO, "layout": {"auto": {"max_ranks": 8}}}, **{"Idempotency-Key": "one"})
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json()["spec"] == first.json()["spec"]
    assert submit(client, AUTO, **{"Idempotency-Key": "one"}).status_code == 422
    assert Job.objects.count() == 1


@pytest.mark.parametrize(
    ("changes", "host", "field", "text"),
    [
        ({}, {"last_seen": timezone.now() - timedelta(minutes=5)}, "layout.auto", "is not connected"),
        ({}, {"drained": True}, "layout.auto", "is not connected"),
        (
            {"resources": {"host": "host-z"}},
            {},
            "resources.host",
            "`resources.host` is 'host-z', but no such cpu host exists.",
        ),
        ({"model": {"preset": "llama3-8b"}}, {}, "layout.auto", "GiB of 1.00"),
        (
            {"layout": {"auto": {"ranks": 8}}},
            {},
            "layout.auto.ranks",
            "`layout.auto.ranks` is 8, but the largest host has 4 slots",
        ),
        (
            {"layout": {"auto": {"cluster": "nowhere"}}},
            {},
            "cluster",
            "`cluster` is 'nowhere', which is an unknown cluster",
        ),
        ({"layout": {"auto": None}}, {}, "layout.auto", "`layout.auto` is null. Use an object."),
        ({"layout": "automatic"}, {}, "layout", "Use an object."),
        ({"train": 5}, {}, "train", "`train` is 5. Use an object."),
        ({"kind": "script", "script": {"path": "a.py"}}, {}, "layout.auto", "`kind` is script"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_rejects_a_layout_that_cannot_be_chosen(
    owner: User, api: Api, make_host: MakeHost, changes: Any, host: Any, field: str, text: str
) -> None:
    make_host()
    Host.objects.update(**host)
    response = submit(api(owner), {**AUTO, **changes})
    assert response.status_code == 422, response.content
    problem = response.json()["errors"][0]
    assert problem["field"] == field
    assert text in problem["message"]
    assert Job.objects.count() == 0


def test_chooses_a_layout_over_equal_hosts(owner: User, api: Api, make_host: MakeHost) -> None:
    for name in ("host-a", "host-b"):
        make_host(name, slots=2)
    make_host("host-c", slots=4)
    Host.objects.filter(name="host-c").update(device_name="another")
    request = {**GOOD, "layout": {"auto": {"ranks": 4, "tp": 2}}, "resources": {"labels": ["near"]}}
    assert (
        submit(api(owner), request)
        .json()["errors"][0]["message"]
        .startswith("A CPU host with the labels near is not connected")
    )
    Host.objects.filter(name__in=("host-a", "host-b")).update(labels=["near"])
    job = submit(api(owner), request).json()
    assert job["chosen"]["cluster"] == "2 hosts like host-a"
    assert job["world_size"] == 4
    assert job["estimate"]["time"]["step_s"] == pytest.approx(job["chosen"]["step_s"])
    assert {row["axis"] for stage in job["estimate"]["stages"] for row in stage["traffic"] if row["between_nodes"]} == {
        "dp",
        "world",
    }
    one_host = {**request, "resources": {"labels": ["near"], "max_hosts": 1}}
    assert (
        submit(api(owner), one_host).json()["errors"][0]["message"]
        == "`layout.auto.ranks` is 4, but the largest host has 2 slots. Use at most 2."
    )


def test_plan_shows_the_layout_that_would_be_chosen(owner: User, api: Api, make_host: MakeHost) -> None:
    make_host()
    client = api(owner)
    plan = client.post("/api/v1/plan", AUTO, format="json").json()
    assert plan["chosen"]["words"]
    assert plan["estimate"]["time"]["step_s"] == pytest.approx(plan["chosen"]["step_s"])
    h100_plan = client.post("/api/v1/plan?cluster=h100", AUTO, format="json").json()
    assert h100_plan["chosen"]["cluster"].startswith("H100")
    assert client.post("/api/v1/plan", GOOD, format="json").json()["chosen"] is None
    invalid = client.post("/api/v1/plan", {**AUTO, "layout": {"auto": {"zero": 9}}}, format="json").json()
    assert invalid["problems"][0]["field"] == "layout.auto.zero"


def test_form_submits_an_automatic_layout(owner: User, make_host: MakeHost) -> None:
    make_host(slots=4)
    client = Client()
    client.force_login(owner)
    fields = {"name": "by form", "model.preset": "gpt-tiny", "auto": "true", "layout.auto.ranks": "2", "layout.dp": "4"}
    response = client.post("/jobs/new/", fields)
    job = Job.objects.get()
    assert job.id in response.headers["Location"]
    assert (job.world_size, job.chosen["asked"]) == (2, {"ranks": 2})
    refused = client.post("/jobs/new/", {**fields, "layout.auto.ranks": "many"})
    assert refused.status_code == 422
    assert "Use a whole number" in refused.content.decode()
    page = client.get(f"/jobs/{job.id}/").content.decode()
    assert "Why this layout" in page
