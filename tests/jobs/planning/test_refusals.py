"""What submit would refuse, the plan of the same draft says already."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.cache import cache
from django.utils import timezone
from rest_framework.test import APIClient

from jobs.models import Host, Job, Membership, Project, Role
from tests.planner.wrong_specs import GOOD

Api = Callable[[User | None], APIClient]
DRAFTS: dict[str, dict[str, Any]] = {
    "project": {"project": "nope"},
    "after": {"after": ["zzz"]},
    "resources.pool": {"resources": {"device": "cpu", "pool": "none"}},
    "resources.engine": {"resources": {"device": "cpu", "engine": "slurm"}},
    "resources.host": {"resources": {"device": "cpu", "host": "host-z"}},
    "name": {"name": "a\u202eb"},
    "kind": {
        "kind": "calibrate",
        "layout": {"dp": 4},
        "train": {"global_batch": 4, "micro_batches": 1},
        "resources": {"device": "cpu", "host": "host-a"},
    },
    "layout": {"layout": {"dp": 8}, "train": {"global_batch": 8, "micro_batches": 1}},
}


@pytest.fixture(autouse=True)
def _fresh_throttle() -> None:
    cache.clear()


@pytest.mark.parametrize("field", DRAFTS)
def test_a_plan_tells_what_submit_would_refuse(field: str, owner: User, api: Api, make_host: Any) -> None:
    make_host(slots=4)
    rest, draft = api(owner), {**GOOD, **DRAFTS[field]}
    planned = rest.post("/api/v1/plan", draft, format="json").json()
    refused = rest.post("/api/v1/jobs", draft, format="json")
    assert (refused.status_code, Job.objects.count()) == (422, 0)
    assert [problem["field"] for problem in planned["problems"]] == [field]
    assert [one["message"] for one in planned["problems"]] == [one["message"] for one in refused.json()["errors"]]
    if field != "kind":  # of a calibration nothing is predicted
        assert planned["estimate"]["world_size"], "what it would cost is told all the same"


def test_the_form_s_plan_tells_it_too_and_a_plan_is_for_who_asks(
    owner: User, stranger: User, client: Any, api: Api
) -> None:
    project = Project.objects.create(name="ours")
    Membership.objects.create(project=project, user=owner, role=Role.SUBMITTER)
    client.force_login(owner)
    fields = client.get("/jobs/new/").context["values"]
    told = client.post("/plan/", {**fields, "project": "nope", "after": "zzz"}).json()["problems"]
    assert [problem["field"] for problem in told] == ["project", "after"]
    assert client.post("/plan/", fields).json()["problems"] == []
    draft = {**GOOD, "project": "ours"}
    own, foreign = (api(who).post("/api/v1/plan", draft, format="json").json()["problems"] for who in (owner, stranger))
    assert own == []
    assert "`project` is 'ours', but you are not a member of such a project." in foreign[0]["message"]


def host_errors(client: APIClient, host: str, device: str = "cpu") -> list[str]:
    answer = client.post("/api/v1/jobs", {**GOOD, "resources": {"device": device, "host": host}}, format="json")
    assert answer.status_code in (201, 422)
    errors = answer.json().get("errors", [])
    assert {error["field"] for error in errors} <= {"resources.host"}
    return [error["message"] for error in errors]


def test_a_host_that_nobody_knows_is_waited_for_only_while_none_of_its_device_is_there(owner: User, api: Api) -> None:
    client = api(owner)
    assert host_errors(client, "host-z") == [], "a board that is just starting"
    Host.objects.create(**host_row("gpu"), device="cuda")
    assert host_errors(client, "host-z") == []
    assert host_errors(client, "gpu") == [
        "`resources.host` is gpu, which has only cuda slots, but the job needs cpu slots."
    ]
    Host.objects.create(**host_row("silent"), device="cpu")
    assert host_errors(client, "silent") == []
    assert host_errors(client, "host-z") == ["`resources.host` is 'host-z', but no such cpu host exists. Use silent."]
    for number in range(6):
        Host.objects.create(**host_row(f"host-{number}"), device="cpu")
    Host.objects.filter(name="host-5").update(removed=timezone.now())
    told = (
        "`resources.host` is 'host-5', but no such cpu host exists. "
        "Use host-0, host-1, host-2, host-3, host-4 and 1 more."
    )
    assert host_errors(client, "host-5") == [told]


@pytest.mark.parametrize(
    ("asked", "fields"),
    [
        ({"host": "host-z"}, ["resources.host"]),
        ({"host": "gpu"}, ["resources.host"]),
        ({"host": "host-z", "engine": "slurm"}, ["resources.host"]),
        ({"engine": "slurm"}, ["layout.auto"]),
        ({"host": "silent"}, ["layout.auto"]),
    ],
)
def test_a_layout_is_chosen_for_a_host_that_is_there_or_the_host_is_what_is_refused(
    asked: dict[str, str], fields: list[str], owner: User, api: Api, make_host: Any
) -> None:
    """Of one that is only silent there is nothing wrong with its name."""
    make_host("host-a")
    Host.objects.create(**host_row("silent"), device="cpu")
    Host.objects.create(**host_row("gpu"), device="cuda")
    client, draft = api(owner), {**GOOD, "layout": "auto", "resources": {"device": "cpu", **asked}}
    refused = client.post("/api/v1/jobs", draft, format="json")
    assert refused.status_code == 422
    assert [error["field"] for error in refused.json()["errors"]] == fields
    planned = client.post("/api/v1/plan", draft, format="json").json()["problems"]
    assert [problem["message"] for problem in planned] == [error["message"] for error in refused.json()["errors"]]


def host_row(name: str) -> dict[str, Any]:
    """Of a host that was not heard of for long: a job may wait for it."""
    seen = timezone.now() - timedelta(days=1)
    return {"name": name, "slots": 4, "device_name": "one", "memory_bytes": 2**30, "boot_id": "b", "last_seen": seen}
