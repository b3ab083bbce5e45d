"""Whether a job whose attempt has ended is queued again by itself."""

from __future__ import annotations

from jobs.models import Attempt, Job, StateChange, Status

DISPROVED = (
    "The verification of this run failed, so the latest checkpoint may be wrong. "
    "Copy the job, or start a new job from an earlier checkpoint."
)


def disproved(job: Job) -> bool:
    """Whether its last attempt told of what differs, between its ranks or from one process."""
    told = Attempt.objects.filter(job=job, number=job.attempt).values_list("exit__summary__proof__wrong", flat=True)
    return bool(told.first())


def why_again(job: Job) -> str | None:
    """In words, of a job as it ended and stands in the database: it gave way, or failed and may be tried again. None
    where that was its end."""
    if disproved(job):
        return None
    if job.stop == "preempted" and job.status == Status.CANCELLED:
        return "preempted by a job with higher priority, and resumes from the latest checkpoint"
    most = int(job.spec.get("retry", {}).get("max_attempts", 1))
    if job.status not in (Status.FAILED, Status.LOST) or job.stop == "time limit" or most == 1:
        return None
    failed = StateChange.objects.filter(job=job, status__in=(Status.FAILED, Status.LOST)).count()
    if failed >= most:
        return None
    ended = f"{'was' if job.status == Status.LOST else 'has'} {job.status}"
    return f"retry {failed + 1} of {most} from the latest checkpoint, because attempt {job.attempt} {ended}"
