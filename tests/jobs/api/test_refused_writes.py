"""A read-only PostgreSQL, and a Redis that refuses writes: reads are answered, and writes get 503."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import redis
from django.contrib import admin
from django.contrib.auth.models import User
from django.db import DatabaseError, connection
from django.test import Client
from django.urls import URLResolver, get_resolver, reverse
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
STREAMS = ("api-events", "api-wait")  # wait until the job ends


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
    settings.REQUESTS_PER_MINUTE = settings.SUBMITS_PER_MINUTE = 1_000_000  # a walk is faster than a user
    return User.objects.create_superuser("root", password="root-password")


class Walk:
    """Requests to every page and REST route, and their answers while all services work."""

    def __init__(self, client: Client, values: dict[str, str]) -> None:
        self._client, self._addresses = client, sorted(set(_list_addresses(get_resolver(), values)))
        self._usual = {address: self._get(address).status_code for address in self._addresses}
        assert [address for address, status in self._usual.items() if status >= 500] == []
        self.num_working = sum(status == 200 for status in self._usual.values())

    def list_failed_reads(self) -> list[tuple[str, int]]:
        """Return reads that usually have content, and now neither have content nor a later time to try again."""
        answers = [(address, self._get(address)) for address, status in self._usual.items() if status == 200]
        return [(address, one.status_code) for address, one in answers if one.status_code != 200 and not _is_503(one)]

    def list_failed_writes(self) -> list[tuple[str, int]]:
        """Return empty forms that are answered with an internal error."""
        answers = [(address, self._client.post(address)) for address in self._addresses if "logout" not in address]
        return [(address, one.status_code) for address, one in answers if one.status_code >= 500 and not _is_503(one)]

    def _get(self, address: str) -> Any:
        return self._client.get(address)


def _is_503(answer: Any) -> bool:
    return answer.status_code == 503 and "Retry-After" in answer.headers


def _list_addresses(resolver: URLResolver, values: dict[str, str], before: str = "/") -> Iterator[str]:
    """Yield the address of each route whose parameters have values, and the pages of a row of each admin table."""
    for entry in resolver.url_patterns:
        part = re.sub(r"<(?:\w+:)?(\w+)>", lambda match: values.get(match[1], match[0]), str(entry.pattern))
        if isinstance(entry, URLResolver):
            yield from _list_addresses(entry, values, before + part)
        elif not re.search(r"[<>^\\]", before + part) and entry.name not in STREAMS:
            yield before + part
    if before == "/":
        for model in admin.site._registry:
            row = model._base_manager.first()
            for page in ("change", "delete", "history") if row else ():
                yield reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_{page}", args=[row.pk])


def list_values(job: Job) -> dict[str, str]:
    return {
        "job_id": job.id,
        "name": "host-a",
        "project": "default",
        "table": "steps",
        "attempt": "1",
        "node": "0",
        "rank": "0",
        "user": "root",
        "run": job.id,
    }


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


def refuse_redis_writes(client: redis.Redis, cause: str) -> None:
    if cause == "full":
        client.config_set("maxmemory", "1kb")
    else:
        client.replicaof("127.0.0.1", "1")


@pytest.mark.parametrize("cause", ["full", "replica"])
def test_redis_that_refuses_writes(board: User, redis_service: RedisServer, client: Client, cause: str) -> None:
    client.raise_request_exception = False
    redis_client: redis.Redis = redis_service.client()
    before = client.get("/readyz").json()
    refuse_redis_writes(redis_client, cause)
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


@pytest.mark.extended
@pytest.mark.parametrize("cause", ["database", "full", "replica"])
def test_every_page_and_route_while_writes_are_refused(
    board: User,
    make_host: Callable[..., Host],
    read_only: Callable[[], None],
    redis_service: RedisServer,
    client: Client,
    cause: str,
) -> None:
    client.raise_request_exception = False
    make_host()
    job, _ = actions.submit(board, GOOD)
    client.force_login(board)
    walk = Walk(client, list_values(job))
    assert walk.num_working > 60
    if cause == "database":
        read_only()
    else:
        refuse_redis_writes(redis_service.client(), cause)
    assert walk.list_failed_reads() == []
    assert walk.list_failed_writes() == []
