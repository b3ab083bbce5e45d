"""All error responses are problem details (RFC 9457) with a pointer to each error."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.core.cache import cache
from django.core.exceptions import PermissionDenied
from django.db import OperationalError
from django.test import Client, RequestFactory
from rest_framework.test import APIClient

from jobs.api.openapi import get_document
from jobs.api.problems import CONTENT_TYPE, PROBLEM_TYPES, build_problem
from jobs.models import Membership, Project, Role
from planner.facts.validation import Problem
from tests.planner.wrong_specs import GOOD, WRONG_SPECS
from tests.support.processes import ROOT
from webapp.views import csrf_failure, permission_denied

Api = Callable[[User | None], APIClient]


@pytest.fixture(autouse=True)
def _fresh_throttle() -> None:
    cache.clear()


def check_problem(response: Any, status: int) -> dict[str, Any]:
    assert (response.status_code, response["Content-Type"]) == (status, CONTENT_TYPE)
    document: dict[str, Any] = response.json()
    slug, title, _ = PROBLEM_TYPES[status]
    assert document["type"] == f"/docs/errors/#{slug}"
    assert (document["title"], document["status"]) == (title, status)
    assert document["detail"]
    return document


def resolve_pointer(body: Any, pointer: str) -> Any:
    """Return the value at a JSON pointer (RFC 6901)."""
    for part in pointer.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        body = body[int(part)] if isinstance(body, list) else body[part]
    return body


def has_target(body: Any, pointer: str) -> bool:
    """Return whether the pointer names a value, or a missing member of a value."""
    parent, _, name = pointer.rpartition("/")
    try:
        parent_value = resolve_pointer(body, parent)
    except (KeyError, IndexError):
        return False
    return not name or isinstance(parent_value, dict) or (isinstance(parent_value, list) and name.isdigit())


def test_error_responses_are_problem_documents(owner: User, api: Api, settings: Any) -> None:
    client = api(owner)
    nobody, wrong = APIClient(), APIClient(headers={"Authorization": "Token wrong"})
    check_problem(nobody.get("/api/v1/jobs"), 401)
    check_problem(wrong.get("/api/v1/jobs"), 401)
    assert "WWW-Authenticate" in wrong.get("/api/v1/jobs")
    check_problem(client.get("/api/v1/jobs/nosuchjob"), 404)
    check_problem(client.get("/api/v1/nowhere"), 404)
    assert check_problem(client.get("/api/v1/jobs?limit=x"), 400)["errors"] == [
        {"field": "limit", "pointer": "", "in": "query", "message": "`limit` is 'x'. Use a whole number from 1 to 200."}
    ]
    not_allowed = client.delete("/api/v1/presets")
    assert check_problem(not_allowed, 405)["errors"][0]["pointer"] == ""
    assert "GET" in not_allowed["Allow"]
    check_problem(client.get("/api/v1/jobs", headers={"Accept": "text/html"}), 406)
    check_problem(client.post("/api/v1/jobs", b" " * 2**21, content_type="application/json"), 413)
    check_problem(client.post("/api/v1/jobs", "a=b", content_type="application/x-www-form-urlencoded"), 415)
    check_problem(client.post("/api/v1/queue/pause"), 403)
    key = client.post("/api/v1/jobs", GOOD, format="json", headers={"Idempotency-Key": "a b"})
    assert (check_problem(key, 400)["errors"][0]["in"], key.json()["errors"][0]["pointer"]) == ("header", "")
    job = client.post("/api/v1/jobs", GOOD, format="json").json()["id"]
    client.post(f"/api/v1/jobs/{job}/cancel")
    (error,) = check_problem(client.post(f"/api/v1/jobs/{job}/cancel"), 409)["errors"]
    assert "in" not in error, "the state of a job is not in the request"


def test_missing_csrf_token_is_a_problem(owner: User) -> None:
    client = APIClient(enforce_csrf_checks=True)
    client.force_login(owner)
    assert "CSRF" in check_problem(client.post("/api/v1/jobs", GOOD, format="json"), 403)["detail"]


def test_errors_outside_views_are_problems_or_pages() -> None:
    for path, is_problem in (("/api/v1/jobs", True), ("/jobs/new/", False)):
        request = RequestFactory().post(path)
        for response in (permission_denied(request, PermissionDenied()), csrf_failure(request, "no cookie")):
            assert response.status_code == 403
            assert (response["Content-Type"] == CONTENT_TYPE) is is_problem
    assert b"<html" in Client().get("/nowhere/").content


@pytest.mark.parametrize("wrong", WRONG_SPECS, ids=lambda w: w.label)
def test_pointers_lead_to_invalid_fields(owner: User, api: Api, wrong: Any) -> None:
    problem = check_problem(api(owner).post("/api/v1/jobs", wrong.spec, format="json"), 422)
    for error in problem["errors"]:
        assert error["in"] == "body"
        assert error["pointer"] == "/" + error["field"].replace(".", "/")
        assert has_target(wrong.spec, error["pointer"]), error


def test_pointers_lead_into_nested_specs(owner: User, api: Api) -> None:
    client, inner = api(owner), {**GOOD, "train": {"steps": 0}}
    for path, body, pointers in (
        ("plan/explain", {"spec": inner}, {"/spec/train/steps"}),
        ("plan/explain", {"spec": GOOD, "stage": 7}, {"/stage"}),
        ("plan/search", {"spec": inner, "ranks": 4}, {"/spec/train/steps"}),
        ("plan/search", {"spec": GOOD, "ranks": 0}, {"/ranks"}),
        ("plan/search", {"spec": GOOD, "ranks": 4, "fixed": {"tp": 0}}, {"/fixed/tp"}),
        ("plan/search", {"spec": [], "ranks": 4}, {"/spec"}),
        ("plan/search", {**inner, "spec": GOOD, "ranks": 4}, {f"/{name}" for name in inner}),
        ("plan/explain", {"train": {}, "spec": GOOD}, {"/train"}),
    ):
        problem = check_problem(client.post(f"/api/v1/{path}", body, format="json"), 422)
        assert {error["pointer"] for error in problem["errors"]} == pointers


def test_pointers_escape_slash_and_tilde() -> None:
    assert build_problem(422, [Problem("train.a/b~c", "no")], "body")["errors"][0]["pointer"] == "/train/a~1b~0c"


def test_long_messages_are_cut_in_the_detail_only() -> None:
    problem = build_problem(422, [Problem(f"field{number}", "x" * 100) for number in range(50)], "body")
    assert (len(problem["detail"]), len(problem["errors"])) == (1000, 50)


def test_every_problem_type_is_documented() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "docs/reference/errors.md").read_text(), re.MULTILINE)
    assert headings == [kind.slug for kind in PROBLEM_TYPES.values()]


@pytest.mark.parametrize("path", ["jobs", "jobs/{job}/trace", "jobs/{job}/copy", "jobs/{job}/resume", "tokens", "runs"])
@pytest.mark.parametrize("body", [[], [1], "a", 7])
def test_body_that_is_no_object_is_an_error_of_the_request(owner: User, api: Api, path: str, body: object) -> None:
    job = api(owner).post("/api/v1/jobs", GOOD, format="json").json()["id"]
    response = api(owner).post(f"/api/v1/{path.format(job=job)}", body, format="json")
    assert {(e["field"], e["pointer"]) for e in check_problem(response, 422)["errors"]} == {("request", "")}


def test_missing_objects_are_named_with_their_parameter(owner: User, api: Api) -> None:
    client = api(owner)
    job = client.post("/api/v1/jobs", GOOD, format="json").json()["id"]
    for path, where in (
        (f"compare?jobs={job},nosuchjob", ("jobs", "query", "Job not found: nosuchjob.")),
        (f"jobs/{job}/logs/0?attempt=7", ("attempt", "query", "The job has no attempt 7.")),
        (f"jobs/{job}/logs/zero", ("rank", "path", "The job has no rank 'zero'.")),
    ):
        (error,) = check_problem(client.get(f"/api/v1/{path}"), 404)["errors"]
        assert (error["field"], error.get("in"), error["message"]) == where


def test_missing_object_is_an_error_of_the_path(staff: User, api: Api) -> None:
    """Check all operations with path parameters, except those that validate a token or body first."""
    staff.is_superuser = True
    staff.save()
    client, missing = api(staff), 0
    for path, methods in get_document()["paths"].items():
        names = re.findall("{(.*?)}", path)
        for method in methods if names else ():
            cache.clear()
            response = getattr(client, method)(re.sub("{.*?}", "1", path), {}, format="json")
            if response.status_code in (401, 422):
                continue
            problem = check_problem(response, 404)
            missing += 1
            (error,) = problem["errors"]
            assert (error["field"], error.get("in"), error["pointer"]) == (names[0], "path", ""), path
            assert problem["detail"].startswith("no such "), path
    assert missing > 60


def test_error_names_the_missing_one_of_several_objects(owner: User, staff: User, api: Api) -> None:
    team = Project.objects.create(name="team")
    Membership.objects.create(project=team, user=owner, role=Role.ADMIN)
    client, webhook = api(owner), {"name": "x", "url": "https://chat.example/7", "states": ["failed"]}
    hook = client.post("/api/v1/projects/team/webhooks", webhook, format="json").json()["id"]
    import_id = client.post("/api/v1/imports", {"files": [{"name": "a.json", "size": 2}]}, format="json").json()["id"]
    for method, path, field in (
        ("delete", "projects/team/members/nobody", "user"),
        ("delete", "projects/nosuch/members/nobody", "project"),
        ("delete", "projects/team/invitations/7", "key"),
        ("delete", "projects/team/variables/JOB_X", "variable"),
        ("get", "projects/team/baselines/main", "branch"),
        ("get", "projects/nosuch/baselines/main", "project"),
        ("get", "projects/team/webhooks/nosuch/deliveries", "key"),
        ("post", f"projects/team/webhooks/{hook}/deliveries/nosuch/redeliver", "delivery"),
        ("put", f"imports/{import_id}/files/7?offset=0", "place"),
        ("put", "imports/nosuch/files/0?offset=0", "key"),
    ):
        response = client.generic(method, f"/api/v1/{path}", b"", "application/octet-stream" if method == "put" else "")
        (error,) = check_problem(response, 404)["errors"]
        assert (error["field"], error["in"]) == (field, "path"), path


def test_missing_rights_are_an_error_of_the_path(owner: User, viewer: User, api: Api) -> None:
    job = api(owner).post("/api/v1/jobs", GOOD, format="json").json()["id"]
    problem = check_problem(api(viewer).post(f"/api/v1/jobs/{job}/cancel"), 403)
    assert problem["errors"] == [
        {"field": "job_id", "pointer": "", "in": "path", "message": "You can view this job, but not change it."}
    ]
    assert problem["detail"] == "You can view this job, but not change it."
    (error,) = check_problem(api(owner).post("/api/v1/queue/pause"), 403)["errors"]
    assert (error["field"], "in" in error) == ("request", False), "its address has no parameter"


def test_followed_log_rejects_file_and_range(owner: User, api: Api) -> None:
    """These parameters would be ignored while the log is followed."""
    client = api(owner)
    job = client.post("/api/v1/jobs", GOOD, format="json").json()["id"]
    problem = check_problem(client.get(f"/api/v1/jobs/{job}/logs/0?follow=1&file=stderr&from=3&bytes=9"), 422)
    assert [(error["field"], error["in"]) for error in problem["errors"]] == [
        (name, "query") for name in ("file", "from", "bytes")
    ]


@pytest.mark.parametrize("path", ["projects/default/webhooks", "notifications"])
def test_invalid_state_lists_the_valid_ones(owner: User, api: Api, path: str) -> None:
    body = {"wishes": [{"project": None, "states": ["gone"]}]} if path == "notifications" else {"states": ["gone"]}
    ask = api(owner).put if path == "notifications" else api(owner).post
    problem = check_problem(ask(f"/api/v1/{path}", body, format="json"), 422)["errors"]
    (error,) = [one for one in problem if "states" in one["field"]]
    assert "states.0` is \"gone\". Use 'queued', 'starting', " in error["message"]


def test_invalid_path_values_are_errors_of_the_path(staff: User, api: Api) -> None:
    project = Project.objects.create(name="alpha")
    Membership.objects.create(project=project, user=staff, role=Role.ADMIN)
    staff.user_permissions.add(Permission.objects.get(codename="change_project"))
    for path, body, field in (
        ("projects/alpha/members/nosuchuser", {"role": "viewer"}, "user"),
        ("projects/alpha/variables/PATH", {"value": "x"}, "variable"),
        ("projects/alpha/baselines/ x", {"job": "abcdefghij"}, "branch"),
    ):
        (error,) = check_problem(api(staff).put(f"/api/v1/{path}", body, format="json"), 422)["errors"]
        assert (error["field"], error["pointer"], error["in"]) == (field, "", "path")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"name": "a", "name": "b"}', 'The key "name" appears twice'),
        ('{"train": {"steps": 1, "steps": 2}}', 'The key "steps" appears twice'),
        ('{"train": {"steps": ' + "1" * 5000 + "}}", "An integer has 5,000 digits, and the maximum is 4,300 digits."),
        ('{"train": {"steps": -' + "1" * 5000 + "}}", "An integer has 5,000 digits, and the maximum is 4,300 digits."),
    ],
)
def test_rejects_ambiguous_json(owner: User, api: Api, body: str, message: str) -> None:
    response = api(owner).post("/api/v1/jobs", body, content_type="application/json")
    assert message in check_problem(response, 400)["detail"]
    assert "sys." not in response.json()["detail"]


def test_rejects_compressed_bodies(owner: User, api: Api) -> None:
    compressed = gzip.compress(json.dumps(GOOD).encode())
    for body in (compressed, json.dumps(GOOD)):
        for encoding in ("gzip", "br", "GZIP", "gzip, identity"):
            headers = {"Content-Encoding": encoding}
            response = api(owner).post("/api/v1/jobs", body, content_type="application/json", headers=headers)
            assert "Use identity." in check_problem(response, 415)["detail"]
    plain = api(owner).post(
        "/api/v1/jobs", json.dumps(GOOD), content_type="application/json", headers={"Content-Encoding": "identity"}
    )
    assert plain.status_code == 201


@pytest.mark.parametrize("method", ["get", "post", "patch"])
def test_lost_database_reports_an_unknown_result(
    owner: User, api: Api, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The connection fails after the commit, while the response is read."""

    def fail(*_: Any) -> None:
        raise OperationalError("the connection is lost")

    job = api(owner).post("/api/v1/jobs", GOOD, format="json").json()["id"]
    monkeypatch.setattr("jobs.api.job_views.serialize_job", fail)
    path = f"/api/v1/jobs/{job}/cancel" if method == "post" else f"/api/v1/jobs/{job}"
    body = {"archived": False} if method == "patch" else None
    problem = check_problem(getattr(api(owner), method)(path, body, format="json"), 503)
    assert "nothing was changed" not in problem["detail"]
    assert ("The change may have been made." in problem["detail"]) is (method != "get")
    assert ("Idempotency-Key" in problem["detail"]) is (method != "get")
