"""The state machine, and the only code that writes a job's status.

Each change is an UPDATE conditional on the old status and the attempt, whose row count says whether it was ours.
"""

from __future__ import annotations

import logging

from asgiref.sync import async_to_sync
from channels.layers import get_channel_layer
from django.db import transaction
from django.db.models import F
from django.utils import timezone

from jobs.models import LIVE, Attempt, Job, SlotAllocation, StateChange, Status

log = logging.getLogger(__name__)

MAY_BECOME: dict[Status, tuple[Status, ...]] = {
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
    Status.CANCELLING: (Status.CANCELLED,),
    Status.SUCCEEDED: (),
    Status.FAILED: (),
    Status.LOST: (),
    Status.CANCELLED: (),
}
RETRYABLE = (Status.FAILED, Status.LOST, Status.CANCELLED)


def change(job_id: str, attempt: int, to: Status, reason: str, *, only_from: tuple[Status, ...] | None = None) -> bool:
    """Move an attempt to a new status if it may; True when this call did it.

    Slots stay with the attempt until `release`. `only_from` narrows the statuses it may come from.
    """
    allowed = [s for s in LIVE if to in MAY_BECOME[s] and (only_from is None or s in only_from)]
    with transaction.atomic():
        rows = Job.objects.filter(id=job_id, attempt=attempt, status__in=allowed)
        if rows.update(status=to, wait_reason="", changed=timezone.now()) != 1:
            return False
        StateChange.objects.create(job_id=job_id, attempt=attempt, status=to, reason=reason[:1000])
        transaction.on_commit(lambda: announce(job_id))
    return True


def requeue(job_id: str, reason: str) -> bool:
    """Begin a new attempt of a job whose last one failed, was lost or cancelled; True when this call did it."""
    with transaction.atomic():
        rows = Job.objects.filter(id=job_id, status__in=RETRYABLE)
        if rows.update(status=Status.QUEUED, attempt=F("attempt") + 1, changed=timezone.now()) != 1:
            return False
        number = Job.objects.values_list("attempt", flat=True).get(id=job_id)
        StateChange.objects.create(job_id=job_id, attempt=number, status=Status.QUEUED, reason=reason[:1000])
        transaction.on_commit(lambda: announce(job_id))
    return True


def release(attempt: Attempt) -> None:
    """The attempt holds nothing any more: its host said that it ended, it rebooted, or staff gave it up."""
    with transaction.atomic():
        Attempt.objects.filter(pk=attempt.pk, ended__isnull=True).update(ended=timezone.now())
        SlotAllocation.objects.filter(attempt=attempt).delete()


def group_name(job_id: str) -> str:
    """Channel layer group of everybody who watches a job."""
    return f"job.{job_id}"


def announce(job_id: str) -> None:
    """Wake the sockets that watch a job. They also look by themselves, so a lost wake-up only delays."""
    layer = get_channel_layer()
    if layer is None:
        return
    try:
        async_to_sync(layer.group_send)(group_name(job_id), {"type": "job.changed"})
    except Exception as error:
        log.warning("could not announce job %s: %s", job_id, error)
