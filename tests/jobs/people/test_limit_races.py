"""Limits of webhooks, deliveries, imports, tokens, and invitations under concurrent requests."""

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

NUM_THREADS = 8
ROUNDS = 4


@pytest.fixture(scope="module")
def postgres(django_db_blocker: Any) -> Iterator[None]:
    with django_db_blocker.unblock(), postgres_server() as url, use_database(url):
        yield


@pytest.fixture
def ann(postgres: None) -> Iterator[User]:
    webhook = User.objects.create_user("ann")
    yield webhook
    Webhook.objects.all().delete()
    ImportedTrace.objects.all().delete()
    webhook.delete()


# Overrides the fixture of conftest.py, which uses the default test database.
@pytest.fixture(autouse=True)
def _default() -> None:
    pass


def run_concurrently(make: Callable[[int], Any]) -> None:
    def try_make(number: int) -> None:
        with contextlib.suppress(SpecError, store.TooManyImportsError):
            make(number)

    run_together([partial(try_make, number) for number in range(NUM_THREADS)])


def make_webhook(user: User, number: int) -> Webhook:
    return webhooks.create_webhook(
        user, "default", webhooks.WebhookRequest(name=f"n{number}", url="https://example.com/")
    )


def test_concurrent_webhooks_stay_within_the_limit(ann: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """Concurrent requests create at most the allowed number of webhooks."""
    monkeypatch.setattr(webhooks, "MAX_OWNER_WEBHOOKS", 2)
    for _ in range(ROUNDS):
        run_concurrently(partial(make_webhook, ann))
        assert Webhook.objects.filter(owner=ann).count() == 2
        Webhook.objects.filter(owner=ann).delete()


def test_concurrent_pings_create_one_delivery(ann: User) -> None:
    for number in range(ROUNDS):
        webhook = make_webhook(ann, number)
        run_concurrently(lambda _, webhook=webhook: webhooks.send_ping(ann, webhook))  # type: ignore[misc]
        assert Delivery.objects.filter(webhook=webhook).count() == 1


def test_concurrent_imports_stay_within_the_limit(
    ann: User, monkeypatch: pytest.MonkeyPatch, settings: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(store, "MAX_IMPORTS_PER_USER", 1)
    settings.STATE_DIR = tmp_path
    for _ in range(ROUNDS):
        run_concurrently(lambda number: store.create_import(ann, f"n{number}", [("a", 1)]))
        assert ImportedTrace.objects.filter(owner=ann).count() == 1
        ImportedTrace.objects.all().delete()


def test_concurrent_tokens_and_invitations_stay_within_the_limit(ann: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MAX_TOKENS", 1)
    monkeypatch.setattr(invitations, "MAX_OPEN_INVITATIONS", 1)
    project = Project.objects.create(name="team")
    try:
        for _ in range(ROUNDS):
            run_concurrently(
                lambda number: tokens.create_token(ann, tokens.ApiTokenRequest(name=f"n{number}", scopes=["read"]))
            )
            assert tokens.get_active_tokens(ann).count() == 1
            tokens.get_active_tokens(ann).delete()
            run_concurrently(
                lambda _: invitations.create_invitation(project, invitations.InvitationRequest(role="viewer"), "ann")
            )
            assert Invitation.objects.filter(project=project).count() == 1
            Invitation.objects.all().delete()
    finally:
        project.delete()
