"""Who may see which job: the one rule that REST, pages, sockets and every text that names a job go through."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from django.http import Http404

from jobs.models import Job
from jobs.text import storable


def visible_jobs(user: Any) -> QuerySet[Job]:
    """A job is its owner's and the staff's."""
    return Job.objects.visible_to(user).select_related("owner")


def listed_jobs(user: Any) -> QuerySet[Job]:
    """`visible_jobs` for lists, which show no estimate: it is most of a row."""
    return visible_jobs(user).defer("estimate")


def visible_job(user: Any, job_id: str) -> Job | None:
    """The job, None alike for what is not there and what is not theirs."""
    return visible_jobs(user).filter(id=job_id).first() if storable(job_id) else None


def find_job(user: Any, job_id: str) -> Job:
    """The job, or 404 alike for what is not there and what is not theirs."""
    job = visible_job(user, job_id)
    if job is None:
        raise Http404("no such job")
    return job
