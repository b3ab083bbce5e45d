"""Names with invisible or control characters are rejected with their field and reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.cache import cache
from django.test import Client
from rest_framework.test import APIClient

from jobs.models import Job, JobTag, Project
from jobs.models.validators import find_name_problem
from jobs.queue import actions
from tests.planner.wrong_specs import GOOD

Api = Callable[[User | None], APIClient]
INVALID_NAMES = [
    ("a\ufffe", "U+FFFE, which is not a valid Unicode character"),
    ("a\uffff", "not a valid Unicode character"),
    ("a\U0001ffff", "not a valid Unicode character"),
    ("a\x85b", "U+0085, a control character"),
    ("a\x9b31m", "a control character"),
    ("a\u2028b", "which breaks the line"),
    ("a\u2029b", "which breaks the line"),
    ("a\u202eb", "changes the direction of the text"),
    ("a\u2066b", "changes the direction of the text"),
    (" ", "no visible character"),
    ("\u200b\u200d\ufeff", "no visible character"),
    ("\u3164", "no visible character"),
]
VALID_NAMES = ["run 7", "Läufer", "名前", "שלום", "👩‍🚀", "-", "<b>", "=1+1"]


@pytest.fixture(autouse=True)
def _fresh_throttle() -> None:
    cache.clear()


@pytest.mark.parametrize(("name", "message"), INVALID_NAMES)
def test_rejects_unreadable_names(owner: User, api: Api, name: str, message: str) -> None:
    client = api(owner)
    job = actions.submit(owner, GOOD)[0].id
    hook = {"name": name, "url": "https://hooks.example/"}
    run: dict[str, Any] = {"world_size": 1, "name": name}
    for method, path, body, pointer in (
        ("post", "jobs", {**GOOD, "name": name}, "/name"),
        ("post", f"jobs/{job}/copy", {"name": name}, "/name"),
        ("patch", f"jobs/{job}", {"add_tags": ["good", name]}, "/add_tags/1"),
        ("post", "jobs/actions", {"action": "tag", "jobs": [job], "tags": [name]}, "/tags"),
        ("post", "tokens", {"name": name, "scopes": ["read"]}, "/name"),
        ("post", "projects/default/webhooks", hook, "/name"),
        ("post", "runs", run, "/name"),
    ):
        response = getattr(client, method)(f"/api/v1/{path}", body, format="json")
        assert response.status_code == 422, path
        messages = {error["pointer"]: error["message"] for error in response.json()["errors"]}
        assert message in messages[pointer], path
    (problem,) = client.post("/api/v1/plan", {**GOOD, "name": name}, format="json").json()["problems"]
    assert (problem["field"], message in problem["message"]) == ("name", True)


@pytest.mark.parametrize("name", ["a\u202eb", "a\r\nb", "a\u2028b", "a\ud800b", "\u200b"])
def test_rejects_unreadable_notes_files_and_urls(staff: User, owner: User, api: Api, name: str) -> None:
    Project.objects.create(name="team")
    files = [{"name": "r0.json", "size": 1}]
    for who, path, body, pointer in (
        (staff, "join-tokens", {"note": name}, "/note"),
        (staff, "projects/team/invitations", {"role": "viewer", "note": name}, "/note"),
        (owner, "imports", {"name": name, "files": files}, "/name"),
        (owner, "imports", {"files": [{"name": name, "size": 1}]}, "/files/0/name"),
        (owner, "projects/default/webhooks", {"name": "x", "url": f"https://hooks.example/{name}"}, "/url"),
    ):
        if pointer == "/url" and name == "\u200b":
            continue  # The rest of the URL is visible.
        response = api(who).post(f"/api/v1/{path}", json.dumps(body), content_type="application/json")
        assert response.status_code == 422, (path, response.content)
        assert [error["pointer"] for error in response.json()["errors"]] == [pointer], path


def test_note_can_be_empty(staff: User, api: Api) -> None:
    assert api(staff).post("/api/v1/join-tokens", {"note": ""}, format="json").status_code == 201


def test_accepts_readable_names() -> None:
    assert [find_name_problem(name) for name in VALID_NAMES] == [""] * len(VALID_NAMES)


def test_content_length_includes_escaped_names(owner: User, client: Client) -> None:
    """Escapes make the page longer, so Content-Length must be computed after them."""
    job = actions.submit(owner, GOOD)[0]
    Job.objects.filter(id=job.id).update(name="a\u202eb")
    client.force_login(owner)
    for path in ("/", f"/jobs/{job.id}/"):
        page = client.get(path)
        assert "a\\u202eb" in page.content.decode()
        assert int(page.headers["Content-Length"]) == len(page.content), path


def test_reads_old_names_and_removes_old_tags(owner: User, api: Api) -> None:
    job = actions.submit(owner, GOOD)[0]
    Job.objects.filter(id=job.id).update(name="a\u202eb", spec={**job.spec, "name": "a\u202eb"})
    JobTag.objects.create(job=job, name="\u200b")
    assert api(owner).get(f"/api/v1/jobs/{job.id}").json()["name"] == "a\u202eb"
    changed = api(owner).patch(f"/api/v1/jobs/{job.id}", {"remove_tags": ["\u200b"]}, format="json")
    assert (changed.status_code, changed.json()["tags"]) == (200, [])
