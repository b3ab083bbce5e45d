"""Fixtures: a project with a user in each role, and single sign-on providers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.cache import cache

from jobs.models import DEFAULT_PROJECT, Job, Membership, Project, Role
from planner.cost.estimate import parse_plannable
from tests.jobs.people.oidc_providers import FakeProvider, run_fake_provider
from tests.jobs.queue.test_scheduler import queued
from tests.planner.wrong_specs import GOOD

SPEC = parse_plannable({**GOOD, "layout": {"dp": 1}}).model_dump(mode="json")


@pytest.fixture(autouse=True)
def _fresh_counts() -> None:
    cache.clear()


@pytest.fixture(autouse=True)
def _default(db: None) -> None:
    """Create the default project, because tests with real transactions delete it afterwards."""
    Project.objects.get_or_create(name=DEFAULT_PROJECT)


@pytest.fixture
def team(db: None) -> Project:
    return Project.objects.create(name="team")


@pytest.fixture
def members(team: Project) -> dict[str, User]:
    """Return a member for each role, and a second submitter named colleague."""
    made = {}
    for role in Role:
        made[role.label] = User.objects.create_user(role.label, password=f"{role.label}-password")
        Membership.objects.create(project=team, user=made[role.label], role=role)
    made["colleague"] = User.objects.create_user("colleague", password="colleague-password")
    Membership.objects.create(project=team, user=made["colleague"], role=Role.SUBMITTER)
    return made


@pytest.fixture
def make_job() -> Callable[..., Job]:
    def create(owner: User, project: str = "team", **fields: object) -> Job:
        return queued(owner, spec=SPEC, name=f"{owner.username}'s", project=project, **fields)[0]

    return create


@pytest.fixture
def provider(settings: Any) -> Iterator[str]:
    """Run a provider that asks for the user name, and return its URL."""
    from oidc_provider_mock import run_server_in_thread  # Imported here because the import takes a second.

    with run_server_in_thread() as server:
        url = f"http://localhost:{server.server_port}"
        configure_provider(url, settings)
        yield url


@pytest.fixture
def answers(settings: Any) -> Iterator[FakeProvider]:
    """Run a provider whose responses a test can change."""
    with run_fake_provider() as made:
        configure_provider(made.url, settings)
        yield made


def configure_provider(url: str, settings: Any) -> None:
    app = {"provider_id": "board", "name": "Acme", "client_id": "meshboard", "secret": "s"}
    apps = [{**app, "settings": {"server_url": url}}]
    settings.SOCIALACCOUNT_PROVIDERS = {"openid_connect": {"APPS": apps, "OAUTH_PKCE_ENABLED": True}}
    settings.OIDC_NAME = "Acme"
