"""`layout: "auto"` over REST and the form: chosen for the hosts that are there, stored, and told why."""

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


def test_the_chosen_layout_is_stored_with_what_was_asked_and_why(owner: User, api: Api, make_host: MakeHost) -> None:
    host = make_host(slots=4)
    asked = {"zero": [1, 2], "ranks": 4}
    answer = submit(api(owner), {**GOOD, "layout": {"auto": asked}})
    assert answer.status_code == 201
    job = answer.json()
    assert job["world_size"] == 4
    assert job["spec"]["layout"]["zero"] in (1, 2)
    assert parse_spec(job["spec"]).model_dump() == job["spec"], "a spec as any other"
    assert job["chosen"]["asked"] == asked
    assert host.name in job["chosen"]["why"]
    assert all(other["slower"] >= 0 for other in job["chosen"]["runners_up"])
    assert job["estimate"]["time"]["step_s"] == pytest.approx(job["chosen"]["step_s"])
    assert submit(api(owner), GOOD).json()["chosen"] is None


def test_what_is_known_of_it_is_planned_with_over_rest_and_refused_at_its_field(
    owner: User, api: Api, make_host: MakeHost
) -> None:
    make_host(slots=2)
    client = api(owner)

    def asked(stack: str) -> Any:
        resources = {"stack": stack, "device": "cuda", "software": {"cuda_graphs": "whole"}}
        plan = client.post("/api/v1/plan?cluster=h100", {**GOOD, "resources": resources}, format="json")
        assert plan.status_code == 200, plan.content
        return plan.json()

    assert "CUDA graphs of whole layers" in asked("megatron")["estimate"]["time"]["interval"]["words"]
    (problem,) = asked("ours")["problems"]
    assert problem["field"] == "resources.software.cuda_graphs"
    refused = submit(client, {**GOOD, "resources": {"software": {"fused_norms": True}}})
    fields = [e["field"] for e in refused.json()["errors"]]
    assert (refused.status_code, fields) == (422, ["resources.software.fused_norms"])


def test_software_that_is_not_ours_is_planned_for_and_refused_at_its_field_on_submit(
    owner: User, api: Api, make_host: MakeHost
) -> None:
    make_host(slots=2)
    client, spec = api(owner), {**AUTO, "resources": {"stack": "megatron"}}
    planned = client.post("/api/v1/plan", spec, format="json").json()
    assert planned["estimate"] is not None
    assert [p["field"] for p in planned["not_runnable"]] == ["resources.stack"]
    refused = submit(client, spec)
    assert (refused.status_code, [e["field"] for e in refused.json()["errors"]]) == (422, ["resources.stack"])


def test_the_same_key_gives_the_same_layout_whatever_is_there_by_then(
    owner: User, api: Api, make_host: MakeHost
) -> None:
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
def test_what_cannot_be_chosen_is_refused_with_the_arithmetic(
    owner: User, api: Api, make_host: MakeHost, changes: Any, host: Any, field: str, text: str
) -> None:
    make_host()
    Host.objects.update(**host)
    answer = submit(api(owner), {**AUTO, **changes})
    assert answer.status_code == 422, answer.content
    problem = answer.json()["errors"][0]
    assert problem["field"] == field
    assert text in problem["message"]
    assert Job.objects.count() == 0


def test_it_is_laid_over_hosts_of_one_model_and_timed_as_such(owner: User, api: Api, make_host: MakeHost) -> None:
    for name in ("host-a", "host-b"):
        make_host(name, slots=2)
    make_host("host-c", slots=4)
    Host.objects.filter(name="host-c").update(device_name="another")
    asked = {**GOOD, "layout": {"auto": {"ranks": 4, "tp": 2}}, "resources": {"labels": ["near"]}}
    assert (
        submit(api(owner), asked)
        .json()["errors"][0]["message"]
        .startswith("A CPU host with the labels near is not connected")
    )
    Host.objects.filter(name__in=("host-a", "host-b")).update(labels=["near"])
    job = submit(api(owner), asked).json()
    assert job["chosen"]["cluster"] == "2 hosts like host-a"
    assert job["world_size"] == 4
    assert job["estimate"]["time"]["step_s"] == pytest.approx(job["chosen"]["step_s"])
    assert {row["axis"] for stage in job["estimate"]["stages"] for row in stage["traffic"] if row["between_nodes"]} == {
        "dp",
        "world",
    }
    alone = {**asked, "resources": {"labels": ["near"], "max_hosts": 1}}
    assert (
        submit(api(owner), alone).json()["errors"][0]["message"]
        == "`layout.auto.ranks` is 4, but the largest host has 2 slots. Use at most 2."
    )


def test_a_plan_tells_what_would_be_chosen(owner: User, api: Api, make_host: MakeHost) -> None:
    make_host()
    client = api(owner)
    told = client.post("/api/v1/plan", AUTO, format="json").json()
    assert told["chosen"]["words"]
    assert told["estimate"]["time"]["step_s"] == pytest.approx(told["chosen"]["step_s"])
    named = client.post("/api/v1/plan?cluster=h100", AUTO, format="json").json()
    assert named["chosen"]["cluster"].startswith("H100")
    assert client.post("/api/v1/plan", GOOD, format="json").json()["chosen"] is None
    lost = client.post("/api/v1/plan", {**AUTO, "layout": {"auto": {"zero": 9}}}, format="json").json()
    assert lost["problems"][0]["field"] == "layout.auto.zero"


def test_the_form_submits_it(owner: User, make_host: MakeHost) -> None:
    make_host(slots=4)
    client = Client()
    client.force_login(owner)
    fields = {"name": "by form", "model.preset": "gpt-tiny", "auto": "true", "layout.auto.ranks": "2", "layout.dp": "4"}
    answer = client.post("/jobs/new/", fields)
    job = Job.objects.get()
    assert job.id in answer.headers["Location"]
    assert (job.world_size, job.chosen["asked"]) == (2, {"ranks": 2})
    refused = client.post("/jobs/new/", {**fields, "layout.auto.ranks": "many"})
    assert refused.status_code == 422
    assert "Use a whole number" in refused.content.decode()
    page = client.get(f"/jobs/{job.id}/").content.decode()
    assert "Why this layout" in page
