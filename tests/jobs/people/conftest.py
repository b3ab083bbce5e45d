"""A project with a person of each role."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.contrib.auth.models import User
from django.core.cache import cache

from jobs.models import DEFAULT_PROJECT, Job, Membership, Project, Role
from planner.cost.oversize import parse_plannable
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
