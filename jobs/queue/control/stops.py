"""Attempts that the board ends by rule, and what follows an attempt: another one, or nothing.

An attempt is told to end as by a cancel. A training run that gives way is asked to save a checkpoint first, where it
saves any at all; of others, and where that takes too long, what was done since the newest checkpoint is lost.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Literal

from django.conf import settings
from django.db import transaction
from django.db.models import Exists, OuterRef, Subquery

from jobs.core.retries import disproved, why_again
from jobs.models import Job, StateChange, Status
from jobs.queue import lifecycle
from planner.facts.kinds import KINDS

Why = Literal["preempted", "time limit", "idle"]
TRAINING = [name for name, kind in KINDS.items() if kind.trains and not kind.shares_one_slot]
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
    text = "preempted by a job with higher priority"
    if Job.objects.filter(id=job_id, owner__jobs__id=for_job).exists():
        text += f", {name}"
    return stop(job_id, attempt, "preempted", f"{text}, and queued again to resume from the latest checkpoint")


def saving(now: datetime) -> dict[tuple[str, int], datetime]:
    """Attempts that were told to give way and have time to save a checkpoint first: until when."""
    changes = StateChange.objects.filter(job=OuterRef("pk"), attempt=OuterRef("attempt")).order_by("-id")
    told = Subquery(changes.filter(status=Status.CANCELLING).values("at")[:1])
    preempted = Job.objects.filter(status=Status.CANCELLING, stop="preempted", engine="hosts", kind__in=TRAINING)
    able = preempted.filter(Exists(changes.filter(status=Status.RUNNING)), spec__train__checkpoint_every__gt=0)
    rows = able.annotate(told=told).values_list("id", "attempt", "told")
    lasts = timedelta(seconds=settings.SAVE_S)
    return {(id, attempt): at + lasts for id, attempt, at in rows if at is not None and now < at + lasts}


def end_as_asked(job_id: str, attempt: int, reason: str, *, did_all: bool = False) -> bool:
    """The attempt that was told to end has; False where none was, or where a rule told it so and it had done all it was
    to do. The job is locked.

    CANCELLED, but FAILED where a limit of its own ended it, nobody asked for that end, or where it was disproved as it
    gave way: nothing goes on from it.
    """
    if did_all and Job.objects.filter(id=job_id, attempt=attempt).exclude(stop="").update(stop=""):
        return False
    told = StateChange.objects.filter(job_id=job_id, attempt=attempt, status=Status.CANCELLING).last()
    job = Job.objects.only("id", "attempt", "stop").get(id=job_id)
    if job.stop in ("time limit", "idle") and told is not None:
        return lifecycle.change(job_id, attempt, Status.FAILED, told.reason, only_from=(Status.CANCELLING,))
    if job.stop == "preempted" and disproved(job):
        text = "the job was preempted, and the verification of the run failed"
        return lifecycle.change(job_id, attempt, Status.FAILED, text, only_from=(Status.CANCELLING,))
    return lifecycle.change(job_id, attempt, Status.CANCELLED, reason, only_from=(Status.CANCELLING,))


def follow(job_id: str, attempt: int) -> None:
    """After the end of an attempt: queued again where it gave way, or failed and may be tried again."""
    job = Job.objects.only("id", "attempt", "status", "stop", "spec").get(id=job_id)
    if job.attempt != attempt:
        return
    if (again := why_again(job)) is not None:
        lifecycle.requeue(job_id, again)
