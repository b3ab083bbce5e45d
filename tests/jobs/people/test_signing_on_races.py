"""A first sign-on that happens twice at once, and people who would be called alike, on a real PostgreSQL."""

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
from tests.jobs.people.providers import Answers, logged_in, proof
from tests.support.postgres import postgres_server, use_database
from tests.support.processes import scale_timeout

TOGETHER = 3


@pytest.fixture(scope="module")
def postgres(django_db_blocker: Any) -> Iterator[None]:
    with django_db_blocker.unblock(), postgres_server() as url, use_database(url):
        yield


# Overrides the conftest's, which asks for the other database.
@pytest.fixture(autouse=True)
def _default() -> None:
    pass


@pytest.fixture
def together(postgres: None) -> Iterator[threading.Barrier]:
    yield threading.Barrier(TOGETHER)
    User.objects.all().delete()


@pytest.fixture
def all_new(together: threading.Barrier, monkeypatch: pytest.MonkeyPatch) -> None:
    """All who come find that they have no account, before any gets one."""

    def found(*_: Any) -> bool:
        together.wait(scale_timeout(20))
        return True

    monkeypatch.setattr(SignOnAdapter, "is_open_for_signup", found)


def come_back(clients: list[Client], query: Callable[[Client], str] = lambda _: "") -> list[Any]:
    """All at once, each in a browser of its own: in one, the first takes the state that the others bring."""
    told: list[Any] = []

    def comes(client: Client, state: str) -> None:
        told.append(client.get("/login/oidc/board/login/callback/", {"code": "c", "state": state}))

    calls = []
    for client in clients:
        away = client.get(f"/login/oidc/board/login/{query(client)}").headers["Location"]
        calls.append(partial(comes, client, parse_qs(urlsplit(away).query)["state"][0]))
    run_together(calls)
    return told


def test_who_signs_on_for_the_first_time_several_times_at_once_has_one_account(all_new: None, answers: Answers) -> None:
    clients = [Client() for _ in range(TOGETHER)]
    before = AuditEntry.objects.filter(what="sign on").count()
    told = come_back(clients)
    assert [answer.headers["Location"] for answer in told] == ["/"] * TOGETHER
    assert all(logged_in(each) for each in clients)
    assert [one.user for one in SocialAccount.objects.all()] == list(User.objects.all())
    assert AuditEntry.objects.filter(what="sign on").count() == before + 1


def test_of_people_who_would_be_called_alike_each_has_an_account(
    all_new: None, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    subjects = itertools.count()
    each_own = threading.local()

    def claims(told: dict[str, Any]) -> dict[str, Any]:
        each_own.subject = getattr(each_own, "subject", None) or f"s{next(subjects)}"
        return {"sub": each_own.subject, "preferred_username": "ann", "given_name": "Ann"}

    monkeypatch.setattr("jobs.people.sign_on.parse_claims", claims)
    clients = [Client() for _ in range(TOGETHER)]
    come_back(clients)
    assert all(logged_in(each) for each in clients)
    assert len({one.user for one in SocialAccount.objects.all()}) == User.objects.count() == TOGETHER


def test_a_connection_that_comes_several_times_at_once_is_one(
    together: threading.Barrier, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = SignOnAdapter.pre_social_login

    def looked(*told: Any) -> None:
        before(*told)
        together.wait(scale_timeout(20))

    monkeypatch.setattr(SignOnAdapter, "pre_social_login", looked)
    User.objects.create_user("owner", password="owner-password")
    clients = [Client() for _ in range(TOGETHER)]
    for each in clients:
        each.post("/login/", {"username": "owner", "password": "owner-password"})
        each.post("/login/again/", {"password": "owner-password"})
    told = come_back(clients, lambda each: f"?process=connect&proof={proof(each)}")
    assert [answer.headers["Location"] for answer in told] == ["/account/"] * TOGETHER
    assert SocialAccount.objects.get().user.username == "owner"
