"""Concurrent sign-ons of one user, and of users with the same name, with PostgreSQL."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from allauth.socialaccount.models import SocialAccount
from django.contrib.auth.models import User
from django.test import Client

from jobs.models import AuditEntry
from jobs.people.sign_on import SignOnAdapter
from tests.jobs.conftest import run_together
from tests.jobs.people.oidc_providers import FakeProvider, get_connect_proof, is_logged_in
from tests.support.postgres import postgres_server, use_database
from tests.support.processes import scale_timeout

NUM_CLIENTS = 3


@pytest.fixture(scope="module")
def postgres(django_db_blocker: Any) -> Iterator[None]:
    with django_db_blocker.unblock(), postgres_server() as url, use_database(url):
        yield


# Overrides the fixture of conftest.py, which uses the default test database.
@pytest.fixture(autouse=True)
def _default() -> None:
    pass


@pytest.fixture
def barrier(postgres: None) -> Iterator[threading.Barrier]:
    yield threading.Barrier(NUM_CLIENTS)
    User.objects.all().delete()


@pytest.fixture
def no_account(barrier: threading.Barrier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all concurrent sign-ons find no account before one creates it."""

    def found(*_: Any) -> bool:
        barrier.wait(scale_timeout(20))
        return True

    monkeypatch.setattr(SignOnAdapter, "is_open_for_signup", found)


def finish_sign_ons(clients: list[Client], query: Callable[[Client], str] = lambda _: "") -> list[Any]:
    """Finish the sign-ons of several browsers at once.

    One browser would not do, because the first callback removes the state that the others need.
    """
    responses: list[Any] = []

    def finish(client: Client, state: str) -> None:
        responses.append(client.get("/login/oidc/board/login/callback/", {"code": "c", "state": state}))

    calls = []
    for client in clients:
        away = client.get(f"/login/oidc/board/login/{query(client)}").headers["Location"]
        calls.append(partial(finish, client, parse_qs(urlsplit(away).query)["state"][0]))
    run_together(calls)
    return responses


def test_concurrent_first_sign_ons_create_one_account(no_account: None, answers: FakeProvider) -> None:
    clients = [Client() for _ in range(NUM_CLIENTS)]
    before = AuditEntry.objects.filter(what="sign on").count()
    responses = finish_sign_ons(clients)
    assert [answer.headers["Location"] for answer in responses] == ["/"] * NUM_CLIENTS
    assert all(is_logged_in(each) for each in clients)
    assert [one.user for one in SocialAccount.objects.all()] == list(User.objects.all())
    assert AuditEntry.objects.filter(what="sign on").count() == before + 1


def test_users_with_one_name_get_separate_accounts(
    no_account: None, answers: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    subjects = itertools.count()
    local = threading.local()

    def invent_claims(original: dict[str, Any]) -> dict[str, Any]:
        local.subject = getattr(local, "subject", None) or f"s{next(subjects)}"
        return {"sub": local.subject, "preferred_username": "ann", "given_name": "Ann"}

    monkeypatch.setattr("jobs.people.sign_on.parse_claims", invent_claims)
    clients = [Client() for _ in range(NUM_CLIENTS)]
    finish_sign_ons(clients)
    assert all(is_logged_in(each) for each in clients)
    assert len({one.user for one in SocialAccount.objects.all()}) == User.objects.count() == NUM_CLIENTS


def test_concurrent_connections_create_one(
    barrier: threading.Barrier, answers: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = SignOnAdapter.pre_social_login

    def wait_after_check(*responses: Any) -> None:
        check(*responses)
        barrier.wait(scale_timeout(20))

    monkeypatch.setattr(SignOnAdapter, "pre_social_login", wait_after_check)
    User.objects.create_user("owner", password="owner-password")
    clients = [Client() for _ in range(NUM_CLIENTS)]
    for each in clients:
        each.post("/login/", {"username": "owner", "password": "owner-password"})
        each.post("/login/again/", {"password": "owner-password"})
    responses = finish_sign_ons(clients, lambda each: f"?process=connect&proof={get_connect_proof(each)}")
    assert [answer.headers["Location"] for answer in responses] == ["/account/"] * NUM_CLIENTS
    assert SocialAccount.objects.get().user.username == "owner"
