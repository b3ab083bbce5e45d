"""Change the status of jobs. No other code writes it.

Each change is a conditional UPDATE on the old status and the attempt, and its row count shows whether it succeeded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from asgiref.sync import async_to_sync
from channels.layers import get_channel_layer
from django.db import transaction
from django.db.models import Exists, F, OuterRef
from django.utils import timezone

from jobs.models import (
    EXTERNAL_ENGINE,
    LIVE,
    MAX_REASON_CHARACTERS,
    Attempt,
    Job,
    Member,
    SlotAllocation,
    StateChange,
    Status,
)
from jobs.people.notifications.outbox import add_state_changes

log = logging.getLogger(__name__)

TRANSITIONS: dict[Status, tuple[Status, ...]] = {
    Status.QUEUED: (Status.STARTING, Status.CANCELLING),
    Status.STARTING: (
        Status.RUNNING,
        Status.SUCCEEDED,
        Status.FAILED,
        Status.LOST,
        Status.UNREACHABLE,
        Status.CANCELLING,
    ),
    Status.RUNNING: (Status.SUCCEEDED, Status.FAILED, Status.LOST, Status.UNREACHABLE, Status.CANCELLING),
    Status.UNREACHABLE: (Status.RUNNING, Status.LOST, Status.CANCELLING),
    # A job that a rule of `jobs.queue.termination` stops can still succeed, or fail because of its limit.
    Status.CANCELLING: (Status.CANCELLED, Status.SUCCEEDED, Status.FAILED),
    Status.SUCCEEDED: (),
    Status.FAILED: (),
    Status.LOST: (),
    Status.CANCELLED: (),
}
# Filter for members whose attempt never was RUNNING.
NEVER_RAN = ~Exists(
    StateChange.objects.filter(job=OuterRef("attempt__job"), attempt=OuterRef("attempt__number"), status=Status.RUNNING)
)
MAX_ANNOUNCE_S = 1.0  # per call, for any number of jobs
ANNOUNCE_PAUSE_S = 5.0  # after a failed call, so 1,000 cancelled jobs wait only once
MAX_ANNOUNCED_JOBS = 50  # per call, because pages also poll
_announce_after = 0.0  # monotonic seconds
RETRYABLE = (Status.FAILED, Status.LOST, Status.CANCELLED)


def change_status(
    job_id: str, attempt: int, to: Status, reason: str, *, only_from: tuple[Status, ...] | None = None
) -> bool:
    """Change the status of an attempt if the transition is allowed, and return whether this call did it.

    The attempt keeps its slots until `release_member`. `only_from` restricts the old status.
    """
    allowed = [s for s in LIVE if to in TRANSITIONS[s] and (only_from is None or s in only_from)]
    with transaction.atomic():
        rows = Job.objects.filter(id=job_id, attempt=attempt, status__in=allowed)
        if rows.update(status=to, wait_reason="", changed=timezone.now()) != 1:
            return False
        add_state_changes(
            [StateChange(job_id=job_id, attempt=attempt, status=to, reason=reason[:MAX_REASON_CHARACTERS])]
        )
        transaction.on_commit(lambda: announce(job_id))
    return True


def lock_queued(job_ids: Iterable[str], *fields: str) -> list[Job]:
    """Lock the queued jobs among these until the transaction ends. Skip jobs that others have locked."""
    # Filtered by ID only. With the status in the filter, SQLite would scan the whole queue.
    rows = Job.objects.select_for_update(skip_locked=True, no_key=True).filter(id__in=list(job_ids)).order_by("id")
    return [job for job in rows.only("id", "attempt", "status", *fields) if job.status == Status.QUEUED]


def start_jobs(placed: Mapping[str, tuple[int, str]], slots: Mapping[str, int] | None = None) -> dict[str, Job]:
    """Change queued jobs to STARTING, and return the changed jobs.

    Args:
        placed: Attempt and reason of each job. Jobs with another attempt are skipped.
        slots: Number of slots that each job was placed on. Held jobs and jobs with another number are skipped.
    """
    with transaction.atomic():
        jobs = {
            job.id: job
            for job in lock_queued(placed, "spec", "num_slots", "owner_id", "held", "upload_id", "trace_id")
            if job.attempt == placed[job.id][0] and (slots is None or (slots[job.id] == job.num_slots and not job.held))
        }
        queued = Job.objects.filter(id__in=list(jobs), status=Status.QUEUED)
        changed = queued.update(status=Status.STARTING, wait_reason="", changed=timezone.now())
        assert changed == len(jobs), f"{changed} of {len(jobs)} locked jobs were queued"
        reasons = {id: reason[:MAX_REASON_CHARACTERS] for id, (_, reason) in placed.items()}
        add_state_changes(
            [
                StateChange(job=job, attempt=job.attempt, status=Status.STARTING, reason=reasons[id])
                for id, job in jobs.items()
            ]
        )
        transaction.on_commit(lambda: announce(*jobs))
    return jobs


def requeue(job_id: str, reason: str) -> bool:
    """Queue a new attempt of a job that failed, was lost or cancelled, and return whether this call did it.

    Runs that started outside Meshboard cannot be queued again.
    """
    with transaction.atomic():
        rows = Job.objects.filter(id=job_id, status__in=RETRYABLE).exclude(engine=EXTERNAL_ENGINE)
        values = {"status": Status.QUEUED, "attempt": F("attempt") + 1, "stop": "", "archived": False}
        if rows.update(**values, changed=timezone.now()) != 1:
            return False
        number = Job.objects.values_list("attempt", flat=True).get(id=job_id)
        add_state_changes(
            [StateChange(job_id=job_id, attempt=number, status=Status.QUEUED, reason=reason[:MAX_REASON_CHARACTERS])]
        )
        transaction.on_commit(lambda: announce(job_id))
    return True


def put_back(job_id: str, attempt: int, reason: str) -> bool:
    """Queue a new attempt of a job that its host made fail, and return whether this call did it.

    The job never gets a final status, so no notification of a failure is sent.
    """
    with transaction.atomic():
        active = (Status.STARTING, Status.RUNNING, Status.UNREACHABLE)
        rows = Job.objects.filter(id=job_id, attempt=attempt, status__in=active)
        values = {"status": Status.QUEUED, "attempt": attempt + 1, "wait_reason": ""}
        if rows.update(**values, changed=timezone.now()) != 1:
            return False
        text = reason[:MAX_REASON_CHARACTERS]
        add_state_changes([StateChange(job_id=job_id, attempt=attempt + 1, status=Status.QUEUED, reason=text)])
        transaction.on_commit(lambda: announce(job_id))
    return True


def release_member(member: Member) -> bool:
    """End a member and free its slots. Return whether its attempt ended with it.

    Lock the job first if the result matters, because members of an attempt can end at the same time.
    """
    with transaction.atomic():
        now = timezone.now()
        Member.objects.filter(pk=member.pk, ended__isnull=True).update(ended=now, note="")
        SlotAllocation.objects.filter(member=member).delete()
        if Member.objects.filter(attempt=member.attempt_id, ended__isnull=True).exists():
            return False
        return Attempt.objects.filter(pk=member.attempt_id, ended__isnull=True).update(ended=now) == 1


def lock_job(job_id: str) -> None:
    """Lock a job until the transaction ends, for changes that depend on each other."""
    list(Job.objects.select_for_update(no_key=True).filter(id=job_id).values_list("id"))


def get_channel_group(job_id: str) -> str:
    """Return the channel layer group of the pages that show a job."""
    return f"job.{job_id}"


def announce(*job_ids: str) -> None:
    """Wake the pages that show the first of these jobs.

    A failed call pauses later ones. Each page also polls, so a lost wake-up only delays it.
    """
    global _announce_after
    layer = get_channel_layer()
    if layer is None or not job_ids or time.monotonic() < _announce_after:
        return
    try:
        async_to_sync(_wake_pages)(layer, job_ids[:MAX_ANNOUNCED_JOBS])
    except Exception as error:
        _announce_after = time.monotonic() + ANNOUNCE_PAUSE_S
        log.warning(
            "Cannot send changes of %d jobs (the first is %s) to open pages: %r", len(job_ids), job_ids[0], error
        )


async def _wake_pages(layer: Any, job_ids: Iterable[str]) -> None:
    async with asyncio.timeout(MAX_ANNOUNCE_S):
        for job_id in job_ids:
            await layer.group_send(get_channel_group(job_id), {"type": "job.changed"})
