"""A plan reports the problems for which the same draft would be rejected."""

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
def test_plan_reports_what_submit_rejects(field: str, owner: User, api: Api, make_host: Any) -> None:
    make_host(slots=4)
    client, draft = api(owner), {**GOOD, **DRAFTS[field]}
    plan_problems = client.post("/api/v1/plan", draft, format="json").json()
    refused = client.post("/api/v1/jobs", draft, format="json")
    assert (refused.status_code, Job.objects.count()) == (422, 0)
    assert [problem["field"] for problem in plan_problems["problems"]] == [field]
    assert [one["message"] for one in plan_problems["problems"]] == [one["message"] for one in refused.json()["errors"]]
    if field != "kind":  # Calibrations have no estimate.
        assert plan_problems["estimate"]["world_size"], "a plan with problems still has an estimate"


def test_form_plan_reports_problems_of_the_user(owner: User, stranger: User, client: Any, api: Api) -> None:
    project = Project.objects.create(name="ours")
    Membership.objects.create(project=project, user=owner, role=Role.SUBMITTER)
    client.force_login(owner)
    fields = client.get("/jobs/new/").context["values"]
    problems = client.post("/plan/", {**fields, "project": "nope", "after": "zzz"}).json()["problems"]
    assert [problem["field"] for problem in problems] == ["project", "after"]
    assert client.post("/plan/", fields).json()["problems"] == []
    draft = {**GOOD, "project": "ours"}
    own_problems, foreign_problems = (
        api(who).post("/api/v1/plan", draft, format="json").json()["problems"] for who in (owner, stranger)
    )
    assert own_problems == []
    assert "`project` is 'ours', but you are not a member of such a project." in foreign_problems[0]["message"]


def list_host_errors(client: APIClient, host: str, device: str = "cpu") -> list[str]:
    response = client.post("/api/v1/jobs", {**GOOD, "resources": {"device": device, "host": host}}, format="json")
    assert response.status_code in (201, 422)
    errors = response.json().get("errors", [])
    assert {error["field"] for error in errors} <= {"resources.host"}
    return [error["message"] for error in errors]


def test_unknown_host_is_accepted_only_before_others_connect(owner: User, api: Api) -> None:
    client = api(owner)
    assert list_host_errors(client, "host-z") == [], "hosts can still connect"
    Host.objects.create(**make_host_row("gpu"), device="cuda")
    assert list_host_errors(client, "host-z") == []
    assert list_host_errors(client, "gpu") == [
        "`resources.host` is gpu, which has only cuda slots, but the job needs cpu slots."
    ]
    Host.objects.create(**make_host_row("silent"), device="cpu")
    assert list_host_errors(client, "silent") == []
    assert list_host_errors(client, "host-z") == [
        "`resources.host` is 'host-z', but no such cpu host exists. Use silent."
    ]
    for number in range(6):
        Host.objects.create(**make_host_row(f"host-{number}"), device="cpu")
    Host.objects.filter(name="host-5").update(removed=timezone.now())
    message = (
        "`resources.host` is 'host-5', but no such cpu host exists. "
        "Use host-0, host-1, host-2, host-3, host-4 and 1 more."
    )
    assert list_host_errors(client, "host-5") == [message]


@pytest.mark.parametrize(
    ("resources", "fields"),
    [
        ({"host": "host-z"}, ["resources.host"]),
        ({"host": "gpu"}, ["resources.host"]),
        ({"host": "host-z", "engine": "slurm"}, ["resources.host"]),
        ({"engine": "slurm"}, ["layout.auto"]),
        ({"host": "silent"}, ["layout.auto"]),
    ],
)
def test_automatic_layout_reports_an_unavailable_host(
    resources: dict[str, str], fields: list[str], owner: User, api: Api, make_host: Any
) -> None:
    """The name of a silent host is valid, so only its missing layout is an error."""
    make_host("host-a")
    Host.objects.create(**make_host_row("silent"), device="cpu")
    Host.objects.create(**make_host_row("gpu"), device="cuda")
    client, draft = api(owner), {**GOOD, "layout": "auto", "resources": {"device": "cpu", **resources}}
    refused = client.post("/api/v1/jobs", draft, format="json")
    assert refused.status_code == 422
    assert [error["field"] for error in refused.json()["errors"]] == fields
    plan_problems = client.post("/api/v1/plan", draft, format="json").json()["problems"]
    assert [problem["message"] for problem in plan_problems] == [error["message"] for error in refused.json()["errors"]]


def make_host_row(name: str) -> dict[str, Any]:
    """Return the fields of a host that has been silent for a day, for which jobs may wait."""
    seen = timezone.now() - timedelta(days=1)
    return {"name": name, "slots": 4, "device_name": "one", "memory_bytes": 2**30, "boot_id": "b", "last_seen": seen}
