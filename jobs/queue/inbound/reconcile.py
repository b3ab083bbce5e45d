"""The database says what should run, each host says what does; here the two are held against each other.

Silence alone frees no slot and ends no rank: what its host cannot tell of stays as it is, with the reason in words.

Runs that report themselves and fall silent: UNREACHABLE, and ended by their own word or a person's alone.

Since when hosts are heard, and why they may not be: silence while nobody listened is not their own.
"""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from typing import cast

import redis
from django.db import transaction
from django.db.models import F
from django.utils import timezone

from contracts.names import cancel_key, save_key
from jobs.core.audit import record
from jobs.models import EXTERNAL_ENGINE, HOST_SILENT_AFTER, Attempt, Host, Job, Member, Status
from jobs.queue import attempt_completion, lifecycle, termination
from jobs.queue.orders import ORDER_LIFETIME
from jobs.queue.scheduling.scheduler import resend_launch_order

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
    saving, asked = termination.list_saving_attempts(now), list[tuple[str, int]]()
    flags = [*_given_up_and_held(), *_given_up_and_heard(now), *attempt_completion.list_attempts_to_end()]
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
        elif member.missed >= MISSED_IN_A_ROW and now > max(member.ordered + ORDER_LIFETIME, answered):
            # Not sooner: an order that has not expired may still be carried out, and who has just begun to listen hears
            # at once what was said meanwhile, before any host can answer how the attempt ended.
            attempt_completion.lose_member(member, f"host {host.name} no longer knows this attempt")
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
    lifecycle.change_status(job.id, number, Status.UNREACHABLE, since, only_from=(Status.STARTING, Status.RUNNING))


def _tell_the_cancelling(job: Job, waits: str) -> None:
    if waits[:500] != job.wait_reason:
        Job.objects.filter(id=job.id, status=Status.CANCELLING).update(wait_reason=waits[:500])


def _order_again(job: Job, member: Member) -> None:
    """The host lives and does not have the attempt: the order was lost on the way. It starts an attempt once."""
    claimed = Member.objects.filter(pk=member.pk, ordered=member.ordered).update(ordered=timezone.now())
    if claimed:
        resend_launch_order(job, member)


JOIN_WITHIN = timedelta(minutes=5)  # of the run's start: ranks that import torch from a shared disk at once take long
OTHERS_ENDED = timedelta(minutes=1)  # who has not joined so long after all others ended never will


class RunConnectedError(Exception):
    """A run that speaks is not given up: it can be cancelled."""


def check_external_runs() -> None:
    """One pass over the members that have not ended."""
    now = timezone.now()
    unended = Member.objects.filter(ended__isnull=True, attempt__job__engine=EXTERNAL_ENGINE).select_related(
        "attempt__job"
    )
    for member in unended.defer("exit", "attempt__exit", "attempt__job__spec", "attempt__job__estimate"):
        words = explain_silence(member, now)
        if not words:
            continue
        if not member.claim and _others_ended(member, now):
            attempt_completion.lose_member(member, f"node {member.host_name} never joined the run")
        elif member.attempt.job.status == Status.CANCELLING:
            _tell_the_cancelling(member.attempt.job, f"{words}: the run ends when the node has contact again")
        else:
            job_id, number = member.attempt.job_id, member.attempt.number
            lifecycle.change_status(
                job_id, number, Status.UNREACHABLE, words, only_from=(Status.STARTING, Status.RUNNING)
            )


def explain_silence(member: Member, now: datetime) -> str:
    """Since when nothing was heard of it, in words; empty where it spoke lately."""
    if member.heard is None:
        late = now - member.attempt.created > JOIN_WITHIN
        return f"node {member.host_name} has not joined within {JOIN_WITHIN.seconds // 60} min" if late else ""
    if now - member.heard <= HOST_SILENT_AFTER:
        return ""
    return f"no contact with {member.host_name} since {member.heard:%Y-%m-%d %H:%M:%S} UTC"


def mark_reachable(member: Member) -> None:
    """The member spoke: the run is reachable where no other is silent."""
    job, now = member.attempt.job, timezone.now()
    if job.status != Status.UNREACHABLE:
        return
    others = member.attempt.members.filter(ended__isnull=True).exclude(pk=member.pk).select_related("attempt")
    if any(explain_silence(other, now) for other in others):
        return
    words = f"{member.host_name} has contact again"
    lifecycle.change_status(job.id, member.attempt.number, Status.RUNNING, words, only_from=(Status.UNREACHABLE,))


def is_run_silent(job: Job) -> bool:
    """A run from elsewhere of which a part is silent."""
    if job.engine != EXTERNAL_ENGINE or job.status not in (Status.UNREACHABLE, Status.CANCELLING):
        return False
    unended = Member.objects.filter(attempt__job=job, attempt__number=job.attempt, ended__isnull=True)
    return any(explain_silence(member, timezone.now()) for member in unended.select_related("attempt"))


def mark_run_lost(job: Job, by: str) -> None:
    """Nobody waits for a silent run any more: LOST, or CANCELLED where that was asked for.

    Raises:
        HeardError: it is not silent, or no run from elsewhere.
    """
    with transaction.atomic():
        lifecycle.lock_job(job.id)
        job.refresh_from_db(fields=["status", "attempt"])
        if not is_run_silent(job):
            raise RunConnectedError
        attempt = Attempt.objects.get(job=job, number=job.attempt)
        for member in attempt.members.filter(ended__isnull=True).select_related("attempt"):
            attempt_completion.lose_member(member, f"marked as lost by {by}")
        record(by, "give up", "job", job.id)


def _others_ended(member: Member, now: datetime) -> bool:
    others = member.attempt.members.exclude(pk=member.pk).exclude(claim="")
    ended = list(others.values_list("ended", flat=True))
    return bool(ended) and all(at is not None and now - at > OTHERS_ENDED for at in ended)


GAP = timedelta(seconds=10)


class EventReception:
    """What the controller knows of its own ears."""

    def __init__(self) -> None:
        self._since = self._last = timezone.now()
        self._last_tick = time.monotonic()

    def record_pass(self) -> None:
        """Every event there is has been taken in."""
        if self._deaf():
            self._since = timezone.now()
        self._last, self._last_tick = timezone.now(), time.monotonic()

    @property
    def since(self) -> datetime:
        """From when on a host's silence is its own; now, while nothing can be heard."""
        return timezone.now() if self._deaf() else self._since

    def explain_gap(self) -> str:
        """Why a host may be well and yet not heard of; empty where there is no such reason."""
        if self._deaf():
            return f"the controller has had no connection to Redis since {self._last:%Y-%m-%d %H:%M:%S} UTC"
        if timezone.now() - self._since <= HOST_SILENT_AFTER:
            return f"the controller reconnected to Redis only at {self._since:%Y-%m-%d %H:%M:%S} UTC"
        return ""

    def _deaf(self) -> bool:
        """By both clocks: while a machine sleeps one of them may stand still, and the other may be set."""
        return time.monotonic() - self._last_tick > GAP.total_seconds() or abs(timezone.now() - self._last) > GAP
