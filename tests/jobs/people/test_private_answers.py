"""What was answered to somebody is kept by nobody else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.contrib.auth.models import User
from django.test import Client
from rest_framework.test import APIClient

from jobs.queue import actions
from tests.planner.wrong_specs import GOOD

Api = Callable[[User | None], APIClient]
STORED_NOWHERE = "private, no-store"


def token_of(client: APIClient) -> APIClient:
    made = client.post("/api/v1/tokens", {"name": "a", "scopes": ["read"]}, format="json").json()["token"]
    return APIClient(headers={"Authorization": f"Token {made}"})


@pytest.mark.parametrize(
    "path", ["tokens", "hosts", "queue", "notifications", "jobs/nosuchjob", "jobs/{job}/checkpoints"]
)
def test_an_answer_of_rest_is_stored_nowhere(owner: User, client: Client, api: Api, path: str) -> None:
    job = actions.submit(owner, GOOD)[0].id
    client.force_login(owner)
    for asks in (client, token_of(api(owner))):
        assert asks.get(f"/api/v1/{path.format(job=job)}")["Cache-Control"] == STORED_NOWHERE


@pytest.mark.parametrize("path", ["/", "/overview/", "/account/", "/queue/", "/jobs/new/", "/queue/audit/export/"])
def test_nor_is_a_page(admin_user: User, client: Client, path: str) -> None:
    client.force_login(admin_user)
    answer = client.get(path)
    assert (answer.status_code, answer["Cache-Control"]) == (200, STORED_NOWHERE)


def test_what_says_otherwise_is_left(owner: User, client: Client) -> None:
    client.force_login(owner)
    listed = client.get("/api/v1/jobs")
    assert listed["Cache-Control"] == "private, no-cache"
    assert client.get("/api/v1/jobs", headers={"If-None-Match": listed["ETag"]}).status_code == 304


def test_who_does_not_say_who_they_are_has_nothing_private() -> None:
    assert "no-store" not in Client().get("/api/v1/jobs").headers.get("Cache-Control", "")
