"""The cache: what stands in Redis is read, and never carried out."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

import webapp.settings
from tests.support.processes import RedisServer
from webapp.cached import JsonCache


class Runs:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def cache(redis_service: RedisServer) -> JsonCache:
    return JsonCache(redis_service.url, {})


def test_a_pickle_in_redis_is_not_obeyed(cache: JsonCache, redis_service: RedisServer, tmp_path: Path) -> None:
    """Whoever could write to Redis ran what he liked in the web: on a board whose hosts share its password, a host."""
    redis_service.client().set(":1:join:127.0.0.1", pickle.dumps(Runs(tmp_path / "ran")))
    assert cache.get("join:127.0.0.1", []) == []
    assert not (tmp_path / "ran").exists()


def test_what_is_kept_is_read_back(cache: JsonCache) -> None:
    for value in (0, 7, True, None, "y", 1.5, [1.5, 2.5], {"a": [1]}):
        cache.set("a", value)
        assert (cache.get("a", "none"), type(cache.get("a", "none"))) == (value, type(value))
    cache.set("n", 1)
    assert cache.incr("n") == 2
    assert cache.add("n", "y") is False


def test_the_board_s_own_cache_is_this_one() -> None:
    assert webapp.settings.CACHES["default"]["BACKEND"] == "webapp.cached.JsonCache"


def test_the_admin_s_search_finds_the_same_the_second_time(
    admin_user: User, redis_service: RedisServer, settings: Any
) -> None:
    settings.CACHES = {"default": {"BACKEND": "webapp.cached.JsonCache", "LOCATION": redis_service.url}}
    client = Client()
    client.force_login(admin_user, backend="django.contrib.auth.backends.ModelBackend")
    first, second = (client.get("/admin/search/", {"s": "host"}).content.decode() for _ in range(2))
    assert "/admin/jobs/host/" in first
    assert "/admin/jobs/host/" in second
