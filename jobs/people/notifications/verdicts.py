"""Verdicts in messages about the end of an attempt. The recorder stores the verdict some seconds after the end."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from django.db.models import Q, QuerySet
from django.utils import timezone

from jobs.models import TERMINAL, Attempt, Delivery, Job, StateChange
from jobs.people.notifications.shapes import Told, VerdictTold
from planner.facts.kinds import get_kind_rules

MAX_WAIT = timedelta(seconds=20)  # for a verdict, after the end of an attempt
STATE = "job.state"
Key = tuple[str, int]  # job, attempt


def get_due(change: StateChange, job: Job, now: datetime) -> datetime:
    """Return when the messages of a change are sent: now, or later if an attempt of the job waits for its verdict."""
    if not _has_verdict(job):
        return now
    attempt = Attempt.objects.filter(job=job, number=change.attempt)
    if change.status in TERMINAL and attempt.filter(recorded__isnull=True).exists():
        return now + MAX_WAIT
    # A receiver gets the messages of one job in order.
    return _waiting(job.id, now).order_by("-due").values_list("due", flat=True).first() or now


def release(job_id: str, attempt: int) -> int:
    """Send the messages that waited for the verdict of this attempt. Return their number."""
    now = timezone.now()
    waiting = list(_waiting(job_id, now).only("body"))
    others = [each.pk for each in waiting if (end := _ended(json.loads(each.body))) and end[1] > attempt]
    return _waiting(job_id, now).exclude(pk__in=others).update(due=now)


def add_verdicts(deliveries: Sequence[Delivery]) -> None:
    """Store the verdict in each message about an end that was never sent. A later retry sends equal bytes."""
    bodies: dict[int, Told] = {each.pk: json.loads(each.body) for each in deliveries if not each.tries}
    ends = {key: end for key, told in bodies.items() if (end := _ended(told)) and not told.get("verdict")}
    verdicts = _get_verdicts(ends.values())
    changed = [each for each in deliveries if ends.get(each.pk) in verdicts]
    for delivery in changed:
        delivery.body = json.dumps({**bodies[delivery.pk], "verdict": verdicts[ends[delivery.pk]]}, ensure_ascii=True)
    Delivery.objects.bulk_update(changed, ["body"], batch_size=200)


def _has_verdict(job: Job) -> bool:
    """Return whether the diagnosis judges jobs of this kind."""
    kind = get_kind_rules({"kind": job.kind})
    return not kind.shares_one_slot and not kind.measures_host


def _waiting(job_id: str, now: datetime) -> QuerySet[Delivery]:
    """Select messages that wait for a verdict. A claimed message is due later, and a retry has tries."""
    return Delivery.objects.filter(job=job_id, event=STATE, tries=[], due__gt=now, due__lte=now + MAX_WAIT)


def _ended(told: Told) -> Key | None:
    """Return the attempt whose end the message reports, or None."""
    job = told["job"]
    return (job["id"], job["attempt"]) if job is not None and job["status"] in TERMINAL else None


def _get_verdicts(ends: Iterable[Key]) -> dict[Key, VerdictTold]:
    """Return the final verdict of each attempt that has one."""
    wanted = Q(pk__in=[])
    for job, number in ends:
        wanted |= Q(job=job, number=number)
    rows = Attempt.objects.filter(wanted, diagnosis__over=True).values_list("job", "number", "diagnosis")
    return {
        (job, number): {
            "state": told.get("state", ""),
            "sentence": told["sentence"],
            "reason": told.get("reason", ""),
            "next": told.get("next", ""),
        }
        for job, number, told in rows
        if told and told.get("sentence")
    }
