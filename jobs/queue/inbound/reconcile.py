"""Compare what should run with what hosts and external runs report.

Silence alone frees no slot and ends no rank. A job without contact keeps its status, with the reason.
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
from jobs.models import (
    EXTERNAL_ENGINE,
    HOST_SILENT_AFTER,
    MAX_WAIT_REASON_CHARACTERS,
    Attempt,
    Host,
    Job,
    Member,
    Status,
)
from jobs.queue import attempt_completion, lifecycle, termination
from jobs.queue.orders import ORDER_LIFETIME, resend_launch_order

ORDER_AGAIN_AFTER = timedelta(seconds=15)
MAX_MISSED_HEARTBEATS = 3  # heartbeats in a row without an attempt, until the attempt is lost
UNUSED_JOB_FIELDS = ("spec", "estimate", "hardware", "chosen")  # large, and not needed here
CANCEL_FLAG_S = 3600  # renewed each tick while it is needed
JOIN_WITHIN = timedelta(minutes=5)  # of the start of an external run, because imports from a shared disk are slow
LATE_JOIN = timedelta(minutes=1)  # after the other nodes ended, a node that has not joined is lost
MAX_READ_GAP = timedelta(seconds=10)


class RunConnectedError(Exception):
    """A run with recent contact cannot be marked as lost, only cancelled."""


class EventReception:
    """Track since when the controller receives events, because silence before that is not the hosts' fault."""

    def __init__(self) -> None:
        self._since = self._last = timezone.now()
        self._last_tick = time.monotonic()

    def record_pass(self) -> None:
        """Record that all events were read."""
        if self._is_interrupted():
            self._since = timezone.now()
        self._last, self._last_tick = timezone.now(), time.monotonic()

    @property
    def since(self) -> datetime:
        """Return the time since when events are received, or now during an interruption."""
        return timezone.now() if self._is_interrupted() else self._since

    def explain_gap(self) -> str:
        """Return why a silent host may be well, or an empty text."""
        if self._is_interrupted():
            return f"the controller has had no connection to Redis since {self._last:%Y-%m-%d %H:%M:%S} UTC"
        if timezone.now() - self._since <= HOST_SILENT_AFTER:
            return f"the controller reconnected to Redis only at {self._since:%Y-%m-%d %H:%M:%S} UTC"
        return ""

    def _is_interrupted(self) -> bool:
        """Check both clocks: one may stop while the machine sleeps, and the other may be changed."""
        gap_s = time.monotonic() - self._last_tick
        return gap_s > MAX_READ_GAP.total_seconds() or abs(timezone.now() - self._last) > MAX_READ_GAP


def reconcile(client: redis.Redis, receiving_since: datetime, trouble: str = "") -> None:
    """Update unended members on hosts, and set cancel and save flags.

    Args:
        receiving_since: Time since when the controller receives events.
        trouble: Why silent hosts may be well.
    """
    now = timezone.now()
    answered = receiving_since + HOST_SILENT_AFTER  # hosts have answered requests by then
    saving, save_requests = termination.list_saving_attempts(now), list[tuple[str, int]]()
    cancel_requests = [*_list_live_lost_attempts(now), *attempt_completion.list_attempts_to_end()]
    unended = Member.objects.filter(ended__isnull=True, host__isnull=False).select_related("host", "attempt__job")
    unused = ("exit", "attempt__exit", "host__profile", *(f"attempt__job__{name}" for name in UNUSED_JOB_FIELDS))
    for member in unended.defer(*unused).annotate(never_ran=lifecycle.NEVER_RAN):
        job, host = member.attempt.job, cast(Host, member.host)
        key = (job.id, member.attempt.number)
        if job.status == Status.CANCELLING:
            (save_requests if key in saving else cancel_requests).append(key)
        is_supervised = member.heard is not None and now - member.heard <= HOST_SILENT_AFTER
        if not is_supervised and now - max(host.last_seen, receiving_since) > HOST_SILENT_AFTER:
            _handle_silence(job, member, host)
            continue
        if job.status == Status.CANCELLING:
            reason = "" if host.last_seen >= now - HOST_SILENT_AFTER else trouble
            if key in saving:
                reason = f"saving a checkpoint before the end, until {saving[key]:%H:%M:%S} UTC at the latest"
            _set_cancelling_reason(job, reason)
        if is_supervised:
            continue  # the supervisor runs the attempt, with or without a host worker
        if member.never_ran and job.status in (Status.STARTING, Status.UNREACHABLE):
            # The host did not receive the order. The conditional update lets only one controller send it again.
            unchanged = Member.objects.filter(pk=member.pk, ordered=member.ordered)
            is_due = member.missed and now - member.ordered > ORDER_AGAIN_AFTER
            if is_due and unchanged.update(ordered=timezone.now()):
                resend_launch_order(job, member)
        elif member.missed >= MAX_MISSED_HEARTBEATS and now > max(member.ordered + ORDER_LIFETIME, answered):
            # Not sooner: the host may still act on an order, or has not yet answered how the attempt ended.
            attempt_completion.lose_member(member, f"host {host.name} no longer knows this attempt")
    flags = dict.fromkeys([cancel_key(*key) for key in cancel_requests] + [save_key(*key) for key in save_requests])
    if flags:
        with client.pipeline(transaction=False) as pipe:
            for flag in flags:
                pipe.set(flag, "1", ex=CANCEL_FLAG_S)
            pipe.execute()


