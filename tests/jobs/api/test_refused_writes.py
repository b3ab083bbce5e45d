"""A read-only PostgreSQL, and a Redis that refuses writes: reads are answered, and writes get 503."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import redis
from django.contrib.auth.models import User
from django.db import DatabaseError, connection
from django.test import Client
from knox.models import AuthToken
from rest_framework.test import APIClient

from jobs.models import Host, Job, Lease, TokenGrant
from jobs.people.tokens import ALL_SCOPES
from jobs.queue import actions
from jobs.queue.inbound.event_handlers import is_transient
from tests.planner.wrong_specs import GOOD
from tests.support.processes import RedisServer

PASSWORDS = {"old_password": "root-password", "new_password1": "x7-fresh-pony", "new_password2": "x7-fresh-pony"}
PAGES = ("/", "/jobs/", "/hosts/", "/planner/", "/account/", "/jobs/new/")


@pytest.fixture
def read_only() -> Iterator[Callable[[], None]]:
    """Return a function that makes the database read-only until the end of the test."""
    name = connection.settings_dict["NAME"]

    def set_read_only(value: str) -> None:
        connection.close()
        with connection.cursor() as cursor:
            cursor.execute("SET default_transaction_read_only = off")
            cursor.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = {value}")
        connection.close()

    yield lambda: set_read_only("on")
    set_read_only("off")


@pytest.fixture
def board(postgres: None, redis_service: RedisServer, settings: Any) -> User:
    settings.REDIS_URL = redis_service.url
    return User.objects.create_superuser("root", password="root-password")


def test_read_only_database(
    board: User, make_host: Callable[..., Host], read_only: Callable[[], None], client: Client
) -> None:
    client.raise_request_exception = False
    make_host()
    job, _ = actions.submit(board, GOOD)
    token, secret = AuthToken.objects.create(board)
    TokenGrant.objects.create(token=token, scopes=list(ALL_SCOPES))
    user = APIClient(raise_request_exception=False)
    user.credentials(HTTP_AUTHORIZATION=f"Token {secret}")
    client.force_login(board)
    schema = user.get("/api/v1/schema").json()
    TokenGrant.objects.update(last_used=None)
    read_only()

    values = {"{job_id}": job.id, "{name}": "host-a"}
    for path, operations in schema["paths"].items():
        address = path
        for parameter, value in values.items():
            address = address.replace(parameter, value)
        if "get" in operations:
            assert user.get(address).status_code < 500, address
        for method in operations.keys() & {"post", "put", "patch", "delete"}:
            status = getattr(user, method)(address, {}, format="json").status_code
            assert status < 500 or status == 503, (method, address)
    assert TokenGrant.objects.get().last_used is None
    refused = user.post("/api/v1/jobs", GOOD, format="json")
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
    assert refused.json()["detail"] == "The database is read-only, so Meshboard rejects changes."

    for page in PAGES:
        assert client.get(page).status_code < 400, page
    for page, body in (("/account/password/", PASSWORDS), (f"/jobs/{job.id}/cancel/", {})):
        page_refused = client.post(page, body)
        assert (page_refused.status_code, page_refused.headers["Retry-After"]) == (503, "5"), page
        assert "The database is read-only, so Meshboard rejects changes." in page_refused.content.decode()
    login = Client(raise_request_exception=False).post("/login/", {"username": "root", "password": "root-password"})
    assert login.status_code == 503
    assert Job.objects.get().status == job.status

    ready = client.get("/readyz")
    assert (ready.status_code, ready.json()["database_writes"], ready.json()["redis_writes"]) == (503, False, True)
    assert client.get("/healthz").status_code == 200
    with pytest.raises(DatabaseError) as caught:
        Lease.objects.create(name="x")
    assert isinstance(caught.value.__cause__, psycopg.errors.ReadOnlySqlTransaction)
    assert is_transient(caught.value), "an event is applied later instead of becoming a dead letter"


@pytest.mark.parametrize("cause", ["full", "replica"])
def test_redis_that_refuses_writes(board: User, redis_service: RedisServer, client: Client, cause: str) -> None:
    client.raise_request_exception = False
    redis_client: redis.Redis = redis_service.client()
    before = client.get("/readyz").json()
    if cause == "full":
        redis_client.config_set("maxmemory", "1kb")
    else:
        redis_client.replicaof("127.0.0.1", "1")
    ready = client.get("/readyz")
    assert (ready.status_code, ready.json()) == (503, {**before, "redis_writes": False})
    assert before["redis_writes"]
    assert client.get("/healthz").status_code == 200
    client.force_login(board)
    user = APIClient(raise_request_exception=False)
    user.force_authenticate(board)
    assert user.post("/api/v1/jobs", GOOD, format="json").status_code == 201, "the outbox keeps commands to hosts"
    for path, operations in user.get("/api/v1/schema").json()["paths"].items():
        for method in operations:
            status = getattr(user, method)(path, *([{}] if method != "get" else []), format="json").status_code
            assert status < 500 or status == 503, (method, path)
    for page in PAGES:
        assert client.get(page).status_code < 400, page
