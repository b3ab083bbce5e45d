"""Decide who may see and change which job and project. REST, pages, and websockets use these rules.

Viewers see all jobs of a project. Submitters also submit jobs to it. Operators also change all jobs of it. Admins also
change its members and variables. Each user may submit to the project `default`, and sees only own jobs in it. The
scopes of a token limit the rights of its owner.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.core.exceptions import PermissionDenied
from django.db.models import Q, QuerySet

from jobs.core.errors import NotFoundError
from jobs.core.text import is_storable
from jobs.models import DEFAULT_PROJECT, Job, Membership, Project, Role, Scope
from jobs.models.people import get_project_names


def get_visible_jobs(user: Any) -> QuerySet[Job]:
    """Return the jobs that the user may see, with their owners."""
    return Job.objects.visible_to(user).select_related("owner")


def get_listable_jobs(user: Any) -> QuerySet[Job]:
    """Return visible jobs without the large columns that lists do not show."""
    return get_visible_jobs(user).defer("estimate", "hardware", "chosen")


def get_changeable_jobs(user: Any) -> QuerySet[Job]:
    """Return the visible jobs that the user may change, as `may_change` decides."""
    jobs = get_visible_jobs(user)
    if may_change_all_jobs(user) and _has_scope(user, Scope.OPERATE):
        return jobs
    return jobs.filter(Q(owner=user) | Q(project__in=_get_operated_projects(user)))


def get_operable_jobs(user: Any) -> QuerySet[Job]:
    """Return the jobs whose queue position the user may change. Own jobs in other projects are not included."""
    jobs = get_visible_jobs(user)
    return jobs if may_change_all_jobs(user) else jobs.filter(project__in=_get_operated_projects(user))


def _get_operated_projects(user: Any) -> list[str]:
    return get_project_names(user, Role.OPERATOR) if _has_scope(user, Scope.OPERATE) else []


def _has_scope(user: Any, scope: Scope) -> bool:
    # A session has all scopes.
    return scope in getattr(user, "scopes", Scope)


def can_see_jobs_of_others(user: Any) -> bool:
    """Return whether the user may see jobs of other users."""
    return bool(user.is_staff or get_project_names(user))


def get_visible_job(user: Any, job_id: str) -> Job | None:
    """Return the job, None if it does not exist or is not visible."""
    return get_visible_jobs(user).filter(id=job_id).first() if is_storable(job_id) else None


def find_job(user: Any, job_id: str) -> Job:
    """Return the job, or raise NotFoundError if it does not exist or is not visible."""
    job = get_visible_job(user, job_id)
    if job is None:
        raise NotFoundError("job")
    return job


def get_role(user: Any, project: str) -> Role | None:
    """Return the role of the user in a project, None for no role.

    Staff are admins with the right to change projects, operators with the right to change jobs, and viewers otherwise.
    """
    return get_roles(user, [project])[project]


def get_roles(user: Any, projects: Iterable[str]) -> dict[str, Role | None]:
    """Return the role in each of several projects."""
    names = list(projects)
    if not (user.is_authenticated and user.is_active):
        return dict.fromkeys(names)
    roles = {DEFAULT_PROJECT: Role.SUBMITTER}
    if others := [name for name in names if name != DEFAULT_PROJECT]:
        rows = Membership.objects.filter(user=user, project__name__in=others).values_list("project__name", "role")
        roles |= {name: Role(role) for name, role in rows}
    staff = _get_staff_role(user)
    return {name: max((role for role in (roles.get(name), staff) if role is not None), default=None) for name in names}


def _get_staff_role(user: Any) -> Role | None:
    if not user.is_staff:
        return None
    if user.has_perm("jobs.change_project"):
        return Role.ADMIN
    return Role.OPERATOR if user.has_perm("jobs.change_job") else Role.VIEWER


def may_submit_to(user: Any, project: str) -> bool:
    """Return whether the user may submit jobs to the project."""
    role = get_role(user, project)
    return role is not None and role >= Role.SUBMITTER


def is_global_admin(user: Any) -> bool:
    """Return whether the user is an admin of each project."""
    return bool(user.is_authenticated and user.is_active) and _get_staff_role(user) == Role.ADMIN


def may_administer(user: Any, project: str) -> bool:
    """Return whether the user may change the members and variables of the project."""
    return _has_scope(user, Scope.OPERATE) and get_role(user, project) == Role.ADMIN


def may_change(user: Any, job: Job) -> bool:
    """Return whether the user may cancel, tag, or otherwise change the job.

    Owners, operators of the project, and staff with the right may change a job.
    """
    if not (user.is_authenticated and user.is_active):
        return False
    if job.owner_id == user.pk:
        return True
    if not _has_scope(user, Scope.OPERATE):
        return False
    return may_change_all_jobs(user) or job.project in _get_operated_projects(user)


def find_job_to_change(user: Any, job_id: str) -> Job:
    """Return the job like `find_job`, or raise PermissionDenied if the user may only view it."""
    job = find_job(user, job_id)
    if not may_change(user, job):
        raise PermissionDenied("You can view this job, but not change it.")
    return job


def find_job_to_run(user: Any, job_id: str) -> Job:
    """Return the job like `find_job_to_change`, or raise PermissionDenied if the user may not submit to its project."""
    job = find_job_to_change(user, job_id)
    if not may_submit_to(user, job.project):
        raise PermissionDenied(f"You need the `submitter` role in project {job.project}.")
    return job


def get_visible_projects(user: Any) -> QuerySet[Project]:
    """Return the project `default` and the projects of the user, and all projects for staff."""
    if not (user.is_authenticated and user.is_active):
        return Project.objects.none()
    if user.is_staff:
        return Project.objects.all()
    return Project.objects.filter(name__in=[DEFAULT_PROJECT, *get_project_names(user)])


def get_submittable_projects(user: Any) -> list[str]:
    """Return the sorted names of the projects to which the user may submit jobs."""
    roles = get_roles(user, get_visible_projects(user).order_by("name").values_list("name", flat=True))
    return [name for name, role in roles.items() if role is not None and role >= Role.SUBMITTER]


def find_project(user: Any, name: str) -> Project:
    """Return the project, or raise NotFoundError if it does not exist or is not visible."""
    project = get_visible_projects(user).filter(name=name).first() if is_storable(name) else None
    if project is None:
        raise NotFoundError("project")
    return project


def find_project_to_administer(user: Any, name: str) -> Project:
    """Return the project like `find_project`, or raise PermissionDenied if the user is not an admin of it."""
    project = find_project(user, name)
    if not may_administer(user, project.name):
        raise PermissionDenied(f"You need the `admin` role in project {project.name}.")
    return project


def may_change_hosts(user: Any) -> bool:
    """Return whether the user is staff with the right to change hosts."""
    return bool(user.is_active and user.is_staff and user.has_perm("jobs.change_host"))


def may_change_all_jobs(user: Any) -> bool:
    """Return whether the user is staff with the right to change all jobs."""
    return bool(user.is_active and user.is_staff and user.has_perm("jobs.change_job"))


def may_operate_any_project(user: Any) -> bool:
    """Return whether the user may hold, release, and cancel queued jobs of any project."""
    return may_change_all_jobs(user) or bool(user.is_active and _get_operated_projects(user))