def _list_live_lost_attempts(now: datetime) -> list[tuple[str, int]]:
    """List lost attempts that a host or a supervisor still reports."""
    lost = Member.objects.filter(outcome="lost").order_by()
    held = {
        (name, job, number)
        for name, holding in Host.objects.exclude(holding=[]).values_list("name", "holding")
        for job, number, _ in holding
    }
    on_hosts = lost.filter(attempt__job_id__in={job for _, job, _ in held})
    rows = on_hosts.values_list("host_name", "attempt__job_id", "attempt__number")
    supervised = lost.filter(heard__gt=F("ended"), heard__gte=now - HOST_SILENT_AFTER)
    return [
        *((job, number) for name, job, number in rows if (name, job, number) in held),
        *supervised.values_list("attempt__job_id", "attempt__number"),
    ]


def _handle_silence(job: Job, member: Member, host: Host) -> None:
    since = f"no contact with host {host.name} since {host.last_seen:%Y-%m-%d %H:%M:%S} UTC"
    if job.status == Status.CANCELLING:
        ends = "the job ends when the host has contact again, or when staff mark the host as lost"
        _set_cancelling_reason(job, f"{since}: {ends}")
        return
    number, active = member.attempt.number, (Status.STARTING, Status.RUNNING)
    lifecycle.change_status(job.id, number, Status.UNREACHABLE, since, only_from=active)


def _set_cancelling_reason(job: Job, reason: str) -> None:
    if reason[:MAX_WAIT_REASON_CHARACTERS] != job.wait_reason:
        Job.objects.filter(id=job.id, status=Status.CANCELLING).update(wait_reason=reason[:MAX_WAIT_REASON_CHARACTERS])


def check_external_runs() -> None:
    """Update the silent members of runs that started outside Meshboard."""
    now = timezone.now()
    unended = Member.objects.filter(ended__isnull=True, attempt__job__engine=EXTERNAL_ENGINE)
    unused = ("exit", "attempt__exit", "attempt__job__spec", "attempt__job__estimate")
    for member in unended.select_related("attempt__job").defer(*unused):
        reason = explain_silence(member, now)
        if not reason:
            continue
        job, number = member.attempt.job, member.attempt.number
        if not member.claim and _have_others_ended(member, now):
            attempt_completion.lose_member(member, f"node {member.host_name} never joined the run")
        elif job.status == Status.CANCELLING:
            _set_cancelling_reason(job, f"{reason}: the run ends when the node has contact again")
        else:
            active = (Status.STARTING, Status.RUNNING)
            lifecycle.change_status(job.id, number, Status.UNREACHABLE, reason, only_from=active)


def explain_silence(member: Member, now: datetime) -> str:
    """Return since when a node of an external run has no contact, or an empty text."""
    if member.heard is None:
        is_late = now - member.attempt.created > JOIN_WITHIN
        return f"node {member.host_name} has not joined within {JOIN_WITHIN.seconds // 60} min" if is_late else ""
    if now - member.heard <= HOST_SILENT_AFTER:
        return ""
    return f"no contact with {member.host_name} since {member.heard:%Y-%m-%d %H:%M:%S} UTC"


def mark_reachable(member: Member) -> None:
    """Mark an unreachable external run as running after a message from a member, if no other member is silent."""
    job, now = member.attempt.job, timezone.now()
    if job.status != Status.UNREACHABLE:
        return
    others = member.attempt.members.filter(ended__isnull=True).exclude(pk=member.pk).select_related("attempt")
    if not any(explain_silence(other, now) for other in others):
        reason = f"{member.host_name} has contact again"
        lifecycle.change_status(job.id, member.attempt.number, Status.RUNNING, reason, only_from=(Status.UNREACHABLE,))


def is_run_silent(job: Job) -> bool:
    """Return whether a job is an external run with a silent node."""
    if job.engine != EXTERNAL_ENGINE or job.status not in (Status.UNREACHABLE, Status.CANCELLING):
        return False
    unended = Member.objects.filter(attempt__job=job, attempt__number=job.attempt, ended__isnull=True)
    return any(explain_silence(member, timezone.now()) for member in unended.select_related("attempt"))


def mark_run_lost(job: Job, by: str) -> None:
    """Mark a silent external run as lost, or as cancelled if a cancel was requested.

    Raises:
        RunConnectedError: The run has contact, or did not start outside Meshboard.
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


def _have_others_ended(member: Member, now: datetime) -> bool:
    others = member.attempt.members.exclude(pk=member.pk).exclude(claim="")
    ended = list(others.values_list("ended", flat=True))
    return bool(ended) and all(at is not None and now - at > LATE_JOIN for at in ended)
