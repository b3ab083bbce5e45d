"""Whose queued jobs may start: those of who could submit them now, by the rule of `jobs.access.may_submit_to`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from django.contrib.auth.models import User
from django.db.models import Exists, OuterRef

from jobs.access import may_submit_to
from jobs.models import DEFAULT_PROJECT, Job, Membership, Role

DISABLED = "its owner's account is disabled: nothing of theirs starts until staff enable it"
NO_SUBMITTER = "its owner may not submit to project {} any more: nothing of theirs starts there until they may again"
# Of jobs, in the order of `Stands`: a queue of thousands is read with it, in one statement.
STANDS = (
    "owner__is_active",
    "owner__is_staff",
    Exists(
        Membership.objects.filter(
            user=OuterRef("owner"), project__name=OuterRef("project"), role__gte=Role.SUBMITTER
        ).order_by()
    ),
)


class Stands(NamedTuple):
    """An owner's account, and whether they are a submitter of their job's project, or more."""

    active: bool
    staff: bool
    submits: bool


class Owners:
    """Why owners may have nothing started; what staff may by their rights is looked up once for all their jobs."""

    def __init__(self) -> None:
        self._staff: dict[tuple[int, str], bool] = {}

    def bar(self, owner: int, project: str, stands: Stands) -> str:
        """Empty where they may."""
        if not stands.active:
            return DISABLED
        if project == DEFAULT_PROJECT or stands.submits or (stands.staff and self._may(owner, project)):
            return ""
        return NO_SUBMITTER.format(project)

    def _may(self, owner: int, project: str) -> bool:
        if (owner, project) not in self._staff:
            self._staff[owner, project] = may_submit_to(User.objects.get(pk=owner), project)
        return self._staff[owner, project]


def owner_bars(jobs: Iterable[str]) -> dict[str, str]:
    """By job that may not start for its owner's sake: why."""
    owners, found = Owners(), {}
    rows = Job.objects.filter(id__in=list(jobs)).values_list("id", "owner", "project", *STANDS)
    for id, owner, project, *stands in rows:
        if bar := owners.bar(owner, project, Stands(*stands)):
            found[id] = bar
    return found


def let_start(jobs: Mapping[str, tuple[int, str]]) -> set[str]:
    """Of jobs, by owner and project, those that may start; whoever disables an account or takes a role waits until the
    transaction ends, and whose row is being changed now has nothing started in it.
    """
    asked, projects = {owner for owner, _ in jobs.values()}, {project for _, project in jobs.values()}
    rows = User.objects.select_for_update(skip_locked=True, no_key=True).filter(pk__in=asked).order_by("pk")
    people, roles = {user.pk: user for user in rows}, set()
    if projects - {DEFAULT_PROJECT}:
        members = Membership.objects.select_for_update(skip_locked=True, no_key=True, of=("self",))
        found = members.filter(user__in=asked, project__name__in=projects, role__gte=Role.SUBMITTER)
        roles = {(member.user_id, member.project.name) for member in found.select_related("project").order_by("pk")}
    owners = Owners()
    return {
        id
        for id, (owner, project) in jobs.items()
        if (user := people.get(owner))
        and not owners.bar(owner, project, Stands(user.is_active, user.is_staff, (owner, project) in roles))
    }
