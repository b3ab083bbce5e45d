"""Provide an opened run and a real Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.core.cache import cache

from tests.jobs.reporting.nodes import Api, Node
from tests.support.processes import RedisServer, run_redis


@pytest.fixture(scope="module")
def one_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with run_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def live_redis(one_redis: RedisServer, settings: Any) -> Iterator[redis.Redis]:
    """Return a client of an empty Redis that the settings name."""
    settings.REDIS_URL = one_redis.url
    client = one_redis.client()
    client.flushall()
    yield client
    client.close()


@pytest.fixture(autouse=True)
def _fresh_counts() -> None:
    cache.clear()  # submits of a minute are counted


@pytest.fixture
def open_run(owner: User, api: Api, live_redis: redis.Redis) -> Callable[..., Any]:
    def opened(**asked: Any) -> Any:
        answer = api(owner).post("/api/v1/runs", {"world_size": 2, "name": "by hand", **asked}, format="json")
        assert answer.status_code == 201, answer.json()
        return answer.json()

    return opened


@pytest.fixture
def node(open_run: Callable[..., Any]) -> Node:
    """Return the only node of a run, which has joined."""
    told = open_run()
    made = Node(told["run"], told["token"])
    assert made.join("gpu-7").status_code == 200
    return made
