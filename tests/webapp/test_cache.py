"""The cache reads values from Redis as data and never executes code in them."""

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
from webapp.json_cache import JsonCache


class Runs:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def cache(redis_service: RedisServer) -> JsonCache:
    return JsonCache(redis_service.url, {})


def test_does_not_load_a_pickle_from_redis(cache: JsonCache, redis_service: RedisServer, tmp_path: Path) -> None:
    """A host knows the Redis password, so it could otherwise run code in the web server."""
    redis_service.client().set(":1:join:127.0.0.1", pickle.dumps(Runs(tmp_path / "ran")))
    assert cache.get("join:127.0.0.1", []) == []
    assert not (tmp_path / "ran").exists()


def test_reads_cached_values_back(cache: JsonCache) -> None:
    for value in (0, 7, True, None, "y", 1.5, [1.5, 2.5], {"a": [1]}):
        cache.set("a", value)
        assert (cache.get("a", "none"), type(cache.get("a", "none"))) == (value, type(value))
    cache.set("n", 1)
    assert cache.incr("n") == 2
    assert cache.add("n", "y") is False


def test_settings_use_the_json_cache() -> None:
    assert webapp.settings.CACHES["default"]["BACKEND"] == "webapp.json_cache.JsonCache"


def test_admin_search_works_from_the_cache(admin_user: User, redis_service: RedisServer, settings: Any) -> None:
    settings.CACHES = {"default": {"BACKEND": "webapp.json_cache.JsonCache", "LOCATION": redis_service.url}}
    client = Client()
    client.force_login(admin_user, backend="django.contrib.auth.backends.ModelBackend")
    first, second = (client.get("/admin/search/", {"s": "host"}).content.decode() for _ in range(2))
    assert "/admin/jobs/host/" in first
    assert "/admin/jobs/host/" in second
