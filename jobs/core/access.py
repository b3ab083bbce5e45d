"""Who may see and change which job and project: the one rule that REST, pages, sockets and every text that names a job
go through.

Staff see everything and change what their rights say. Of a project other than `default`, a member sees every job; a
submitter also submits to it; an operator also changes any job of it; an admin also says who its members are, and what
its jobs are handed. `default` is everybody's to submit to, and shows nobody another's job. A token may what it was
given for, of what its owner may.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.core.exceptions import PermissionDenied
from django.db.models import Q, QuerySet

from jobs.core.errors import MissingError
from jobs.core.text import storable
from jobs.models import DEFAULT_PROJECT, Job, Membership, Project, Role, Scope
from jobs.models.people import projects_of


def visible_jobs(user: Any) -> QuerySet[Job]:
    """As `JobQuerySet.visible_to` says it."""
    return Job.objects.visible_to(user).select_related("owner")


def listed_jobs(user: Any) -> QuerySet[Job]:
    """`visible_jobs` for lists, which show no estimate and no reasons: they are most of a row."""
    return visible_jobs(user).defer("estimate", "hardware", "chosen")


def changeable_jobs(user: Any) -> QuerySet[Job]:
    """Those of `visible_jobs` that the user may change, as `may_change` says it."""
    jobs = visible_jobs(user)
    if may_run_queue(user) and _has(user, Scope.OPERATE):
        return jobs
    return jobs.filter(Q(owner=user) | Q(project__in=_operated(user)))


def operated_jobs(user: Any) -> QuerySet[Job]:
    """Jobs whose turn in the queue the user may change: all for staff with the right, else those of the projects that
    they operate, their own in others left out.
    """
    jobs = visible_jobs(user)
    return jobs if may_run_queue(user) else jobs.filter(project__in=_operated(user))


def _operated(user: Any) -> list[str]:
    return projects_of(user, Role.OPERATOR) if _has(user, Scope.OPERATE) else []


def _has(user: Any, scope: Scope) -> bool:
    """Whether what the user came with is for this: a session is for everything, a token for its scopes."""
    return scope in getattr(user, "scopes", Scope)


def sees_others(user: Any) -> bool:
    """Whether there may be jobs of others in what the user sees."""
    return bool(user.is_staff or projects_of(user))


def visible_job(user: Any, job_id: str) -> Job | None:
    """The job, None alike for what is not there and what is not theirs."""
    return visible_jobs(user).filter(id=job_id).first() if storable(job_id) else None


def find_job(user: Any, job_id: str) -> Job:
    """The job, or 404 alike for what is not there and what is not theirs."""
    job = visible_job(user, job_id)
    if job is None:
        raise MissingError("job")
    return job


def role_in(user: Any, project: str) -> Role | None:
    """What the user may do in a project, None where nothing. Staff count as admin with the right to change projects,
    as operator with the right to change jobs, else as viewer.
    """
    return roles_in(user, [project])[project]


def roles_in(user: Any, projects: Iterable[str]) -> dict[str, Role | None]:
    """`role_in` each of these, asked at once."""
    names = list(projects)
    if not (user.is_authenticated and user.is_active):
        return dict.fromkeys(names)
    member = {DEFAULT_PROJECT: Role.SUBMITTER}
    if asked := [name for name in names if name != DEFAULT_PROJECT]:
        found = Membership.objects.filter(user=user, project__name__in=asked).values_list("project__name", "role")
        member |= {name: Role(role) for name, role in found}
    staff = _staff_role(user)
    return {name: max((role for role in (member.get(name), staff) if role is not None), default=None) for name in names}


def _staff_role(user: Any) -> Role | None:
    if not user.is_staff:
        return None
    if user.has_perm("jobs.change_project"):
        return Role.ADMIN
    return Role.OPERATOR if user.has_perm("jobs.change_job") else Role.VIEWER


def may_submit_to(user: Any, project: str) -> bool:
    """Whether the user may have jobs started that count to the project."""
    role = role_in(user, project)
    return role is not None and role >= Role.SUBMITTER


def administers_all(user: Any) -> bool:
    """Whether the user counts as admin of every project: staff with the right to change projects."""
    return bool(user.is_authenticated and user.is_active) and _staff_role(user) == Role.ADMIN


def may_administer(user: Any, project: str) -> bool:
    """Whether the user may say who belongs to the project, and what its jobs are handed."""
    return _has(user, Scope.OPERATE) and role_in(user, project) == Role.ADMIN


def may_change(user: Any, job: Job) -> bool:
    """Whether the user may cancel it, tag it and so on: its owner, operators of its project, and staff with the right,
    which viewers lack.
    """
    if not (user.is_authenticated and user.is_active):
        return False
    if job.owner_id == user.pk:
        return True
    return _has(user, Scope.OPERATE) and (may_run_queue(user) or job.project in _operated(user))


def find_job_to_change(user: Any, job_id: str) -> Job:
    """The job; 404 as `find_job` says it, and 403 where the user may only look."""
    job = find_job(user, job_id)
    if not may_change(user, job):
        raise PermissionDenied("You can view this job, but not change it.")
    return job


def find_job_to_run(user: Any, job_id: str) -> Job:
    """The job, to be started again; as `find_job_to_change`, and 403 where the user may not submit to its project."""
    job = find_job_to_change(user, job_id)
    if not may_submit_to(user, job.project):
        raise PermissionDenied(f"You need the `submitter` role in project {job.project}.")
    return job


def visible_projects(user: Any) -> QuerySet[Project]:
    """`default`, those that one is a member of, and all for staff."""
    if not (user.is_authenticated and user.is_active):
        return Project.objects.none()
    return (
        Project.objects.all()
        if user.is_staff
        else Project.objects.filter(name__in=[DEFAULT_PROJECT, *projects_of(user)])
    )


def projects_to_submit_to(user: Any) -> list[str]:
    """Names of all in which the user may have jobs started, by name."""
    roles = roles_in(user, visible_projects(user).order_by("name").values_list("name", flat=True))
    return [name for name, role in roles.items() if role is not None and role >= Role.SUBMITTER]


def find_project(user: Any, name: str) -> Project:
    """The project, or 404 alike for what is not there and what is not theirs."""
    found = visible_projects(user).filter(name=name).first() if storable(name) else None
    if found is None:
        raise MissingError("project")
    return found


def find_project_to_administer(user: Any, name: str) -> Project:
    """The project; 404 as `find_project` says it, and 403 where the user may only look."""
    project = find_project(user, name)
    if not may_administer(user, project.name):
        raise PermissionDenied(f"You need the `admin` role in project {project.name}.")
    return project


def may_change_hosts(user: Any) -> bool:
    """Staff with the right."""
    return bool(user.is_active and user.is_staff and user.has_perm("jobs.change_host"))


def may_run_queue(user: Any) -> bool:
    """Staff with the right to change everybody's jobs."""
    return bool(user.is_active and user.is_staff and user.has_perm("jobs.change_job"))


def may_operate(user: Any) -> bool:
    """Whether there are projects whose queued jobs the user may hold, release and cancel; staff with the right may for
    all.
    """
    return may_run_queue(user) or bool(user.is_active and _operated(user))
