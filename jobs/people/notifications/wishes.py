"""Of which states of which jobs a person is mailed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, NamedTuple

from django.conf import settings
from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import Exists, OuterRef, QuerySet
from pydantic import Field

from jobs.core.access import get_visible_projects
from jobs.core.audit import record
from jobs.core.text import is_storable
from jobs.models import MailWish, Project, Status
from jobs.people.notifications.shapes import EmailSettings
from planner.facts.validation import NO_NUL, Problem, SpecError, StrictModel

OWN = ""  # where a project's name would stand: one's own jobs, in any project
MOST_PROJECTS = 1000


class EmailSettingRequest(StrictModel):
    """States to be mailed of: of a project's jobs, or of one's own."""

    project: Annotated[str, Field(min_length=1, max_length=100, pattern=NO_NUL)] | None = Field(
        description="Name of the project. null: your own jobs in every project."
    )
    states: list[Annotated[Status, Field(strict=False)]] = Field(max_length=len(Status))


class EmailSettingsRequest(StrictModel):
    """All that one is to be mailed of from now on."""

    wishes: list[EmailSettingRequest] = Field(max_length=MOST_PROJECTS + 1, description="Each project once.")


class Wish(NamedTuple):
    """What is asked for of a project's jobs, or of one's own."""

    project: str
    states: list[str]


def wishes_of(user: User) -> list[Wish]:
    """One's own jobs first, then each project that one sees: those with a wish, then the others, by name."""
    kept = _kept(user)
    names = [OWN, *projects_of(user).values_list("name", flat=True)[:MOST_PROJECTS]]
    return [Wish(name, kept.get(name, [])) for name in names]


def projects_of(user: User) -> QuerySet[Project]:
    """Those that one sees, the ones that one has a wish for first."""
    wished = MailWish.objects.filter(user=user, project=OuterRef("name"))
    return get_visible_projects(user).order_by((~Exists(wished)).asc(), "name")


def wishes_for(user: User, projects: Iterable[str]) -> list[Wish]:
    """What is wished for of these."""
    kept = _kept(user)
    return [Wish(name, kept.get(name, [])) for name in projects]


def told(user: User) -> EmailSettings:
    """The same, as REST tells it."""
    return {
        "email": user.email or None,
        "sends": bool(settings.EMAIL_HOST),
        "wishes": [{"project": each.project or None, "states": each.states} for each in wishes_of(user)],
    }


def by_project(asked: EmailSettingsRequest) -> dict[str, list[str]]:
    """Raises SpecError where a project stands there twice."""
    names = [given.project or OWN for given in asked.wishes]
    twice = [
        Problem(f"wishes.{number}.project", "The project is listed twice. List each project only once.")
        for number, name in enumerate(names)
        if name in names[:number]
    ]
    if twice:
        raise SpecError(twice)
    return {name: [state.value for state in given.states] for name, given in zip(names, asked.wishes, strict=True)}


def wish(user: User, wanted: Mapping[str, list[str]], *, of: Iterable[str] | None = None) -> None:
    """Replace what was wished for by this: states by project. `of`: the projects of which alone it is replaced.

    Raises:
        SpecError: there is no such state, or no such project.
    """
    known = _seen(user, filter(is_storable, wanted))
    problems = [Problem("project", f"Project {name[:100]!r} does not exist.") for name in wanted if name not in known]
    states = {state for given in wanted.values() for state in given}
    problems += [
        Problem("states", f"The job status {state[:100]!r} does not exist.") for state in states - set(Status.values)
    ]
    if problems:
        raise SpecError(problems)
    after = {name: [state for state in Status.values if state in given] for name, given in wanted.items() if given}
    with transaction.atomic():
        User.objects.select_for_update(no_key=True).get(pk=user.pk)  # of two at once one is wholly kept
        before = _kept(user)
        if of is not None:
            asked_for = {*of, *wanted}
            others = _seen(user, before) - asked_for
            after = {name: states for name, states in before.items() if name in others} | after
        if before == after:
            return
        MailWish.objects.filter(user=user).delete()
        MailWish.objects.bulk_create(MailWish(user=user, project=name, states=states) for name, states in after.items())
        record(user.get_username(), "wish for mail", "user", user.get_username(), before, after)


def _seen(user: User, names: Iterable[str]) -> set[str]:
    """Of these, the ones that a wish may be for."""
    return {OWN, *get_visible_projects(user).filter(name__in=list(names)).values_list("name", flat=True)}


def _kept(user: User) -> dict[str, list[str]]:
    return dict(MailWish.objects.filter(user=user).values_list("project", "states"))
