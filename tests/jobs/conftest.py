"""Fixtures and helpers: users, Redis, hosts, events of hosts, a web server, and a mail server."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from email.message import EmailMessage
from typing import Any

import msgpack
import psycopg
import pytest
import redis
from aiosmtpd.controller import Controller as SmtpServer
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.utils import timezone
from knox.models import AuthToken
from rest_framework.test import APIClient

from contracts.control import VERSION
from contracts.names import events_stream
from contracts.security import build_signed_entry
from jobs.core.credentials import derive_signing_keys
from jobs.models import Attempt, Host, Job, Member
from jobs.queue import actions
from tests.jobs.mail_server import MailStore
from tests.planner.wrong_specs import GOOD
from tests.support.processes import RedisServer, run_redis
from tests.support.web import Site, run_site
from webapp.runner import find_free_port


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
    """Create a staff user with every right on jobs and hosts."""
    made = User.objects.create_user("staff", password="staff-password", is_staff=True)
    made.user_permissions.set(Permission.objects.filter(content_type__app_label="jobs"))
    return made


@pytest.fixture
def viewer(db: None) -> User:
    """Create a staff user who can only view jobs and hosts."""
    made = User.objects.create_user("viewer", password="viewer-password", is_staff=True)
    made.user_permissions.set(Permission.objects.filter(codename__in=("view_job", "view_host")))
    return made


@pytest.fixture
def api() -> Callable[[User | None], APIClient]:
    def make_client(user: User | None) -> APIClient:
        client = APIClient()
        if user is not None:
            _, token = AuthToken.objects.create(user)
            client.credentials(HTTP_AUTHORIZATION=f"Token {token}")
        return client

    return make_client


@pytest.fixture
def make_jobs(owner: User) -> Callable[..., list[Job]]:
    """Return a function that creates several jobs with the values of a submitted job."""

    def made(count: int, **changed: Any) -> list[Job]:
        first, _ = actions.submit(owner, GOOD)
        values = {name: getattr(first, name) for name in ("spec", "kind", "device", "num_slots", "estimate")}
        names = [f"run {number}" for number in range(count)]
        first.delete()
        return Job.objects.bulk_create([Job(**{**values, "owner": owner, "name": name, **changed}) for name in names])

    return made


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


def make_member(attempt: Attempt, host: Host) -> Member:
    """Create the only member of an attempt, with all ranks."""
    return Member.objects.create(
        attempt=attempt,
        node=0,
        host=host,
        host_name=host.name,
        first_rank=0,
        num_ranks=attempt.job.num_slots,
        ordered=timezone.now(),
    )


def send_event(client: redis.Redis, event: dict[str, Any]) -> None:
    """Add an event to the stream of its host, as a host worker or a supervisor does."""
    client.xadd(events_stream(event.get("host", "host-a")), sign_event(event))


def sign_event(event: dict[str, Any]) -> Any:
    """Return the signed stream entry of an event, and create its host if it is unknown."""
    name = event.get("host", "host-a")
    fields = {"slots": 1, "device": "cpu", "device_name": "", "memory_bytes": 0, "boot_id": "b"}
    host, _ = Host.objects.get_or_create(name=name, defaults={**fields, "last_seen": timezone.now()})
    if host.generation == 0:
        Host.objects.filter(pk=host.pk).update(generation=1)
    return build_signed_entry(
        bytes.fromhex(derive_signing_keys(name, max(1, host.generation))[0]), msgpack.packb(event)
    )


_sequence = itertools.count(1)


def host_event(name: str = "host-a", slots: int = 4, attempts: Any = (), **changes: Any) -> dict[str, Any]:
    """Build a heartbeat that is newer than all earlier ones."""
    return {
        "kind": "host",
        "v": VERSION,
        "host": name,
        "boot_id": "b",
        "incarnation": "first",
        "began": 1.0,
        "sequence": next(_sequence),
        "time": 0.0,
        "slots": slots,
        "device": "cpu",
        "device_name": "test",
        "memory_bytes": 2**30,
        "attempts": list(attempts),
        **changes,
    }


def attempt_event(
    job: str, attempt: int, state: str, outcome: str | None = None, host: str = "host-a"
) -> dict[str, Any]:
    return {
        "kind": "attempt",
        "v": VERSION,
        "host": host,
        "time": 0.0,
        "report": report(job, attempt, state, outcome),
    }


def report(job: str, attempt: int, state: str, outcome: str | None = None, **changes: Any) -> dict[str, Any]:
    """Build the report of a host about an attempt."""
    fields: dict[str, Any] = {"job": job, "attempt": attempt, "state": state, "slots": [0, 1, 2, 3], **changes}
    if outcome is not None:
        fields["exit"] = {
            "v": VERSION,
            "job": job,
            "attempt": attempt,
            "outcome": outcome,
            "reason": f"it {outcome}",
            "exit_code": 0,
            "rank": None,
            "signal": None,
            "log_tail": [],
            "started": 0.0,
            "finished": 1.0,
            "summary": None,
        }
    return fields


def run_together(calls: list[Callable[[], Any]]) -> None:
    """Run the calls in threads that start at one signal; raise what any of them raised."""
    gate = threading.Barrier(len(calls))
    errors: list[BaseException] = []

    def run(call: Callable[[], Any]) -> None:
        gate.wait()
        try:
            call()
        except BaseException as error:
            errors.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.fixture(scope="session")
def postgres_site(postgres_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Run the web server with PostgreSQL and Redis as deployed, once for all tests."""
    folder = tmp_path_factory.mktemp("site")
    with psycopg.connect(postgres_url, autocommit=True) as server:
        server.execute("CREATE DATABASE site")
    url = postgres_url.rpartition("/")[0] + "/site"
    with run_redis(folder / "redis") as redis, run_site(url, redis, folder / "web") as made:
        yield made


@pytest.fixture
def inbox(settings: Any, db: None) -> Iterator[list[EmailMessage]]:
    handler, port = MailStore(), find_free_port()
    server = SmtpServer(handler, hostname="127.0.0.1", port=port)
    server.start()
    settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
    settings.EMAIL_HOST, settings.EMAIL_PORT, settings.EMAIL_USE_TLS = "127.0.0.1", port, False
    settings.BOARD_URL = "https://board.example"
    settings.DEFAULT_FROM_EMAIL = "meshboard@board.example"
    yield handler.mails
    server.stop()
