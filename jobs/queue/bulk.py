"""One action on several queued jobs, as staff and those who operate their projects ask for it over pages and REST."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from django.core.exceptions import PermissionDenied
from pydantic import Field

from jobs.core.access import may_run_queue, operated_jobs
from jobs.models import TERMINAL, Job, Status, stands
from jobs.queue import actions, staff
from jobs.queue.shapes import Unchanged
from planner.facts.validation import JobId, StrictModel

Action = Literal["hold", "release", "cancel", "priority"]
MOST = 1000  # jobs at once


class Bulk(StrictModel):
    """What is to be done to which jobs."""

    action: Action
    jobs: list[JobId] = Field(min_length=1, max_length=MOST)
    priority: Annotated[int, Field(ge=staff.LOWEST, le=staff.HIGHEST)] | None = Field(
        default=None, description="New priority of the jobs. Only for the action `priority`."
    )


class MoveTo(StrictModel):
    """Where a job goes among those of its priority: a place, or right before another job."""

    to: staff.Where | None = None
    before: JobId | None = None


def carry_out(asked: Bulk, user: Any) -> list[str]:
    """Do it to those whose turn the user may change; returns the jobs that it changed, of those that are queued.

    Raises:
        PermissionDenied: it changes who goes before whom, also before the jobs of other projects, and that is staff's.
    """
    by, jobs = user.get_username(), operated_jobs(user).filter(id__in=asked.jobs).order_by("id")
    if asked.action == "cancel":
        return [job.id for job in jobs if actions.cancel(job, by)]
    ids = list(jobs.values_list("id", flat=True))
    if asked.action == "hold":
        return staff.hold(ids, by)
    if asked.action == "release":
        return staff.release(ids, by)
    if not may_run_queue(user):
        raise PermissionDenied("Only staff can change priorities.")
    assert asked.priority is not None, "checked by who asks"
    return staff.prioritise(ids, asked.priority, by)


def unchanged(asked: Bulk, changed: list[str], user: Any) -> list[Unchanged]:
    """Of the jobs that were asked for, those that the action did not change, and why."""
    left = [job for job in dict.fromkeys(asked.jobs) if job not in set(changed)]
    statuses = dict(operated_jobs(user).filter(id__in=left).values_list("id", "status"))
    return [Unchanged(job=job, reason=_why(asked, statuses.get(job))) for job in left]


def why_unmoved(job: str, before: str | None) -> str:
    """Why a queued job has the place that it had."""
    if before is not None:
        known = {
            id: told for id, *told in Job.objects.filter(id__in=(job, before)).values_list("id", "status", "priority")
        }
        if before not in known:
            return f"Job {before} does not exist."
        status, priority = known[before]
        if status != Status.QUEUED:
            return f"Job {before} has no place in the queue because it {stands(str(status))}."
        if priority != known[job][1]:
            return (
                f"Job {before} has priority {priority}, but this job has {known[job][1]}. Use a job of equal priority."
            )
    return "The job already has this place in the queue."


def _why(asked: Bulk, status: str | None) -> str:
    if status is None:
        return "The job does not exist."
    if asked.action == "cancel":
        return f"The job has already ended as {status}." if status in TERMINAL else f"The job is already {status}."
    if status != Status.QUEUED:
        return f"The job is not queued because it {stands(status)}."
    already = {"hold": "is already held", "release": "is not held", "priority": "already has this priority"}
    return f"The job {already[asked.action]}."
