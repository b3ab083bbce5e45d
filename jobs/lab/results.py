"""The newest lab run that shows a primitive."""

from __future__ import annotations

from typing import NamedTuple

from django.db.models import F, QuerySet

from jobs.models import Attempt, Job, Status
from jobs.queue.outcomes import checked_result
from planner.facts.lab import LabPoint, LabResult, LabStep
from planner.facts.spec import LabPrimitive

NEWEST_RUNS = 20  # how far back a page looks


class Shown(NamedTuple):
    """A primitive as a finished run had it."""

    attempt: Attempt
    result: LabResult
    step: LabStep
    points: list[LabPoint]


def newest_shown(jobs: QuerySet[Job], primitive: LabPrimitive) -> Shown | None:
    """The newest of the succeeded labs among `jobs` that captured the primitive."""
    ended = jobs.filter(kind="lab", status=Status.SUCCEEDED)
    attempts = Attempt.objects.filter(job__in=ended, number=F("job__attempt")).select_related("job")
    for attempt in attempts.order_by("-job__changed")[:NEWEST_RUNS].iterator():
        result = checked_result(((attempt.exit or {}).get("summary") or {}).get("lab"))
        step = next((s for s in result.steps if s.primitive == primitive), None) if result else None
        if result and step:
            return Shown(attempt, result, step, [p for p in result.points if p.primitive == primitive])
    return None
