"""The state machine, and the only code that writes a job's status.

Each change is an UPDATE conditional on the old status and the attempt, whose row count says whether it was ours.
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
from django.db.models import Exists, F, OuterRef, QuerySet
from django.utils import timezone

from jobs.models import EXTERNAL_ENGINE, LIVE, Attempt, Job, Member, SlotAllocation, StateChange, Status
from jobs.people.notifications.outbox import write

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
    # By rules of `jobs.queue.termination`: SUCCEEDED before it could be ended, FAILED by a limit of its own.
    Status.CANCELLING: (Status.CANCELLED, Status.SUCCEEDED, Status.FAILED),
    Status.SUCCEEDED: (),
    Status.FAILED: (),
    Status.LOST: (),
    Status.CANCELLED: (),
}
# Of members: those whose attempt no host ever told of as running.
NEVER_RAN = ~Exists(
    StateChange.objects.filter(job=OuterRef("attempt__job"), attempt=OuterRef("attempt__number"), status=Status.RUNNING)
)
MAX_ANNOUNCE_S = 1.0  # per call, however many jobs it announces
ANNOUNCE_PAUSE_S = 5.0  # without another try after a failed one, so that 1,000 canceled jobs wait once
MAX_ANNOUNCED_JOBS = 50  # at once; who watches the others looks by himself
_announce_after = 0.0  # monotonic seconds
RETRYABLE = (Status.FAILED, Status.LOST, Status.CANCELLED)


def change_status(
    job_id: str, attempt: int, to: Status, reason: str, *, only_from: tuple[Status, ...] | None = None
) -> bool:
    """Move an attempt to a new status if it may; True when this call did it.

    Slots stay with the attempt until `release`. `only_from` narrows the statuses it may come from.
    """
    allowed = [s for s in LIVE if to in TRANSITIONS[s] and (only_from is None or s in only_from)]
    with transaction.atomic():
        rows = Job.objects.filter(id=job_id, attempt=attempt, status__in=allowed)
        if rows.update(status=to, wait_reason="", changed=timezone.now()) != 1:
            return False
        write([StateChange(job_id=job_id, attempt=attempt, status=to, reason=reason[:1000])])
        transaction.on_commit(lambda: announce(job_id))
    return True


def lock_queued(job_ids: Iterable[str], *fields: str) -> list[Job]:
    """Those that are queued, locked until the transaction ends; without any that somebody else is changing now."""
    rows = _locked(job_ids).only("id", "attempt", "status", *fields)
    return [job for job in rows if job.status == Status.QUEUED]


def lock_queued_ids(job_ids: Iterable[str]) -> list[str]:
    """As `lock_queued`."""
    return [job for job, status in _locked(job_ids).values_list("id", "status") if status == Status.QUEUED]


def _locked(job_ids: Iterable[str]) -> QuerySet[Job]:
    # Asked for by id alone: with the status, SQLite would go through the whole queue.
    return Job.objects.select_for_update(skip_locked=True, no_key=True).filter(id__in=list(job_ids)).order_by("id")


def start_jobs(placed: Mapping[str, tuple[int, str]], slots: Mapping[str, int] | None = None) -> dict[str, Job]:
    """Move queued jobs to STARTING at once; `placed` has the attempt and the reason of each, `slots` how many it was
    placed for: one that is held by now, or asks for others, is left too.

    Returns those that this call moved. One that was cancelled meanwhile, or is being changed now, is left as it is.
    """
    with transaction.atomic():
        jobs = {
            job.id: job
            for job in lock_queued(placed, "spec", "num_slots", "owner_id", "held")
            if job.attempt == placed[job.id][0] and (slots is None or (slots[job.id] == job.num_slots and not job.held))
        }
        queued = Job.objects.filter(id__in=list(jobs), status=Status.QUEUED)
        moved = queued.update(status=Status.STARTING, wait_reason="", changed=timezone.now())
        assert moved == len(jobs), f"{moved} of {len(jobs)} locked jobs were queued"
        write(
            [
                StateChange(job=job, attempt=job.attempt, status=Status.STARTING, reason=placed[job.id][1][:1000])
                for job in jobs.values()
            ]
        )
        transaction.on_commit(lambda: announce(*jobs))
    return jobs


def requeue(job_id: str, reason: str) -> bool:
    """Begin a new attempt of a job whose last one failed, was lost or cancelled; True when this call did it.

    What somebody else launched is theirs to launch again.
    """
    with transaction.atomic():
        rows = Job.objects.filter(id=job_id, status__in=RETRYABLE).exclude(engine=EXTERNAL_ENGINE)
        begun = {"status": Status.QUEUED, "attempt": F("attempt") + 1, "stop": "", "archived": False}
        if rows.update(**begun, changed=timezone.now()) != 1:
            return False
        number = Job.objects.values_list("attempt", flat=True).get(id=job_id)
        write([StateChange(job_id=job_id, attempt=number, status=Status.QUEUED, reason=reason[:1000])])
        transaction.on_commit(lambda: announce(job_id))
    return True


def release_member(member: Member) -> bool:
    """The member holds nothing any more; True when it was the last of its attempt, which has ended with it.

    To be called with the job locked where the answer counts: members of one attempt may end at once.
    """
    with transaction.atomic():
        now = timezone.now()
        Member.objects.filter(pk=member.pk, ended__isnull=True).update(ended=now, note="")
        SlotAllocation.objects.filter(member=member).delete()
        if Member.objects.filter(attempt=member.attempt_id, ended__isnull=True).exists():
            return False
        return Attempt.objects.filter(pk=member.attempt_id, ended__isnull=True).update(ended=now) == 1


def lock_job(job_id: str) -> None:
    """Nobody else changes the job until this transaction ends: for changes that hang on each other."""
    list(Job.objects.select_for_update(no_key=True).filter(id=job_id).values_list("id"))


def get_channel_group(job_id: str) -> str:
    """Channel layer group of everybody who watches a job."""
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
        async_to_sync(_wake)(layer, job_ids[:MAX_ANNOUNCED_JOBS])
    except Exception as error:
        _announce_after = time.monotonic() + ANNOUNCE_PAUSE_S
        log.warning(
            "Cannot send changes of %d jobs (the first is %s) to open pages: %r", len(job_ids), job_ids[0], error
        )


async def _wake(layer: Any, job_ids: Iterable[str]) -> None:
    async with asyncio.timeout(MAX_ANNOUNCE_S):
        for job_id in job_ids:
            await layer.group_send(get_channel_group(job_id), {"type": "job.changed"})
