"""Every refusal is problem details (RFC 9457): a type that is explained, and each wrong thing with where it stands."""

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


def problem(answer: Any, status: int) -> dict[str, Any]:
    assert (answer.status_code, answer["Content-Type"]) == (status, CONTENT_TYPE)
    told: dict[str, Any] = answer.json()
    slug, title, _ = PROBLEM_TYPES[status]
    assert told["type"] == f"/docs/errors/#{slug}"
    assert (told["title"], told["status"]) == (title, status)
    assert told["detail"]
    return told


def resolved(body: Any, pointer: str) -> Any:
    """RFC 6901."""
    for part in pointer.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        body = body[int(part)] if isinstance(body, list) else body[part]
    return body


def stands(body: Any, pointer: str) -> bool:
    """Whether what it names is there, or is missing from something that is."""
    parent, _, name = pointer.rpartition("/")
    try:
        found = resolved(body, parent)
    except (KeyError, IndexError):
        return False
    return not name or isinstance(found, dict) or (isinstance(found, list) and name.isdigit())


def test_each_refusal_of_a_view_is_a_problem(owner: User, api: Api, settings: Any) -> None:
    client = api(owner)
    nobody, wrong = APIClient(), APIClient(headers={"Authorization": "Token wrong"})
    problem(nobody.get("/api/v1/jobs"), 401)
    problem(wrong.get("/api/v1/jobs"), 401)
    assert "WWW-Authenticate" in wrong.get("/api/v1/jobs")
    problem(client.get("/api/v1/jobs/nosuchjob"), 404)
    problem(client.get("/api/v1/nowhere"), 404)
    assert problem(client.get("/api/v1/jobs?limit=x"), 400)["errors"] == [
        {"field": "limit", "pointer": "", "in": "query", "message": "`limit` is 'x'. Use a whole number from 1 to 200."}
    ]
    not_allowed = client.delete("/api/v1/presets")
    assert problem(not_allowed, 405)["errors"][0]["pointer"] == ""
    assert "GET" in not_allowed["Allow"]
    problem(client.get("/api/v1/jobs", headers={"Accept": "text/html"}), 406)
    problem(client.post("/api/v1/jobs", b" " * 2**21, content_type="application/json"), 413)
    problem(client.post("/api/v1/jobs", "a=b", content_type="application/x-www-form-urlencoded"), 415)
    problem(client.post("/api/v1/queue/pause"), 403)
    key = client.post("/api/v1/jobs", GOOD, format="json", headers={"Idempotency-Key": "a b"})
    assert (problem(key, 400)["errors"][0]["in"], key.json()["errors"][0]["pointer"]) == ("header", "")
    job = client.post("/api/v1/jobs", GOOD, format="json").json()["id"]
    client.post(f"/api/v1/jobs/{job}/cancel")
    (error,) = problem(client.post(f"/api/v1/jobs/{job}/cancel"), 409)["errors"]
    assert "in" not in error, "a job's state is no part of the request"


def test_a_session_without_its_csrf_token_is_a_problem(owner: User) -> None:
    client = APIClient(enforce_csrf_checks=True)
    client.force_login(owner)
    assert "CSRF" in problem(client.post("/api/v1/jobs", GOOD, format="json"), 403)["detail"]


def test_what_no_view_answers_is_a_problem_below_api_and_a_page_elsewhere() -> None:
    for path, is_problem in (("/api/v1/jobs", True), ("/jobs/new/", False)):
        request = RequestFactory().post(path)
        for answer in (permission_denied(request, PermissionDenied()), csrf_failure(request, "no cookie")):
            assert answer.status_code == 403
            assert (answer["Content-Type"] == CONTENT_TYPE) is is_problem
    assert b"<html" in Client().get("/nowhere/").content


@pytest.mark.parametrize("wrong", WRONG_SPECS, ids=lambda w: w.label)
def test_a_pointer_leads_to_what_is_wrong(owner: User, api: Api, wrong: Any) -> None:
    told = problem(api(owner).post("/api/v1/jobs", wrong.spec, format="json"), 422)
    for error in told["errors"]:
        assert error["in"] == "body"
        assert error["pointer"] == "/" + error["field"].replace(".", "/")
        assert stands(wrong.spec, error["pointer"]), error


def test_a_spec_inside_a_body_is_pointed_into(owner: User, api: Api) -> None:
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
        told = problem(client.post(f"/api/v1/{path}", body, format="json"), 422)
        assert {error["pointer"] for error in told["errors"]} == pointers


def test_a_name_with_a_slash_or_a_tilde_is_escaped() -> None:
    assert build_problem(422, [Problem("train.a/b~c", "no")], "body")["errors"][0]["pointer"] == "/train/a~1b~0c"


