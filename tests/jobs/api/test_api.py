"""Submission, access, forms, and error responses of the REST API and the pages."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.cache import cache
from django.db import OperationalError
from django.test import Client
from rest_framework.test import APIClient

from jobs.api import access
from jobs.models import Host, Job
from tests.planner.wrong_specs import GOOD, WRONG_SPECS, Wrong

Api = Callable[[User | None], APIClient]


@pytest.fixture(autouse=True)
def _fresh_throttle() -> None:
    cache.clear()


def submit(client: APIClient, spec: Any = GOOD, **headers: str) -> Any:
    return client.post("/api/v1/jobs", spec, format="json", headers=headers or None)


def test_submit_read_list_and_cancel(owner: User, api: Api) -> None:
    client = api(owner)
    response = submit(client)
    assert response.status_code == 201
    job = response.json()
    assert (job["status"], job["world_size"], job["owner"]) == ("queued", 4, "owner")
    assert job["estimate"]["stages"][0]["step_bytes"]["tp"] > 0
    assert job["history"][0]["reason"] == "submitted"
    assert client.get(f"/api/v1/jobs/{job['id']}").json() == job
    assert [j["id"] for j in client.get("/api/v1/jobs").json()] == [job["id"]]
    assert client.post(f"/api/v1/jobs/{job['id']}/cancel").json()["status"] == "cancelled"
    again = client.post(f"/api/v1/jobs/{job['id']}/cancel")
    assert again.status_code == 409
    assert again.json()["errors"][0]["message"] == "The job cannot be cancelled because it was cancelled."
    assert client.post(f"/api/v1/jobs/{job['id']}/requeue").json()["attempt"] == 2


@pytest.mark.parametrize("wrong", WRONG_SPECS, ids=lambda w: w.label)
def test_rejects_invalid_specs_by_field(owner: User, api: Api, wrong: Wrong) -> None:
    response = submit(api(owner), wrong.spec)
    assert response.status_code == 422
    messages = [e["message"] for e in response.json()["errors"] if e["field"] == wrong.field]
    assert any(wrong.words in message for message in messages), response.json()
    assert Job.objects.count() == 0


def test_rejects_more_ranks_than_the_largest_host(owner: User, api: Api, make_host: Callable[..., Host]) -> None:
    make_host(slots=2)
    response = submit(api(owner))
    assert response.status_code == 422
    assert response.json()["errors"][0]["message"].endswith(
        "= 4 ranks, but the largest CPU host has 2 slots. Use fewer ranks."
    )


def test_script_can_use_all_slots_of_a_host(owner: User, api: Api, make_host: Callable[..., Host]) -> None:
    make_host(slots=16)
    response = submit(api(owner), {"kind": "script", "script": {"path": "train.py"}, "layout": {"dp": 16}})
    assert (response.status_code, response.json().get("world_size")) == (201, 16), response.json()
    client = Client()
    client.force_login(owner)
    assert client.get(f"/jobs/{response.json()['id']}/").status_code == 200


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", 422),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[" * 100_000, 400),
        (b'{"train": {"learning_rate": NaN}}', 422),
        (b'{"name": "\\ud800"}', 422),
        (b'{"layout": {"dp": ' + b"9" * 5000 + b"}}", 400),
        (b"null", 422),
        (b" " * (10 * 2**20), 413),
    ],
    ids=["empty", "half", "no utf-8", "deep", "NaN", "surrogate", "5000 digits", "null", "10 MB"],
)
def test_rejects_malformed_bodies(owner: User, api: Api, body: bytes, code: int) -> None:
    for path in ("/api/v1/jobs", "/api/v1/plan"):
        response = api(owner).post(path, body, content_type="application/json")
        expected = 200 if path.endswith("plan") and code == 422 else code
        assert response.status_code == expected, response.content[:300]
        assert response.json().get("errors") or response.json()["problems"]


def test_rejects_other_content_types(owner: User, api: Api) -> None:
    assert api(owner).post("/api/v1/jobs", "a=b", content_type="application/x-www-form-urlencoded").status_code == 415


def test_repeated_key_returns_the_same_job(owner: User, stranger: User, api: Api) -> None:
    client = api(owner)
    first = submit(client, **{"Idempotency-Key": "k1"})
    second = submit(client, **{"Idempotency-Key": "k1"})
    assert (first.status_code, second.status_code) == (201, 200)
    assert first.json()["id"] == second.json()["id"]
    assert submit(client, {**GOOD, "name": "other"}, **{"Idempotency-Key": "k1"}).status_code == 422
    assert submit(client, **{"Idempotency-Key": "x" * 201}).status_code == 400
    assert submit(api(stranger), **{"Idempotency-Key": "k1"}).status_code == 201
    assert Job.objects.count() == 2


ROUTES = [
    ("get", "/api/v1/jobs"),
    ("post", "/api/v1/jobs"),
    ("get", "/api/v1/jobs/{id}"),
    ("post", "/api/v1/jobs/{id}/cancel"),
    ("post", "/api/v1/jobs/{id}/requeue"),
    ("post", "/api/v1/plan"),
    ("get", "/api/v1/presets"),
    ("get", "/api/v1/hosts"),
    ("get", "/api/v1/schema"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_all_routes_require_a_login(owner: User, api: Api, method: str, path: str) -> None:
    job = submit(api(owner)).json()["id"]
    for client in (APIClient(), APIClient(headers={"Authorization": "Token wrong"})):
        assert getattr(client, method)(path.format(id=job)).status_code == 401
    in_url = getattr(APIClient(), method)(path.format(id=job) + "?token=whatever")
    assert in_url.status_code == 401


@pytest.mark.parametrize(("method", "path"), [r for r in ROUTES if "{id}" in r[1]])
def test_only_owner_and_staff_access_a_job(
    owner: User, stranger: User, staff: User, api: Api, method: str, path: str
) -> None:
    job = submit(api(owner)).json()["id"]
    assert getattr(api(stranger), method)(path.format(id=job)).status_code == 404
    assert getattr(api(owner), method)(path.format(id="nosuchjob")).status_code == 404
    assert getattr(api(staff), method)(path.format(id=job)).status_code in (200, 409)


PAGES = ["/", "/jobs/new/", "/jobs/{id}/", "/jobs/{id}/cancel/", "/jobs/{id}/requeue/", "/plan/"]


@pytest.mark.parametrize("path", PAGES)
def test_pages_redirect_to_the_login(owner: User, stranger: User, api: Api, client: Any, path: str) -> None:
    job = submit(api(owner)).json()["id"]
    method = "post" if path.count("/") > 3 or path == "/plan/" else "get"
    response = getattr(client, method)(path.format(id=job))
    assert response.status_code == 302
    assert response.url.startswith("/login/?next=")
    if "{id}" in path:
        client.force_login(stranger)
        assert getattr(client, method)(path.format(id=job)).status_code == 404


def test_session_requires_a_csrf_token(owner: User) -> None:
    client = APIClient(enforce_csrf_checks=True)
    client.force_login(owner)
    assert client.post("/api/v1/jobs", GOOD, format="json").status_code == 403
    assert client.post("/jobs/new/", {"spec": json.dumps(GOOD)}).status_code in (400, 403, 415)
    assert Job.objects.count() == 0


def test_form_shows_errors_of_invalid_specs(owner: User, client: Any) -> None:
    client.force_login(owner)
    for wrong in WRONG_SPECS:
        response = client.post("/jobs/new/", {"spec": json.dumps(wrong.spec)})
        assert response.status_code == 422, wrong.label
        field_errors, other_errors = response.context["errors"], response.context["other_errors"]
        assert wrong.words in field_errors.get(wrong.field, "") or any(wrong.words in line for line in other_errors), (
            wrong.label
        )
    assert client.post("/jobs/new/", {"spec": "{"}).status_code == 422
    assert client.post("/jobs/new/", {}).status_code == 422
    assert Job.objects.count() == 0
    assert client.post("/jobs/new/", {"spec": json.dumps(GOOD)}).status_code == 302


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("layout.tp", "3", "`layout.tp` is 3, but 4 heads are not divisible by 3. Use 1, 2 or 4."),
        ("layout.dp", "0", "at least 1"),
        ("train.steps", "-1", "at least 1"),
        ("train.steps", "1e9", '`train.steps` is "1e9". Use a whole number.'),
        ("train.steps", "4x", '`train.steps` is "4x". Use a whole number.'),
        ("train.seed", "9" * 6000, "Use a whole number."),
        ("train.learning_rate", "NaN", "Use a number."),
        ("train.learning_rate", "", "Use a number."),
        ("train.data", "../secret", "outside the data root"),
        ("train.data", "a\x00b", "NUL"),
        ("name", "", "Use 1 character or more."),
        ("model.preset", "gpt-99", "which is unknown. Use a preset"),
        ("layout.schedule", "zigzag", "Use 'naive', 'gpipe', '1f1b', "),
    ],
)
def test_form_shows_an_error_and_keeps_the_input(
    owner: User, client: Any, field: str, value: str, message: str
) -> None:
    client.force_login(owner)
    filled = client.get("/jobs/new/").context["values"]
    response = client.post("/jobs/new/", {**filled, field: value})
    assert response.status_code == 422
    assert message in response.context["errors"][field]
    assert response.context["values"][field] == value
    assert Job.objects.count() == 0


def test_form_submits_and_copies_a_job(owner: User, client: Any) -> None:
    client.force_login(owner)
    filled = client.get("/jobs/new/").context["values"]
    response = client.post("/jobs/new/", {**filled, "train.steps": "77", "layout.sequence_parallel": "true"})
    job = Job.objects.get()
    assert response.headers["Location"] == f"/jobs/{job.id}/"
    assert (job.spec["train"]["steps"], job.spec["layout"]["sequence_parallel"]) == (77, True)
    again = client.get(f"/jobs/new/?from={job.id}").context["values"]
    assert again == {**filled, "train.steps": "77", "layout.sequence_parallel": "true"}
    client.post("/jobs/new/", again)
    assert [j.spec for j in Job.objects.exclude(id=job.id)] == [job.spec]


def test_plan_of_the_form_has_its_spec(owner: User, client: Any) -> None:
    client.force_login(owner)
    filled = client.get("/jobs/new/").context["values"]
    by_form = client.post("/plan/", filled).json()
    by_json = client.post("/plan/", by_form["spec"], content_type="application/json").json()
    assert by_form["readiness"]["state"] == "waits"
    assert {name: by_form[name] for name in by_json} == by_json
    assert by_form["problems"] == []
    assert by_form["estimate"]["world_size"] == 4


def test_pages_escape_job_names(owner: User, client: Any) -> None:
    client.force_login(owner)
    name = "<img src=x onerror=alert(1)></script>"
    client.post("/jobs/new/", {"spec": json.dumps({**GOOD, "name": name})})
    job = Job.objects.get()
    for path in ("/", f"/jobs/{job.id}/"):
        text = client.get(path).content.decode()
        assert "<img src=x" not in text
        assert "script-src 'self'" in client.get(path).headers["Content-Security-Policy"]


def test_limits_submissions_per_minute(owner: User, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        access, "time", SimpleNamespace(time=lambda: 1e9, monotonic=time.monotonic)
    )  # All requests are in one window.
    client = api(owner)
    codes = [submit(client, {}).status_code for _ in range(61)]
    assert codes[:60] == [422] * 60
    response = submit(client)
    assert response.status_code == 429
    assert int(response.headers["Retry-After"]) > 0


def test_accepts_submissions_without_redis(owner: User, api: Api, settings: Any) -> None:
    redis_cache = {"BACKEND": "webapp.json_cache.JsonCache", "LOCATION": "redis://127.0.0.1:1/0"}
    settings.CACHES = {"default": redis_cache}
    response = submit(api(owner))
    assert response.status_code == 201
    assert Job.objects.get(id=response.json()["id"]).status == "queued"


@pytest.mark.parametrize(("error", "status"), [(ZeroDivisionError("a bug"), 500), (OperationalError("gone"), 503)])
def test_internal_errors_are_problem_documents(
    owner: User, api: Api, monkeypatch: pytest.MonkeyPatch, caplog: Any, error: Exception, status: int
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("jobs.planning.drafts.list_presets", fail)
    response = api(owner).get("/api/v1/presets")
    assert response.status_code == status
    message = response.json()["errors"][0]["message"]
    assert (message.split()[-1] in caplog.text) is (status == 500), "the log has the id from the response"
    assert response.headers.get("Retry-After") == (None if status == 500 else "5")


def test_errors_outside_views_are_problem_documents(client: Any) -> None:
    """The error handler of Django is used if a middleware fails."""
    from django.test import RequestFactory

    from webapp.views import server_error

    problem = json.loads(server_error(RequestFactory().get("/api/v1/jobs")).content)
    assert problem["errors"][0]["field"] == "request"
    assert b"<html" in server_error(RequestFactory().get("/jobs/new/")).content


def test_plan_returns_an_estimate_or_problems(owner: User, api: Api, make_host: Callable[..., Host]) -> None:
    make_host(slots=4)
    valid = api(owner).post("/api/v1/plan", GOOD, format="json").json()
    assert valid["problems"] == []
    assert valid["estimate"]["world_size"] == 4
    too_large = api(owner).post("/api/v1/plan", {**GOOD, "layout": {"dp": 4, "tp": 2}}, format="json").json()
    assert [p["field"] for p in too_large["problems"]] == ["layout"]
    assert too_large["estimate"]["world_size"] == 8, "plans can exceed the connected hosts"


def test_document_lists_every_route(owner: User, api: Api) -> None:
    document = api(owner).get("/api/v1/schema").json()
    paths = {path for path in document["paths"] if path.startswith("/api/v1/")}
    assert {path.format(id="{job_id}") for _, path in ROUTES} - {"/api/v1/schema"} <= paths
    assert "422" in document["paths"]["/api/v1/jobs"]["post"]["responses"]
