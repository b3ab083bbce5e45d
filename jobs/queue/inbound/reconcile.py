"""The database says what should run, each host says what does; here the two are held against each other.

Silence alone frees no slot and ends no rank: what its host cannot tell of stays as it is, with the reason in words.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import cast

import redis
from django.db.models import F
from django.utils import timezone

from contracts.names import cancel_key, save_key
from jobs.models import HOST_SILENT_AFTER, Host, Job, Member, Status
from jobs.queue import attempt_completion, lifecycle, termination
from jobs.queue.order_outbox import ORDER_LASTS
from jobs.queue.scheduling.scheduler import order_launch

ORDER_AGAIN_AFTER = timedelta(seconds=15)
MISSED_IN_A_ROW = 3  # believed heartbeats without an attempt, and its host has forgotten it
BULKY = ("spec", "estimate", "hardware", "chosen")  # of a job, and of no use here
CANCEL_FLAG_S = 3600  # raised again each tick while it is needed


def reconcile(client: redis.Redis, listening_since: datetime, trouble: str = "") -> None:
    """One pass over every member that has not ended, and over what hosts hold though it has.

    `listening_since`: from when on a host's silence is its own, and not that nobody listened. `trouble`: why it may
    be well and yet not heard of.
    """
    now = timezone.now()
    answered = listening_since + HOST_SILENT_AFTER  # by then, what was asked of hosts
    unended = Member.objects.filter(ended__isnull=True, host__isnull=False).select_related("host", "attempt__job")
    bulky = ("exit", "attempt__exit", "host__profile", *(f"attempt__job__{name}" for name in BULKY))
    saving, asked = termination.saving(now), list[tuple[str, int]]()
    flags = [*_given_up_and_held(), *_given_up_and_heard(now), *attempt_completion.doomed()]
    for member in unended.defer(*bulky).annotate(never_ran=lifecycle.NEVER_RAN):
        job, host = member.attempt.job, cast(Host, member.host)
        key = (job.id, member.attempt.number)
        if job.status == Status.CANCELLING:
            (asked if key in saving else flags).append(key)
        speaks = member.heard is not None and now - member.heard <= HOST_SILENT_AFTER
        if not speaks and now - max(host.last_seen, listening_since) > HOST_SILENT_AFTER:
            _tell_of_silence(job, member, host)
            continue
        if job.status == Status.CANCELLING:
            until = (
                f"saving a checkpoint before the end, until {saving[key]:%H:%M:%S} UTC at the latest"
                if key in saving
                else ""
            )
            _tell_the_cancelling(job, until if host.last_seen >= now - HOST_SILENT_AFTER else until or trouble)
        if speaks:
            continue  # its supervisor lives, whatever its host's worker knows or whether there is one
        if member.never_ran and job.status in (Status.STARTING, Status.UNREACHABLE):
            if member.missed and now - member.ordered > ORDER_AGAIN_AFTER:
                _order_again(job, member)
        elif member.missed >= MISSED_IN_A_ROW and now > max(member.ordered + ORDER_LASTS, answered):
            # Not sooner: an order that has not expired may still be carried out, and who has just begun to listen hears
            # at once what was said meanwhile, before any host can answer how the attempt ended.
            attempt_completion.lose(member, f"host {host.name} no longer knows this attempt")
    raise_flags(client, [cancel_key(*key) for key in flags] + [save_key(*key) for key in asked])


def raise_flags(client: redis.Redis, keys: list[str]) -> None:
    """Tell supervisors that their attempts are to end, or to save and stop."""
    if not keys:
        return
    with client.pipeline(transaction=False) as pipe:
        for key in dict.fromkeys(keys):
            pipe.set(key, "1", ex=CANCEL_FLAG_S)
        pipe.execute()


def _given_up_and_held() -> list[tuple[str, int]]:
    """Attempts that a host came back with although they were given up: it is told to end them."""
    held = {
        (name, job, number)
        for name, holding in Host.objects.exclude(holding=[]).values_list("name", "holding")
        for job, number, _ in holding
    }
    ended = Member.objects.filter(outcome="lost", attempt__job_id__in={job for _, job, _ in held}).order_by()
    rows = ended.values_list("host_name", "attempt__job_id", "attempt__number")
    return [(job, number) for name, job, number in rows if (name, job, number) in held]


def _given_up_and_heard(now: datetime) -> list[tuple[str, int]]:
    """Attempts that were given up, and a supervisor of theirs speaks all the same: its host may have no worker."""
    speak = Member.objects.filter(outcome="lost", heard__gt=F("ended"), heard__gte=now - HOST_SILENT_AFTER)
    return list(speak.order_by().values_list("attempt__job_id", "attempt__number"))


def _tell_of_silence(job: Job, member: Member, host: Host) -> None:
    since = f"no contact with host {host.name} since {host.last_seen:%Y-%m-%d %H:%M:%S} UTC"
    if job.status == Status.CANCELLING:
        _tell_the_cancelling(
            job, f"{since}: the job ends when the host has contact again, or when staff mark the host as lost"
        )
        return
    number = member.attempt.number
    lifecycle.change(job.id, number, Status.UNREACHABLE, since, only_from=(Status.STARTING, Status.RUNNING))


def _tell_the_cancelling(job: Job, waits: str) -> None:
    if waits[:500] != job.wait_reason:
        Job.objects.filter(id=job.id, status=Status.CANCELLING).update(wait_reason=waits[:500])


def _order_again(job: Job, member: Member) -> None:
    """The host lives and does not have the attempt: the order was lost on the way. It starts an attempt once."""
    claimed = Member.objects.filter(pk=member.pk, ordered=member.ordered).update(ordered=timezone.now())
    if claimed:
        order_launch(job, member)