def test_many_words_are_cut_in_the_detail_alone() -> None:
    told = build_problem(422, [Problem(f"field{number}", "x" * 100) for number in range(50)], "body")
    assert (len(told["detail"]), len(told["errors"])) == (1000, 50)


def test_each_type_is_explained_under_its_own_heading() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "docs/reference/errors.md").read_text(), re.MULTILINE)
    assert headings == [kind.slug for kind in PROBLEM_TYPES.values()]


@pytest.mark.parametrize("path", ["jobs", "jobs/{job}/trace", "jobs/{job}/copy", "jobs/{job}/resume", "tokens", "runs"])
@pytest.mark.parametrize("body", [[], [1], "a", 7])
def test_a_body_that_is_no_object_is_the_whole_request_s(owner: User, api: Api, path: str, body: object) -> None:
    job = api(owner).post("/api/v1/jobs", GOOD, format="json").json()["id"]
    answer = api(owner).post(f"/api/v1/{path.format(job=job)}", body, format="json")
    assert {(e["field"], e["pointer"]) for e in problem(answer, 422)["errors"]} == {("request", "")}


def test_what_is_not_there_is_named_where_it_was_asked_for(owner: User, api: Api) -> None:
    client = api(owner)
    job = client.post("/api/v1/jobs", GOOD, format="json").json()["id"]
    for path, where in (
        (f"compare?jobs={job},nosuchjob", ("jobs", "query", "Job not found: nosuchjob.")),
        (f"jobs/{job}/logs/0?attempt=7", ("attempt", "query", "The job has no attempt 7.")),
        (f"jobs/{job}/logs/zero", ("rank", "path", "The job has no rank 'zero'.")),
    ):
        (error,) = problem(client.get(f"/api/v1/{path}"), 404)["errors"]
        assert (error["field"], error.get("in"), error["message"]) == where


def test_what_is_not_there_is_the_parameter_that_names_it(staff: User, api: Api) -> None:
    """Of every operation with something in its path, but where a run's own token or the body is looked at before."""
    staff.is_superuser = True
    staff.save()
    client, missing = api(staff), 0
    for path, methods in get_document()["paths"].items():
        names = re.findall("{(.*?)}", path)
        for method in methods if names else ():
            cache.clear()
            answer = getattr(client, method)(re.sub("{.*?}", "1", path), {}, format="json")
            if answer.status_code in (401, 422):
                continue
            told = problem(answer, 404)
            missing += 1
            (error,) = told["errors"]
            assert (error["field"], error.get("in"), error["pointer"]) == (names[0], "path", ""), path
            assert told["detail"].startswith("no such "), path
    assert missing > 60


def test_of_several_in_an_address_the_one_that_is_not_there_is_named(owner: User, staff: User, api: Api) -> None:
    team = Project.objects.create(name="team")
    Membership.objects.create(project=team, user=owner, role=Role.ADMIN)
    client, made = api(owner), {"name": "x", "url": "https://chat.example/7", "states": ["failed"]}
    hook = client.post("/api/v1/projects/team/webhooks", made, format="json").json()["id"]
    opened = client.post("/api/v1/imports", {"files": [{"name": "a.json", "size": 2}]}, format="json").json()["id"]
    for method, path, field in (
        ("delete", "projects/team/members/nobody", "user"),
        ("delete", "projects/nosuch/members/nobody", "project"),
        ("delete", "projects/team/invitations/7", "key"),
        ("delete", "projects/team/variables/JOB_X", "variable"),
        ("get", "projects/team/baselines/main", "branch"),
        ("get", "projects/nosuch/baselines/main", "project"),
        ("get", "projects/team/webhooks/nosuch/deliveries", "key"),
        ("post", f"projects/team/webhooks/{hook}/deliveries/nosuch/redeliver", "delivery"),
        ("put", f"imports/{opened}/files/7?offset=0", "place"),
        ("put", "imports/nosuch/files/0?offset=0", "key"),
    ):
        answer = client.generic(method, f"/api/v1/{path}", b"", "application/octet-stream" if method == "put" else "")
        (error,) = problem(answer, 404)["errors"]
        assert (error["field"], error["in"]) == (field, "path"), path


def test_what_may_not_be_done_is_of_what_the_address_names(owner: User, viewer: User, api: Api) -> None:
    job = api(owner).post("/api/v1/jobs", GOOD, format="json").json()["id"]
    told = problem(api(viewer).post(f"/api/v1/jobs/{job}/cancel"), 403)
    assert told["errors"] == [
        {"field": "job_id", "pointer": "", "in": "path", "message": "You can view this job, but not change it."}
    ]
    assert told["detail"] == "You can view this job, but not change it."
    (error,) = problem(api(owner).post("/api/v1/queue/pause"), 403)["errors"]
    assert (error["field"], "in" in error) == ("request", False), "its address names nothing"


