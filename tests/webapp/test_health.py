"""Health routes /healthz and /readyz report the state of database, Redis, migrations and controller, for any host
name.
"""

from __future__ import annotations

import time

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.db.migrations.recorder import MigrationRecorder
from django.test import Client
from django.utils import timezone
from pytest_django import Settings

from jobs.models import Lease
from tests.support.processes import RedisServer

AWAY = {"BACKEND": "webapp.json_cache.JsonCache", "LOCATION": "redis://127.0.0.1:1"}


@pytest.mark.django_db
def test_health_check_needs_no_login(client: Client, settings: Settings, redis_service: RedisServer) -> None:
    settings.REDIS_URL = redis_service.url
    settings.ALLOWED_HOSTS = ["board.example"]
    answer = client.get("/healthz", headers={"host": "10.0.0.7:8000"})
    assert (answer.status_code, answer.json()) == (200, {"database": True, "redis": True})
    redis_service.stop()
    answer = client.get("/healthz")
    assert (answer.status_code, answer.json()) == (503, {"database": True, "redis": False})


@pytest.mark.django_db
def test_reports_a_stalled_redis_within_a_second(
    client: Client, settings: Settings, redis_service: RedisServer
) -> None:
    settings.REDIS_URL = redis_service.url
    assert client.get("/healthz").status_code == 200
    with redis_service.suspend():
        requested = time.monotonic()
        answer = client.get("/healthz")
        took_s = time.monotonic() - requested
    assert (answer.status_code, answer.json()) == (503, {"database": True, "redis": False})
    assert took_s < 4, "one second, on a busy machine"


@pytest.mark.django_db(transaction=True)
def test_reports_an_unreachable_database(
    client: Client, settings: Settings, redis_service: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.REDIS_URL = redis_service.url
    connection.close()
    monkeypatch.setitem(connection.settings_dict, "NAME", "/nowhere/at/all.sqlite3")
    answer = client.get("/healthz")
    assert (answer.status_code, answer.json()) == (503, {"database": False, "redis": True})
    monkeypatch.undo()
    connection.close()


@pytest.mark.django_db(transaction=True)
def test_page_reports_an_unreachable_database(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page names a temporary outage, and no fault of the board."""
    client.raise_request_exception = False
    user = User.objects.create_user("ann")
    client.force_login(user)
    connection.close()
    monkeypatch.setitem(connection.settings_dict, "NAME", "/nowhere/at/all.sqlite3")
    answer = client.get("/account/")
    monkeypatch.undo()
    connection.close()
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
    assert "The database does not answer." in answer.content.decode()


@pytest.mark.django_db(transaction=True)
def test_page_reports_an_unreachable_redis(client: Client, settings: Settings) -> None:
    """The login page rejects passwords while it cannot count attempts."""
    client.raise_request_exception = False
    user = User.objects.create_user("ann", password="ann-password")
    client.force_login(user)
    settings.CACHES = {"default": {**settings.CACHES["default"], **AWAY}}
    answer = client.post("/account/password/", {"old_password": "ann-password"})
    assert answer.status_code == 503
    assert "Redis does not answer." in answer.content.decode()
    assert User.objects.get().check_password("ann-password")


@pytest.mark.django_db
def test_is_ready_with_migrations_and_a_controller(
    client: Client, settings: Settings, redis_service: RedisServer
) -> None:
    settings.REDIS_URL, settings.ALLOWED_HOSTS = redis_service.url, ["board.example"]
    names = ("database", "redis", "database_writes", "redis_writes", "migrations", "controller")
    well = dict.fromkeys(names, True)
    ready = "/readyz"
    assert (client.get(ready).status_code, client.get(ready).json()) == (503, {**well, "controller": False})
    Lease.objects.create(name="controller", holder="it", beats=1, ticked=timezone.now())
    assert (client.get(ready).status_code, client.get(ready).json()) == (200, well)
    applied = MigrationRecorder(connection).migration_qs.filter(app="jobs").order_by("name")
    MigrationRecorder(connection).record_applied("jobs", "9999_of_a_newer_version")
    assert client.get(ready).status_code == 200, "an older web server with a newer one"
    MigrationRecorder(connection).record_unapplied("jobs", applied[0].name)
    assert client.get(ready).json() == {**well, "migrations": False, "controller": False}
