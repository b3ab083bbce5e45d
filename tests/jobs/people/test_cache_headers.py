"""Cache headers of responses with private data."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.contrib.auth.models import User
from django.test import Client
from rest_framework.test import APIClient

from jobs.queue import actions
from tests.planner.wrong_specs import GOOD

Api = Callable[[User | None], APIClient]
NO_STORE = "private, no-store"


def make_token_client(client: APIClient) -> APIClient:
    token = client.post("/api/v1/tokens", {"name": "a", "scopes": ["read"]}, format="json").json()["token"]
    return APIClient(headers={"Authorization": f"Token {token}"})


@pytest.mark.parametrize(
    "path", ["tokens", "hosts", "queue", "notifications", "jobs/nosuchjob", "jobs/{job}/checkpoints"]
)
def test_rest_responses_are_not_stored(owner: User, client: Client, api: Api, path: str) -> None:
    job = actions.submit(owner, GOOD)[0].id
    client.force_login(owner)
    for requester in (client, make_token_client(api(owner))):
        assert requester.get(f"/api/v1/{path.format(job=job)}")["Cache-Control"] == NO_STORE


@pytest.mark.parametrize("path", ["/", "/overview/", "/account/", "/queue/", "/jobs/new/", "/queue/audit/export/"])
def test_pages_are_not_stored(admin_user: User, client: Client, path: str) -> None:
    client.force_login(admin_user)
    response = client.get(path)
    assert (response.status_code, response["Cache-Control"]) == (200, NO_STORE)


def test_response_can_set_another_cache_header(owner: User, client: Client) -> None:
    client.force_login(owner)
    response = client.get("/api/v1/jobs")
    assert response["Cache-Control"] == "private, no-cache"
    assert client.get("/api/v1/jobs", headers={"If-None-Match": response["ETag"]}).status_code == 304


def test_anonymous_responses_have_no_cache_header() -> None:
    assert "no-store" not in Client().get("/api/v1/jobs").headers.get("Cache-Control", "")
