"""Predict when attempts end, from step times and time limits."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any, cast

from django.db.models import OuterRef, Subquery

from jobs.core.kinds import KINDS
from jobs.models import Attempt, Job, StateChange, Status
from jobs.queue.hosts.presentation import is_in_contact
from jobs.queue.scheduling.placement import RunningAttempt
from jobs.queue.scheduling.states import Share
from planner.facts.spec import JobKind

MIN_STEPS_FOR_RATE = 3
ACTIVE = (Status.STARTING, Status.RUNNING, Status.UNREACHABLE, Status.CANCELLING)


def predict_durations(jobs: Any) -> dict[str, float | None]:
    """Predict the seconds of a new attempt, from the latest checkpoint to the last step or the time limit.

    The result is None for jobs with neither a step estimate nor a time limit.
    """
    found: dict[str, float | None] = {}
    attempts = Attempt.objects.filter(job=OuterRef("pk"), number__lt=OuterRef("attempt")).exclude(checkpoint="")
    latest = Subquery(attempts.order_by("-number").values("checkpoint")[:1])
    rows = jobs.annotate(latest_checkpoint=latest).values_list(
        "id", "kind", "spec__train__steps", "estimate__time__step_s", "time_limit_s", "latest_checkpoint"
    )
    for id, kind, steps, step_s, limit_s, checkpoint in rows:
        limits = [float(limit_s)] if limit_s else []
        if KINDS[cast(JobKind, kind)].steps == "asked" and steps and step_s:
            done = int(checkpoint.rpartition("-")[2]) if checkpoint else 0  # job/attempt/step-00000007
            limits.append(max(0, steps - done) * step_s)
        found[id] = min(limits, default=None)
    return found


def load_running_attempts(now: datetime, only: Collection[int] | None = None) -> list[RunningAttempt]:
    """Load attempts that use slots, with predicted seconds until they end.

    The prediction uses measured step times if available. It is 0 for attempts that are CANCELLING, and None without
    contact. The time limit of an attempt counts from its launch order until its ranks start.

    Args:
        only: Primary keys of attempts. None: all attempts.
    """
    attempts = list(
        Attempt.objects.filter(ended__isnull=True, job__status__in=ACTIVE, **({} if only is None else {"pk__in": only}))
        .prefetch_related("members__allocations", "members__host")
        .select_related("job")
        .only("number", "created", "job__id", "job__project", "job__status", "job__time_limit_s")
    )
    jobs = [attempt.job_id for attempt in attempts]
    durations = predict_durations(Job.objects.filter(id__in=jobs))
    # Ordered so that the first change to RUNNING wins. Later ones follow a lost contact.
    changes = StateChange.objects.filter(job__in=jobs, status=Status.RUNNING).order_by("-id")
    began = {(job, number): at for job, number, at in changes.values_list("job_id", "attempt", "at")}
    measured = _predict_from_steps(now, [attempt.pk for attempt in attempts])
    found = []
    for attempt in attempts:
        job, members = attempt.job, list(attempt.members.all())
        shares = tuple(
            Share(member.host_name, tuple(sorted(each.slot for each in member.allocations.all()))) for member in members
        )
        elapsed_s = (now - began.get((job.id, attempt.number), now)).total_seconds()
        duration_s, limit_s = durations.get(job.id), job.time_limit_s
        left = [measured[attempt.pk]] if attempt.pk in measured else []
        if not left and duration_s is not None:
            left = [duration_s - elapsed_s]
        left += [limit_s - elapsed_s] if limit_s is not None else []
        has_contact = job.status != Status.UNREACHABLE
        if job.status == Status.CANCELLING:
            left = [0.0]
            has_contact = all(is_in_contact(member.host) for member in members if member.host is not None)
        left_s = max(0.0, min(left)) if left and has_contact else None
        limit_left_s = None
        if limit_s is not None and has_contact:
            since = began.get((job.id, attempt.number), attempt.created)
            limit_left_s = max(0.0, limit_s - (now - since).total_seconds())
        found.append(RunningAttempt(job.id, job.project, shares, left_s, limit_left_s))
    return found


def _predict_from_steps(now: datetime, attempts: list[int]) -> dict[int, float]:
    """Predict the seconds that training attempts still need, from their measured step times."""
    rows = Attempt.objects.filter(
        pk__in=attempts, diagnosis__measured__steps__gte=MIN_STEPS_FOR_RATE
    ).values_list(
        "pk", "job__kind", "job__spec__train__steps",
        "diagnosis__step", "diagnosis__measured__step_s", "diagnosis__time",
    )  # fmt: skip
    return {
        pk: (steps - done) * step_s - (now.timestamp() - measured_at)
        for pk, kind, steps, done, step_s, measured_at in rows
        if KINDS[cast(JobKind, kind)].steps == "asked" and steps
    }
