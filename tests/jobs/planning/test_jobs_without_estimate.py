"""Scripts, labs, and calibrations have no estimate on pages or over REST."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from rest_framework.test import APIClient

from jobs.models import Attempt, Host
from jobs.queue import actions
from jobs.runs.history.exports import flatten_spec
from jobs.runs.history.queries.comparison import compare_jobs
from planner.facts.kinds import drop_unused_fields
from tests.planner.wrong_specs import GOOD

pytestmark = pytest.mark.django_db
Api = Callable[[User | None], APIClient]
SCRIPT: dict[str, Any] = {"kind": "script", "script": {"path": "a.py"}, "layout": {"dp": 2}}
SUMMARY = {"steps": 7, "tokens_per_s": 100.0, "measured": {"steps": 7, "step_s": 0.5}, "peak_bytes": {"0": 2**30}}


def make_lab(host: Host) -> dict[str, Any]:
    return {"kind": "lab", "layout": {"dp": 2}, "lab": {}, "resources": {"device": "cpu", "host": host.name}}


def test_jobs_that_do_not_train_have_no_estimate(
    owner: User, staff: User, api: Api, make_host: Callable[..., Host], live_redis: object
) -> None:
    client, host = api(staff), make_host()
    ids = [client.post("/api/v1/jobs", spec, format="json").json()["id"] for spec in (SCRIPT, make_lab(host))]
    ids += [actions.submit_calibration(staff, host).id]
    ids += [client.post("/api/v1/runs", {"world_size": 2, "command": ["a.py"]}, format="json").json()["run"]]
    for job in ids:
        assert client.get(f"/api/v1/jobs/{job}").json()["estimate"] == {}, job
    training = client.post("/api/v1/jobs", GOOD, format="json").json()["id"]
    assert client.get(f"/api/v1/jobs/{training}").json()["estimate"]["stages"]


def test_planner_has_no_estimate_for_a_script(owner: User, api: Api) -> None:
    client = api(owner)
    plan = client.post("/api/v1/plan", SCRIPT, format="json").json()
    assert (plan["estimate"], plan["problems"]) == (None, [])
    assert "matrix" not in plan
    for path, body in (("explain", {"spec": SCRIPT}), ("search", {"spec": SCRIPT, "ranks": 2})):
        response = client.post(f"/api/v1/plan/{path}", body, format="json")
        assert response.status_code == 422, path
        assert response.json()["errors"][0]["field"] == "kind"


def test_comparison_of_scripts_shows_used_fields_only(client: Client, owner: User) -> None:
    first, _ = actions.submit(owner, SCRIPT)
    second, _ = actions.submit(owner, {**SCRIPT, "layout": {"dp": 4}})
    for job in (first, second):
        Attempt.objects.create(job=job, number=1, exit={"summary": SUMMARY})
    client.force_login(owner)
    page = client.get(f"/compare/?jobs={first.id},{second.id}").content.decode().partition('id="compared"')[0]
    assert "planned" not in page
    assert "2 runs: curves" in page
    assert "train." not in page
    assert "gpt-tiny" not in page
    assert "layout.dp" in page
    comparison = compare_jobs([first, second])
    assert [one["plan"] for one in comparison["jobs"]] == [{}, {}]
    assert [one["field"] for one in comparison["differences"]] == ["layout.dp"]
    names = {name for name, _ in flatten_spec(drop_unused_fields(first.spec))}
    assert "script.path" in names
    assert not {name for name in names if name.startswith(("train.", "model."))}
