"""A project with a person of each role."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.cache import cache

from jobs.models import DEFAULT_PROJECT, Job, Membership, Project, Role
from planner.cost.estimate import parse_plannable
from tests.jobs.people.providers import Answers, answering
from tests.jobs.queue.test_scheduler import queued
from tests.planner.wrong_specs import GOOD

SPEC = parse_plannable({**GOOD, "layout": {"dp": 1}}).model_dump(mode="json")


@pytest.fixture(autouse=True)
def _fresh_counts() -> None:
    cache.clear()


@pytest.fixture(autouse=True)
def _default(db: None) -> None:
    """A migration makes it; tests that write for real empty the database after themselves."""
    Project.objects.get_or_create(name=DEFAULT_PROJECT)


@pytest.fixture
def team(db: None) -> Project:
    return Project.objects.create(name="team")


@pytest.fixture
def members(team: Project) -> dict[str, User]:
    """By role, and the submitter's colleague."""
    made = {}
    for role in Role:
        made[role.label] = User.objects.create_user(role.label, password=f"{role.label}-password")
        Membership.objects.create(project=team, user=made[role.label], role=role)
    made["colleague"] = User.objects.create_user("colleague", password="colleague-password")
    Membership.objects.create(project=team, user=made["colleague"], role=Role.SUBMITTER)
    return made


@pytest.fixture
def make_job() -> Callable[..., Job]:
    def made(owner: User, project: str = "team", **fields: object) -> Job:
        return queued(owner, spec=SPEC, name=f"{owner.username}'s", project=project, **fields)[0]

    return made


@pytest.fixture
def provider(settings: Any) -> Iterator[str]:
    """One that asks who it is."""
    from oidc_provider_mock import run_server_in_thread  # a second, which all that collect would take

    with run_server_in_thread() as server:
        url = f"http://localhost:{server.server_port}"
        signing_on_by(url, settings)
        yield url


@pytest.fixture
def answers(settings: Any) -> Iterator[Answers]:
    """One that answers whatever a test has it answer."""
    with answering() as made:
        signing_on_by(made.url, settings)
        yield made


def signing_on_by(url: str, settings: Any) -> None:
    app = {"provider_id": "board", "name": "Acme", "client_id": "meshboard", "secret": "s"}
    apps = [{**app, "settings": {"server_url": url}}]
    settings.SOCIALACCOUNT_PROVIDERS = {"openid_connect": {"APPS": apps, "OAUTH_PKCE_ENABLED": True}}
    settings.OIDC_NAME = "Acme"
