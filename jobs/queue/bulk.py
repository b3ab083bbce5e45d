"""One action on several queued jobs, as staff ask for it over pages and REST."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from jobs.models import Job
from jobs.queue import actions, staff
from planner.facts.spec import JobId, Strict

Action = Literal["hold", "release", "cancel", "priority"]
MOST = 1000  # jobs at once


class Bulk(Strict):
    """What is to be done to which jobs."""

    action: Action
    jobs: list[JobId] = Field(min_length=1, max_length=MOST)
    priority: Annotated[int, Field(ge=staff.LOWEST, le=staff.HIGHEST)] | None = Field(
        default=None, description="with action priority: the new one"
    )


class MoveTo(Strict):
    """Where a job goes among those of its priority: a place, or right before another job."""

    to: staff.Where | None = None
    before: JobId | None = None


def carry_out(asked: Bulk, by: str) -> list[str]:
    """Do it; returns the jobs that it changed, of those that are queued."""
    if asked.action == "hold":
        return staff.hold(asked.jobs, by)
    if asked.action == "release":
        return staff.release(asked.jobs, by)
    if asked.action == "priority":
        assert asked.priority is not None, "checked by who asks"
        return staff.prioritise(asked.jobs, asked.priority, by)
    jobs: Any = Job.objects.filter(id__in=asked.jobs).order_by("id")
    return [job.id for job in jobs if actions.cancel(job, by)]
