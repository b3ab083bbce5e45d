"""Users, a real Redis behind the settings, and hosts that spoke up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
import redis
from django.contrib.auth.models import User
from django.utils import timezone
from knox.models import AuthToken
from rest_framework.test import APIClient

from contracts.control import VERSION
from contracts.names import EVENTS_STREAM
from jobs.models import Host
from tests.support.postgres import postgres
from tests.support.processes import RedisServer, redis_server
from tests.support.web import Site, site


@pytest.fixture
def live_redis(redis_service: RedisServer, settings: Any) -> Iterator[redis.Redis]:
    settings.REDIS_URL = redis_service.url
    client = redis_service.client()
    yield client
    client.close()


@pytest.fixture
def owner(db: None) -> User:
    return User.objects.create_user("owner", password="owner-password")


@pytest.fixture
def stranger(db: None) -> User:
    return User.objects.create_user("stranger", password="stranger-password")


@pytest.fixture
def staff(db: None) -> User:
    return User.objects.create_user("staff", password="staff-password", is_staff=True)


@pytest.fixture
def api() -> Callable[[User | None], APIClient]:
    def client_of(user: User | None) -> APIClient:
        client = APIClient()
        if user is not None:
            _, token = AuthToken.objects.create(user)
            client.credentials(HTTP_AUTHORIZATION=f"Token {token}")
        return client

    return client_of


@pytest.fixture
def make_host(db: None) -> Callable[..., Host]:
    def make(name: str = "host-a", slots: int = 4) -> Host:
        return Host.objects.create(
            name=name,
            slots=slots,
            device="cpu",
            device_name="test",
            memory_bytes=2**30,
            boot_id="b",
            last_seen=timezone.now(),
        )

    return make


def say(client: redis.Redis, event: dict[str, Any]) -> None:
    """What a host or supervisor would put on the events stream."""
    client.xadd(EVENTS_STREAM, {"b": msgpack.packb(event)})


def host_event(name: str = "host-a", slots: int = 4, attempts: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {
        "kind": "host",
        "v": VERSION,
        "host": name,
        "boot_id": "b",
        "time": 0.0,
        "slots": slots,
        "device": "cpu",
        "device_name": "test",
        "memory_bytes": 2**30,
        "attempts": attempts or [],
    }


def attempt_event(
    job: str, attempt: int, state: str, outcome: str | None = None, host: str = "host-a"
) -> dict[str, Any]:
    report: dict[str, Any] = {"job": job, "attempt": attempt, "state": state}
    if outcome is not None:
        report["exit"] = {"outcome": outcome, "reason": f"it {outcome}", "log_tail": [], "summary": None}
    return {"kind": "attempt", "v": VERSION, "host": host, "time": 0.0, "report": report}


@pytest.fixture(scope="session")
def postgres_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The web server as it is deployed: PostgreSQL, Redis, every bound. Shared: tests leave it standing."""
    folder = tmp_path_factory.mktemp("site")
    with postgres() as url, redis_server(folder / "redis") as redis, site(url, redis, folder / "web") as made:
        yield made
