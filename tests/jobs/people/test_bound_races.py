"""Bounds on how many there may be, when several are made at once, on a real PostgreSQL."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User

from jobs.models import Delivery, ImportedTrace, Invitation, Project, Webhook
from jobs.people import invitations, tokens
from jobs.people.notifications import webhooks
from jobs.runs.traces.imports import store
from planner.facts.validation import SpecError
from tests.jobs.conftest import run_together
from tests.support.postgres import postgres_server, use_database

AT_ONCE = 8
ROUNDS = 4


@pytest.fixture(scope="module")
def postgres(django_db_blocker: Any) -> Iterator[None]:
    with django_db_blocker.unblock(), postgres_server() as url, use_database(url):
        yield


@pytest.fixture
def ann(postgres: None) -> Iterator[User]:
    made = User.objects.create_user("ann")
    yield made
    Webhook.objects.all().delete()
    ImportedTrace.objects.all().delete()
    made.delete()


# Overrides the conftest's, which asks for the other database.
@pytest.fixture(autouse=True)
def _default() -> None:
    pass


def together(make: Callable[[int], Any]) -> None:
    def tried(number: int) -> None:
        with contextlib.suppress(SpecError, store.TooManyImportsError):
            make(number)

    run_together([partial(tried, number) for number in range(AT_ONCE)])


def hook(user: User, number: int) -> Webhook:
    return webhooks.create_webhook(
        user, "default", webhooks.WebhookRequest(name=f"n{number}", url="https://example.com/")
    )


def test_webhooks_are_no_more_than_their_bound(ann: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 24 at once 6 became webhooks where there was room for one."""
    monkeypatch.setattr(webhooks, "MAX_OWNER_WEBHOOKS", 2)
    for _ in range(ROUNDS):
        together(partial(hook, ann))
        assert Webhook.objects.filter(owner=ann).count() == 2
        Webhook.objects.filter(owner=ann).delete()


def test_one_ping_is_on_its_way(ann: User) -> None:
    for number in range(ROUNDS):
        made = hook(ann, number)
        together(lambda _, made=made: webhooks.send_ping(ann, made))  # type: ignore[misc]
        assert Delivery.objects.filter(webhook=made).count() == 1


def test_imports_are_no_more_than_their_bound(
    ann: User, monkeypatch: pytest.MonkeyPatch, settings: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(store, "MAX_IMPORTS_PER_USER", 1)
    settings.STATE_DIR = tmp_path
    for _ in range(ROUNDS):
        together(lambda number: store.create_import(ann, f"n{number}", [("a", 1)]))
        assert ImportedTrace.objects.filter(owner=ann).count() == 1
        ImportedTrace.objects.all().delete()


def test_tokens_and_invitations_are_no_more_than_their_bound(ann: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MAX_TOKENS", 1)
    monkeypatch.setattr(invitations, "MAX_OPEN_INVITATIONS", 1)
    project = Project.objects.create(name="team")
    try:
        for _ in range(ROUNDS):
            together(
                lambda number: tokens.create_token(ann, tokens.ApiTokenRequest(name=f"n{number}", scopes=["read"]))
            )
            assert tokens.get_active_tokens(ann).count() == 1
            tokens.get_active_tokens(ann).delete()
            together(
                lambda _: invitations.create_invitation(project, invitations.InvitationRequest(role="viewer"), "ann")
            )
            assert Invitation.objects.filter(project=project).count() == 1
            Invitation.objects.all().delete()
    finally:
        project.delete()