def test_a_log_that_is_followed_has_no_file_and_no_range(owner: User, api: Api) -> None:
    """Whoever asked for standard error was told standard output, from its first line on."""
    client = api(owner)
    job = client.post("/api/v1/jobs", GOOD, format="json").json()["id"]
    told = problem(client.get(f"/api/v1/jobs/{job}/logs/0?follow=1&file=stderr&from=3&bytes=9"), 422)
    assert [(error["field"], error["in"]) for error in told["errors"]] == [
        (name, "query") for name in ("file", "from", "bytes")
    ]


@pytest.mark.parametrize("path", ["projects/default/webhooks", "notifications"])
def test_a_state_that_is_none_is_said_in_our_words(owner: User, api: Api, path: str) -> None:
    body = {"wishes": [{"project": None, "states": ["gone"]}]} if path == "notifications" else {"states": ["gone"]}
    ask = api(owner).put if path == "notifications" else api(owner).post
    told = problem(ask(f"/api/v1/{path}", body, format="json"), 422)["errors"]
    (error,) = [one for one in told if "states" in one["field"]]
    assert "states.0` is \"gone\". Use 'queued', 'starting', " in error["message"]


def test_what_stands_in_the_path_is_said_to(staff: User, api: Api) -> None:
    project = Project.objects.create(name="alpha")
    Membership.objects.create(project=project, user=staff, role=Role.ADMIN)
    staff.user_permissions.add(Permission.objects.get(codename="change_project"))
    for path, body, field in (
        ("projects/alpha/members/nosuchuser", {"role": "viewer"}, "user"),
        ("projects/alpha/variables/PATH", {"value": "x"}, "variable"),
        ("projects/alpha/baselines/ x", {"job": "abcdefghij"}, "branch"),
    ):
        (error,) = problem(api(staff).put(f"/api/v1/{path}", body, format="json"), 422)["errors"]
        assert (error["field"], error["pointer"], error["in"]) == (field, "", "path")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"name": "a", "name": "b"}', 'The key "name" appears twice'),
        ('{"train": {"steps": 1, "steps": 2}}', 'The key "steps" appears twice'),
        ('{"train": {"steps": ' + "1" * 5000 + "}}", "An integer has 5,000 digits, and the maximum is 4,300 digits."),
        ('{"train": {"steps": -' + "1" * 5000 + "}}", "An integer has 5,000 digits, and the maximum is 4,300 digits."),
    ],
)
def test_json_that_readers_understand_differently_is_refused(owner: User, api: Api, body: str, words: str) -> None:
    answer = api(owner).post("/api/v1/jobs", body, content_type="application/json")
    assert words in problem(answer, 400)["detail"]
    assert "sys." not in answer.json()["detail"]


def test_a_body_that_was_packed_is_refused(owner: User, api: Api) -> None:
    packed = gzip.compress(json.dumps(GOOD).encode())
    for body in (packed, json.dumps(GOOD)):
        for encoding in ("gzip", "br", "GZIP", "gzip, identity"):
            headers = {"Content-Encoding": encoding}
            answer = api(owner).post("/api/v1/jobs", body, content_type="application/json", headers=headers)
            assert "Use identity." in problem(answer, 415)["detail"]
    plain = api(owner).post(
        "/api/v1/jobs", json.dumps(GOOD), content_type="application/json", headers={"Content-Encoding": "identity"}
    )
    assert plain.status_code == 201


@pytest.mark.parametrize("method", ["get", "post", "patch"])
def test_whether_a_change_was_made_as_the_database_went_away_is_not_claimed(
    owner: User, api: Api, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """It goes away behind the commit, as the answer is read."""

    def gone(*_: Any) -> None:
        raise OperationalError("the connection is lost")

    job = api(owner).post("/api/v1/jobs", GOOD, format="json").json()["id"]
    monkeypatch.setattr("jobs.api.job_views.serialize_job", gone)
    path = f"/api/v1/jobs/{job}/cancel" if method == "post" else f"/api/v1/jobs/{job}"
    body = {"archived": False} if method == "patch" else None
    told = problem(getattr(api(owner), method)(path, body, format="json"), 503)
    assert "nothing was changed" not in told["detail"]
    assert ("The change may have been made." in told["detail"]) is (method != "get")
    assert ("Idempotency-Key" in told["detail"]) is (method != "get")
