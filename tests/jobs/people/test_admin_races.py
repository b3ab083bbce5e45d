"""Concurrent removal of the last admins of a project, with PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from django.contrib.auth.models import User

from jobs.models import Membership, Project, Role
from jobs.people import projects
from planner.facts.validation import SpecError
from tests.jobs.conftest import run_together
from tests.support.postgres import postgres_server, use_database

ROUNDS = 12


@pytest.fixture(scope="module")
def postgres(django_db_blocker: Any) -> Iterator[None]:
    with django_db_blocker.unblock(), postgres_server() as url, use_database(url):
        yield


@pytest.fixture
def admins(postgres: None) -> Iterator[list[User]]:
    made = [User.objects.create_user(name) for name in ("ann", "bob")]
    yield made
    Project.objects.filter(name="team").delete()
    for user in made:
        user.delete()


# Overrides the fixture of conftest.py, which uses the default test database.
@pytest.fixture(autouse=True)
def _default() -> None:
    pass


def demote(project: Project, whom: User, by: User) -> None:
    projects.set_role(project, whom.username, Role.VIEWER, by)


def remove(project: Project, whom: User, by: User) -> None:
    projects.remove_member(project, whom.username, by)


@pytest.mark.parametrize("change", [demote, remove])
@pytest.mark.parametrize("each_other", [True, False])
def test_one_of_two_admins_removed_at_once_stays(
    each_other: bool, change: Callable[[Project, User, User], None], admins: list[User]
) -> None:
    def try_change(project: Project, whom: User, by: User) -> None:
        try:
            change(project, whom, by)
        except SpecError:
            refused.append(whom)

    for _ in range(ROUNDS):
        project = Project.objects.create(name="team")
        Membership.objects.bulk_create(Membership(project=project, user=user, role=Role.ADMIN) for user in admins)
        refused: list[User] = []
        ann, bob = admins
        pairs = [(ann, bob), (bob, ann)] if each_other else [(ann, ann), (bob, bob)]
        run_together([partial(try_change, project, *pair) for pair in pairs])
        left = list(Membership.objects.filter(project=project, role=Role.ADMIN).values_list("user", flat=True))
        assert left == [user.pk for user in refused]
        assert len(left) == 1
        project.delete()
