"""Of which states of which jobs a person is mailed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from django.contrib.auth.models import User
from django.db import transaction

from jobs.access import visible_projects
from jobs.models import MailWish, Status
from planner.facts.spec import Problem, SpecError

OWN = ""  # where a project's name would stand: one's own jobs, in any project
MOST_PROJECTS = 100


class Wish(NamedTuple):
    """What is asked for of a project's jobs, or of one's own."""

    project: str
    states: list[str]


def wishes_of(user: User) -> list[Wish]:
    """One's own jobs first, then each project that one sees."""
    kept = dict(MailWish.objects.filter(user=user).values_list("project", "states"))
    names = [OWN, *visible_projects(user).order_by("name").values_list("name", flat=True)[:MOST_PROJECTS]]
    return [Wish(name, kept.get(name, [])) for name in names]


def wish(user: User, wanted: Mapping[str, list[str]]) -> None:
    """Replace what was wished for by this: states by project.

    Raises:
        SpecError: there is no such state, or no such project.
    """
    known = {each.project for each in wishes_of(user)}
    problems = [Problem("project", f"there is no project {name[:100]!r}") for name in wanted if name not in known]
    states = {state for given in wanted.values() for state in given}
    problems += [Problem("states", f"there is no state {state[:100]!r}") for state in states - set(Status.values)]
    if problems:
        raise SpecError(problems)
    with transaction.atomic():
        MailWish.objects.filter(user=user).delete()
        MailWish.objects.bulk_create(
            MailWish(user=user, project=name, states=[state for state in Status.values if state in given])
            for name, given in wanted.items()
            if given
        )
