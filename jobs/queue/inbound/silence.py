"""Runs that report themselves and fall silent: UNREACHABLE, and ended by their own word or a person's alone.

Since when hosts are heard, and why they may not be: silence while nobody listened is not their own.
"""

from __future__ import annotations

import time
from datetime import datetime, timedelta

from django.db import transaction
from django.utils import timezone

from jobs.core.audit import record
from jobs.models import EXTERNAL_ENGINE, HOST_SILENT_AFTER, Attempt, Job, Member, Status
from jobs.queue import attempt_completion, lifecycle

JOIN_WITHIN = timedelta(minutes=5)  # of the run's start: ranks that import torch from a shared disk at once take long
OTHERS_ENDED = timedelta(minutes=1)  # who has not joined so long after all others ended never will


class HeardError(Exception):
    """A run that speaks is not given up: it can be cancelled."""


def tell_of_silence() -> None:
    """One pass over the members that have not ended."""
    now = timezone.now()
    unended = Member.objects.filter(ended__isnull=True, attempt__job__engine=EXTERNAL_ENGINE).select_related(
        "attempt__job"
    )
    for member in unended.defer("exit", "attempt__exit", "attempt__job__spec", "attempt__job__estimate"):
        words = silence(member, now)
        if not words:
            continue
        if not member.claim and _others_ended(member, now):
            attempt_completion.lose(member, f"node {member.host_name} never joined the run")
        elif member.attempt.job.status == Status.CANCELLING:
            _tell_the_cancelling(member.attempt.job, f"{words}: the run ends when the node has contact again")
        else:
            job_id, number = member.attempt.job_id, member.attempt.number
            lifecycle.change(job_id, number, Status.UNREACHABLE, words, only_from=(Status.STARTING, Status.RUNNING))


def silence(member: Member, now: datetime) -> str:
    """Since when nothing was heard of it, in words; empty where it spoke lately."""
    if member.heard is None:
        late = now - member.attempt.created > JOIN_WITHIN
        return f"node {member.host_name} has not joined within {JOIN_WITHIN.seconds // 60} min" if late else ""
    if now - member.heard <= HOST_SILENT_AFTER:
        return ""
    return f"no contact with {member.host_name} since {member.heard:%Y-%m-%d %H:%M:%S} UTC"


def heard_again(member: Member) -> None:
    """The member spoke: the run is reachable where no other is silent."""
    job, now = member.attempt.job, timezone.now()
    if job.status != Status.UNREACHABLE:
        return
    others = member.attempt.members.filter(ended__isnull=True).exclude(pk=member.pk).select_related("attempt")
    if any(silence(other, now) for other in others):
        return
    words = f"{member.host_name} has contact again"
    lifecycle.change(job.id, member.attempt.number, Status.RUNNING, words, only_from=(Status.UNREACHABLE,))


def may_be_given_up(job: Job) -> bool:
    """A run from elsewhere of which a part is silent."""
    if job.engine != EXTERNAL_ENGINE or job.status not in (Status.UNREACHABLE, Status.CANCELLING):
        return False
    unended = Member.objects.filter(attempt__job=job, attempt__number=job.attempt, ended__isnull=True)
    return any(silence(member, timezone.now()) for member in unended.select_related("attempt"))


def give_up(job: Job, by: str) -> None:
    """Nobody waits for a silent run any more: LOST, or CANCELLED where that was asked for.

    Raises:
        HeardError: it is not silent, or no run from elsewhere.
    """
    with transaction.atomic():
        lifecycle.lock(job.id)
        job.refresh_from_db(fields=["status", "attempt"])
        if not may_be_given_up(job):
            raise HeardError
        attempt = Attempt.objects.get(job=job, number=job.attempt)
        for member in attempt.members.filter(ended__isnull=True).select_related("attempt"):
            attempt_completion.lose(member, f"marked as lost by {by}")
        record(by, "give up", "job", job.id)


def _others_ended(member: Member, now: datetime) -> bool:
    others = member.attempt.members.exclude(pk=member.pk).exclude(claim="")
    ended = list(others.values_list("ended", flat=True))
    return bool(ended) and all(at is not None and now - at > OTHERS_ENDED for at in ended)


def _tell_the_cancelling(job: Job, waits: str) -> None:
    if waits[:500] != job.wait_reason:
        Job.objects.filter(id=job.id, status=Status.CANCELLING).update(wait_reason=waits[:500])


GAP = timedelta(seconds=10)


class Listening:
    """What the controller knows of its own ears."""

    def __init__(self) -> None:
        self._since = self._last = timezone.now()
        self._last_tick = time.monotonic()

    def heard(self) -> None:
        """Every event there is has been taken in."""
        if self._deaf():
            self._since = timezone.now()
        self._last, self._last_tick = timezone.now(), time.monotonic()

    @property
    def since(self) -> datetime:
        """From when on a host's silence is its own; now, while nothing can be heard."""
        return timezone.now() if self._deaf() else self._since

    def trouble(self) -> str:
        """Why a host may be well and yet not heard of; empty where there is no such reason."""
        if self._deaf():
            return f"the controller has had no connection to Redis since {self._last:%Y-%m-%d %H:%M:%S} UTC"
        if timezone.now() - self._since <= HOST_SILENT_AFTER:
            return f"the controller reconnected to Redis only at {self._since:%Y-%m-%d %H:%M:%S} UTC"
        return ""

    def _deaf(self) -> bool:
        """By both clocks: while a machine sleeps one of them may stand still, and the other may be set."""
        return time.monotonic() - self._last_tick > GAP.total_seconds() or abs(timezone.now() - self._last) > GAP
