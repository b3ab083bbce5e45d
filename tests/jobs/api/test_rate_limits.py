"""Rate limits of requests and submissions, and headers of deprecated parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.cache import cache
from redis.exceptions import ConnectionError as AwayError
from rest_framework.test import APIClient

from jobs.api import access
from jobs.models import Job
from tests.planner.wrong_specs import GOOD

Api = Callable[[User | None], APIClient]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    cache.clear()
    access._cache_retry_at = 0.0
    yield
    access._cache_retry_at = 0.0


def test_limits_requests_per_token(owner: User, api: Api, settings: Any) -> None:
    settings.REQUESTS_PER_MINUTE = 5
    client, other = api(owner), api(owner)

    def exceed_limit() -> Any:
        codes = [client.get("/api/v1/presets").status_code for _ in range(6)]
        refused = client.get("/api/v1/jobs")
        return refused if (codes[-1], refused.status_code) == (429, 429) else None

    refused = exceed_limit() or exceed_limit()  # A new minute can start once between the requests.
    assert refused
    assert (refused.status_code, refused["Content-Type"]) == (429, "application/problem+json")
    assert 1 <= int(refused["Retry-After"]) <= 60
    assert other.get("/api/v1/presets").status_code == 200, "each token of a user has its own count"


def test_limits_submissions_per_user(owner: User, api: Api, settings: Any) -> None:
    settings.SUBMITS_PER_MINUTE, settings.REQUESTS_PER_MINUTE = 2, 1000
    codes = [api(owner).post("/api/v1/jobs", GOOD, format="json").status_code for _ in range(6)]
    assert 429 in codes
    assert api(owner).get("/api/v1/jobs").status_code == 200


def test_no_limits_while_the_cache_is_unreachable(
    owner: User, api: Api, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.REQUESTS_PER_MINUTE = 1
    tries = []

    def fail(*_: Any, **__: Any) -> None:
        tries.append(1)
        raise AwayError("away")

    monkeypatch.setattr(cache, "add", fail)
    client = api(owner)
    assert {client.get("/api/v1/presets").status_code for _ in range(5)} == {200}
    assert len(tries) == 1


def test_deprecated_parameter_adds_headers(owner: User, api: Api, make_jobs: Callable[..., list[Job]]) -> None:
    make_jobs(3)
    client = api(owner)
    plain = client.get("/api/v1/jobs?limit=2")
    assert "Deprecation" not in plain
    deprecated = client.get("/api/v1/jobs?limit=2&offset=0")
    assert deprecated["Deprecation"] == "@1795305600"
    assert deprecated["Sunset"] == "Mon, 22 Nov 2027 00:00:00 GMT"
    assert 'rel="next", <' in deprecated["Link"]
    assert 'rel="deprecation"' in deprecated["Link"]
    document = client.get("/api/v1/schema").json()
    (offset,) = (one for one in document["paths"]["/api/v1/jobs"]["get"]["parameters"] if one["name"] == "offset")
    assert offset["deprecated"] is True
