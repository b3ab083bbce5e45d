"""How often one may ask, and what is said of what goes."""

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


def test_a_token_that_asks_too_often_is_told_when_to_come_back(owner: User, api: Api, settings: Any) -> None:
    settings.REQUESTS_PER_MINUTE = 5
    client, other = api(owner), api(owner)

    def asked_often() -> Any:
        codes = [client.get("/api/v1/presets").status_code for _ in range(6)]
        refused = client.get("/api/v1/jobs")
        return refused if (codes[-1], refused.status_code) == (429, 429) else None

    refused = asked_often() or asked_often()  # the minute may be over meanwhile, and not twice
    assert refused
    assert (refused.status_code, refused["Content-Type"]) == (429, "application/problem+json")
    assert 1 <= int(refused["Retry-After"]) <= 60
    assert other.get("/api/v1/presets").status_code == 200, "another token of the same user is counted apart"


def test_submits_are_counted_apart_and_by_user(owner: User, api: Api, settings: Any) -> None:
    settings.SUBMITS_PER_MINUTE, settings.REQUESTS_PER_MINUTE = 2, 1000
    codes = [api(owner).post("/api/v1/jobs", GOOD, format="json").status_code for _ in range(6)]
    assert 429 in codes
    assert api(owner).get("/api/v1/jobs").status_code == 200


def test_while_the_cache_is_away_everything_is_answered_and_it_is_not_asked_again_at_once(
    owner: User, api: Api, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.REQUESTS_PER_MINUTE = 1
    tries = []

    def away(*_: Any, **__: Any) -> None:
        tries.append(1)
        raise AwayError("away")

    monkeypatch.setattr(cache, "add", away)
    client = api(owner)
    assert {client.get("/api/v1/presets").status_code for _ in range(5)} == {200}
    assert len(tries) == 1


def test_what_goes_says_so_where_it_is_used(owner: User, api: Api, make_jobs: Callable[..., list[Job]]) -> None:
    make_jobs(3)
    client = api(owner)
    usual = client.get("/api/v1/jobs?limit=2")
    assert "Deprecation" not in usual
    used = client.get("/api/v1/jobs?limit=2&offset=0")
    assert used["Deprecation"] == "@1795305600"
    assert used["Sunset"] == "Mon, 22 Nov 2027 00:00:00 GMT"
    assert 'rel="next", <' in used["Link"]
    assert 'rel="deprecation"' in used["Link"]
    document = client.get("/api/v1/schema").json()
    (offset,) = (one for one in document["paths"]["/api/v1/jobs"]["get"]["parameters"] if one["name"] == "offset")
    assert offset["deprecated"] is True
