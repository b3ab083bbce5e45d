"""Whose queued jobs may start: those of who could submit them now, by the rule of `jobs.core.access.may_submit_to`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from django.contrib.auth.models import User

from jobs.core.access import may_submit_to
from jobs.models import DEFAULT_PROJECT, Job, Membership, Role

DISABLED = "The account of the owner is disabled. The job can start after staff enable the account."
NO_SUBMITTER = "The owner is no longer allowed to submit jobs to project {}, so the job does not start."
STANDS = ("owner__is_active", "owner__is_staff")  # of a job's owner, read with the job


class Owners:
    """Why owners may have nothing started. Who submits to what is read once, where a project but `default` is asked of:
    of thousands of jobs PostgreSQL takes ten times as long when each looks it up. What staff may by their rights is
    looked up once for all their jobs."""

    def __init__(self, submitters: set[tuple[int, str]] | None = None) -> None:
        self._submitters = submitters
        self._staff: dict[tuple[int, str], bool] = {}

    def bar(self, owner: int, project: str, *, active: bool, staff: bool) -> str:
        """Empty where they may."""
        if not active:
            return DISABLED
        if project == DEFAULT_PROJECT or self._submits(owner, project) or (staff and self._may(owner, project)):
            return ""
        return NO_SUBMITTER.format(project)

    def _submits(self, owner: int, project: str) -> bool:
        if self._submitters is None:
            members = Membership.objects.filter(role__gte=Role.SUBMITTER).order_by()
            self._submitters = set(members.values_list("user", "project__name"))
        return (owner, project) in self._submitters

    def _may(self, owner: int, project: str) -> bool:
        if (owner, project) not in self._staff:
            self._staff[owner, project] = may_submit_to(User.objects.get(pk=owner), project)
        return self._staff[owner, project]


def owner_bars(jobs: Iterable[str]) -> dict[str, str]:
    """By job that may not start for its owner's sake: why."""
    owners, found = Owners(), {}
    rows = Job.objects.filter(id__in=list(jobs)).values_list("id", "owner", "project", *STANDS)
    for id, owner, project, active, staff in rows:
        if bar := owners.bar(owner, project, active=active, staff=staff):
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
    owners = Owners(roles)
    return {
        id
        for id, (owner, project) in jobs.items()
        if (user := people.get(owner)) and not owners.bar(owner, project, active=user.is_active, staff=user.is_staff)
    }
