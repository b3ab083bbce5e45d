"""Attempts that the board ends by rule, and what follows an attempt: another one, or nothing.

An attempt is told to end as by a cancel. The trainer saves nothing on the way out: what it did since its newest
checkpoint is lost, and a job that saves none begins anew.
"""

from __future__ import annotations

from typing import Literal

from django.db import transaction

from jobs.models import Job, StateChange, Status
from jobs.queue import lifecycle

Why = Literal["preempted", "time limit", "idle"]
RUNS = (Status.STARTING, Status.RUNNING, Status.UNREACHABLE)


def stop(job_id: str, attempt: int, why: Why, reason: str) -> bool:
    """Tell a running attempt to end; True when this call did."""
    with transaction.atomic():
        lifecycle.lock(job_id)
        if not lifecycle.change(job_id, attempt, Status.CANCELLING, reason, only_from=RUNS):
            return False
        Job.objects.filter(id=job_id).update(stop=why)
    return True


def preempt(job_id: str, for_job: str, name: str) -> bool:
    """A preemptible job gives way; False where it has ended or was told to already."""
    attempt = Job.objects.values_list("attempt", flat=True).filter(id=job_id, preemptible=True).first()
    if attempt is None:
        return False
    text = "preempted by a job of higher priority"
    if Job.objects.filter(id=job_id, owner__jobs__id=for_job).exists():
        text += f", {name}"
    return stop(job_id, attempt, "preempted", f"{text}; it is queued again and goes on from its newest checkpoint")


def end_as_asked(job_id: str, attempt: int, reason: str) -> bool:
    """The attempt that was told to end has; False where none was. The job is locked.

    CANCELLED, but FAILED where a limit of its own ended it: nobody asked for that end.
    """
    told = StateChange.objects.filter(job_id=job_id, attempt=attempt, status=Status.CANCELLING).last()
    why = Job.objects.values_list("stop", flat=True).get(id=job_id)
    if why in ("time limit", "idle") and told is not None:
        return lifecycle.change(job_id, attempt, Status.FAILED, told.reason, only_from=(Status.CANCELLING,))
    return lifecycle.change(job_id, attempt, Status.CANCELLED, reason, only_from=(Status.CANCELLING,))


def follow(job_id: str, attempt: int) -> None:
    """After the end of an attempt: queued again where it gave way, or failed and may be tried again."""
    job = Job.objects.only("id", "attempt", "status", "stop", "spec").get(id=job_id)
    if job.attempt != attempt:
        return
    if job.stop == "preempted" and job.status == Status.CANCELLED:
        lifecycle.requeue(job_id, "it gave way to a job of higher priority; it goes on from its newest checkpoint")
        return
    most = int(job.spec.get("retry", {}).get("max_attempts", 1))
    if job.status not in (Status.FAILED, Status.LOST) or job.stop == "time limit" or most == 1:
        return
    failed = StateChange.objects.filter(job_id=job_id, status__in=(Status.FAILED, Status.LOST)).count()
    if failed < most:
        again = f"try {failed + 1} of {most}, after attempt {attempt} {'was' if job.status == Status.LOST else 'has'}"
        lifecycle.requeue(job_id, f"{again} {job.status}; it goes on from its newest checkpoint")
