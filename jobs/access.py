"""Who may see which job: the one rule that REST, pages, sockets and every text that names a job go through."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404

from jobs.models import Job, Project
from jobs.text import storable
from planner.facts.spec import JobSpec, Problem


def visible_jobs(user: Any) -> QuerySet[Job]:
    """A job is its owner's and the staff's."""
    return Job.objects.visible_to(user).select_related("owner")


def listed_jobs(user: Any) -> QuerySet[Job]:
    """`visible_jobs` for lists, which show no estimate and no reasons: they are most of a row."""
    return visible_jobs(user).defer("estimate", "hardware", "chosen")


def changeable_jobs(user: Any) -> QuerySet[Job]:
    """Those of `visible_jobs` that the user may change, as `may_change` says it."""
    jobs = visible_jobs(user)
    return jobs if user.is_staff and user.has_perm("jobs.change_job") else jobs.filter(owner=user)


def visible_job(user: Any, job_id: str) -> Job | None:
    """The job, None alike for what is not there and what is not theirs."""
    return visible_jobs(user).filter(id=job_id).first() if storable(job_id) else None


def foreign_checkpoint(user: Any, spec: JobSpec) -> list[Problem]:
    """A checkpoint is its job's: who may not see that job is told the same as where there is none."""
    resume = spec.train.resume
    if resume is None or visible_job(user, resume.partition("/")[0]):
        return []
    return [Problem("train.resume", f"there is no checkpoint {resume!r}: no such job, or not yours")]


def find_job(user: Any, job_id: str) -> Job:
    """The job, or 404 alike for what is not there and what is not theirs."""
    job = visible_job(user, job_id)
    if job is None:
        raise Http404("no such job")
    return job


def may_change(user: Any, job: Job) -> bool:
    """Whether the user may cancel it or run it again: its owner, and staff with the right, which viewers lack."""
    return job.owner_id == user.pk or bool(user.is_staff and user.has_perm("jobs.change_job"))


def find_job_to_change(user: Any, job_id: str) -> Job:
    """The job; 404 as `find_job` says it, and 403 where the user may only look."""
    job = find_job(user, job_id)
    if not may_change(user, job):
        raise PermissionDenied("you may look at this job, not change it")
    return job


def may_change_hosts(user: Any) -> bool:
    """Staff with the right."""
    return bool(user.is_active and user.is_staff and user.has_perm("jobs.change_host"))


def may_run_queue(user: Any) -> bool:
    """Staff with the right to change everybody's jobs."""
    return bool(user.is_active and user.is_staff and user.has_perm("jobs.change_job"))


def may_submit_to(user: Any, project: str) -> bool:
    """Whoever is logged in, until projects have roles."""
    return bool(user.is_authenticated and user.is_active)


def may_administer(user: Any, project: str) -> bool:
    """Staff with the right to run the queue, until projects have roles."""
    return may_run_queue(user)


def visible_projects(user: Any) -> QuerySet[Project]:
    """All of them for staff, until projects have members."""
    return Project.objects.all() if user.is_active and user.is_staff else Project.objects.none()
