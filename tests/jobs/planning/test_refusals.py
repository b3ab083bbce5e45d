"""What submit would refuse, the plan of the same draft says already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.cache import cache
from rest_framework.test import APIClient

from jobs.models import Job, Membership, Project, Role
from tests.planner.wrong_specs import GOOD

Api = Callable[[User | None], APIClient]
DRAFTS: dict[str, dict[str, Any]] = {
    "project": {"project": "nope"},
    "after": {"after": ["zzz"]},
    "resources.pool": {"resources": {"device": "cpu", "pool": "none"}},
    "resources.engine": {"resources": {"device": "cpu", "engine": "slurm"}},
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
    assert "there is no project 'ours', or you are no member of it" in foreign[0]["message"]
