"""Show a queued job its position, the reason for the wait, the estimated start, and the next action."""

from __future__ import annotations

from typing import Any

from typing_extensions import TypedDict

from jobs.models import Job
from jobs.planning.elastic import is_stranded
from jobs.queue.view import rows, view


class Waiting(TypedDict):
    """The queue entry of one job."""

    place: int | None  # position from 1, None if another scheduler queues the job
    total: int  # queued jobs
    reason: str  # empty before the first evaluation
    starts: str | None  # estimated start in ISO 8601, None if unknown
    starts_when: str  # the event that the estimated start depends on
    next: str  # the action of the reader


def describe_wait(user: Any, job: Job) -> Waiting:
    """Describe the wait of a queued job."""
    seen = view()
    own = [queued for queued in seen.queue if queued.job.id == job.id]
    row = next(iter(rows(seen, user, own)), None)
    total = len(seen.queue)
    if row is None:
        return Waiting(place=None, total=total, reason=job.wait_reason, starts=None, starts_when="", next="")
    return Waiting(
        place=row["place"],
        total=total,
        reason=row["reason"],
        starts=row["starts"].isoformat() if row["starts"] else None,
        starts_when=row["starts_when"],
        next=_next_action(job, paused=seen.paused, held=row["held"], starts=row["starts"] is not None),
    )


def _next_action(job: Job, *, paused: bool, held: bool, starts: bool) -> str:
    if paused:
        return "Ask an administrator to resume the queue."
    if held:
        return "Ask an operator of the project to release the job."
    if is_stranded(job):
        return "Add a host with enough slots for the job, or find a smaller layout."
    if starts:
        return "You do not need to do anything. The job starts by itself."
    return "Open the queue to see the jobs ahead of this job."
