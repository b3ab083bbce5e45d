"""The queue as its page and REST show it: order, points, why each waits, when it should start.

What REST tells of the queue, typed once.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Annotated, Any, NamedTuple, cast

from django.db.models import OuterRef, Subquery
from django.utils import timezone
from pydantic import Field
from typing_extensions import TypedDict

from jobs.core.access import get_visible_jobs
from jobs.core.job_details import Timestamp
from jobs.core.kinds import KINDS, format_layout
from jobs.models import Attempt, Job, StateChange, Status
from jobs.queue.hosts.presentation import is_in_contact
from jobs.queue.scheduling.placement import MAX_FORECAST_JOBS, Forecast, RunningAttempt, forecast, sort_queue
from jobs.queue.scheduling.snapshot import QueueEntry, is_queue_paused, load_hosts, load_queue, load_quotas
from jobs.queue.scheduling.states import HostState, Quota, Share
from planner.facts.spec import JobKind

FEWEST_STEPS = 3  # timed, and a pace is one
RUNS = (Status.STARTING, Status.RUNNING, Status.UNREACHABLE, Status.CANCELLING)


class QueueView(NamedTuple):
    """Queue and hosts as a page was asked for."""

    now: datetime
    queue: list[QueueEntry]  # in order
    hosts: list[HostState]
    quotas: dict[str, Quota]
    paused: bool


def load_view() -> QueueView:
    now = timezone.now()
    queue = {queued.job.id: queued for queued in load_queue(now)}
    order = [queue[job.id] for job in sort_queue(queued.job for queued in queue.values())]
    return QueueView(now, order, list(load_hosts(now).values()), load_quotas(), is_queue_paused())


def build_rows(seen: QueueView, user: Any, shown: Iterable[QueueEntry]) -> list[dict[str, Any]]:
    """Lines for jobs of the queue that the user may see."""
    places = {queued.job.id: number for number, queued in enumerate(seen.queue, 1)}
    ids = [queued.job.id for queued in shown]
    jobs = get_visible_jobs(user).filter(id__in=ids).defer("estimate", "hardware", "chosen").in_bulk()
    told = _forecasts(seen)
    names = dict(get_visible_jobs(user).filter(id__in={f.ends for f in told.values()}).values_list("id", "name"))
    return [
        _row(seen, queued, jobs[queued.job.id], places[queued.job.id], told.get(queued.job.id), names)
        for queued in shown
        if queued.job.id in jobs
    ]


def _row(
    seen: QueueView, queued: QueueEntry, job: Job, place: int, told: Forecast | None, names: dict[str, str]
) -> dict[str, Any]:
    return {
        "id": job.id,
        "place": place,
        "name": job.name,
        "owner": job.owner.get_username(),
        "project": job.project,
        "layout": format_layout(job.spec),
        "num_slots": job.num_slots,
        "priority": job.priority,
        "points": queued.points.total,
        "parts": queued.points._asdict(),
        "held": job.held,
        "reason": queued.block_reason or job.wait_reason,
        "starts": None if told is None else (seen.now + timedelta(seconds=told.in_s)),
        "starts_when": _when(told, names),
        "created": job.created,
    }


def _when(told: Forecast | None, names: dict[str, str]) -> str:
    if told is None:
        return ""
    if not told.ends:
        return "in the next scheduling pass"
    return f'after job "{names[told.ends]}" ends' if told.ends in names else "after another job ends"


def _forecasts(seen: QueueView) -> dict[str, Forecast]:
    """Nothing while the queue is paused: nobody can tell for how long."""
    if seen.paused:
        return {}
    free = [queued.job for queued in seen.queue if not queued.block_reason]
    durations = predict_durations(Job.objects.filter(id__in=[job.id for job in free[:MAX_FORECAST_JOBS]]))
    return forecast(free, seen.hosts, load_running_attempts(seen.now), durations, seen.quotas)


def predict_durations(jobs: Any) -> dict[str, float | None]:
    """Predicted seconds of attempts that begin: the steps left from the newest checkpoint on, as the estimate times
    them, at most the time limit; None where neither is.
    """
    found: dict[str, float | None] = {}
    saved = (
        Attempt.objects.filter(job=OuterRef("pk"), number__lt=OuterRef("attempt"))
        .exclude(checkpoint="")
        .order_by("-number")
    )
    rows = jobs.annotate(saved=Subquery(saved.values("checkpoint")[:1])).values_list(
        "id", "kind", "spec__train__steps", "estimate__time__step_s", "time_limit_s", "saved"
    )
    for id, kind, steps, step_s, limit_s, checkpoint in rows:
        known = [float(limit_s)] if limit_s else []
        if KINDS[cast(JobKind, kind)].steps == "asked" and steps and step_s:
            done = int(checkpoint.rpartition("-")[2]) if checkpoint else 0  # job/attempt/step-00000007
            known.append(max(0, steps - done) * step_s)
        found[id] = min(known, default=None)
    return found


def load_running_attempts(now: datetime) -> list[RunningAttempt]:
    """Attempts that hold slots, with the seconds they should still run: by their measured pace where there is one; none
    of one that was told to end. When one will end that is not heard, nothing tells."""
    attempts = Attempt.objects.filter(ended__isnull=True, job__status__in=RUNS).prefetch_related(
        "members__allocations", "members__host"
    )
    unended = list(
        attempts.select_related("job").only(
            "number", "created", "job__id", "job__project", "job__status", "job__time_limit_s"
        )
    )
    durations = predict_durations(Job.objects.filter(id__in=[attempt.job_id for attempt in unended]))
    began = {
        (job, number): at
        for job, number, at in StateChange.objects.filter(
            job__in=[attempt.job_id for attempt in unended], status=Status.RUNNING
        )
        .order_by("-id")  # the first of an attempt comes last, and stays: others came of a host that was back
        .values_list("job_id", "attempt", "at")
    }
    paces = _paces(now, [attempt.pk for attempt in unended])
    found = []
    for attempt in unended:
        shares = tuple(
            Share(member.host_name, tuple(sorted(held.slot for held in member.allocations.all())))
            for member in attempt.members.all()
        )
        since = (now - began.get((attempt.job_id, attempt.number), now)).total_seconds()
        lasts, limit_s = durations.get(attempt.job_id), attempt.job.time_limit_s
        known = [paces[attempt.pk]] if attempt.pk in paces else [] if lasts is None else [lasts - since]
        known += [limit_s - since] if limit_s is not None else []
        if attempt.job.status == Status.CANCELLING:
            known = [0.0]
            heard = all(is_in_contact(member.host) for member in attempt.members.all() if member.host is not None)
        else:
            heard = attempt.job.status != Status.UNREACHABLE
        left = max(0.0, min(known)) if known and heard else None
        found.append(RunningAttempt(attempt.job_id, attempt.job.project, shares, left))
    return found


def _paces(now: datetime, attempts: list[int]) -> dict[int, float]:
    """Seconds that training attempts still need for their steps, as their steps were timed so far."""
    rows = Attempt.objects.filter(pk__in=attempts, diagnosis__measured__steps__gte=FEWEST_STEPS).values_list(
        "pk", "job__kind", "job__spec__train__steps",
        "diagnosis__step", "diagnosis__measured__step_s", "diagnosis__time",
    )  # fmt: skip
    return {
        pk: (steps - done) * step_s - (now.timestamp() - told)
        for pk, kind, steps, done, step_s, told in rows
        if KINDS[cast(JobKind, kind)].steps == "asked" and steps
    }


class PointParts(TypedDict):
    """What a job's points are the sum of."""

    priority: float
    waited: float
    share: float
    moved: float


class QueuedRow(TypedDict):
    """A job that waits."""

    id: str
    place: Annotated[int, Field(description="Position of the job in the whole queue, starting at 1.")]
    name: str
    owner: str
    project: str
    layout: str
    num_slots: int
    priority: int
    points: Annotated[float, Field(description="Scheduling points. Jobs with more points start first.")]
    parts: PointParts
    held: bool
    reason: Annotated[str, Field(description="Reason why the job waits.")]
    starts: Annotated[Timestamp | None, Field(description="Estimated start time. null if it is unknown.")]
    starts_when: Annotated[str, Field(description="Event that needs to happen before the job starts.")]
    created: Timestamp


class QueueDetail(TypedDict):
    """The queue, as far as its reader may see it."""

    paused: bool
    queued: Annotated[int, Field(description="everybody's")]
    jobs: list[QueuedRow]


class UnchangedJob(TypedDict):
    """A job that an action was asked for and did not change."""

    job: str
    reason: str


class ActionResult(TypedDict):
    """Jobs that an action changed, and why it did not change the others."""

    changed: list[str]
    unchanged: list[UnchangedJob]


class MoveResult(TypedDict):
    """Whether the job has another place now; `reason`: why not, where it has not."""

    moved: bool
    reason: str


class StartableJob(TypedDict):
    """A job that waits, and would not if it were so."""

    id: str
    name: str


class WhatIfResult(TypedDict):
    """Which jobs would start with the next pass; those that start anyway are left out."""

    jobs: list[StartableJob]


class PauseResult(TypedDict):
    """How it stands now, and whether this request changed it."""

    paused: bool
    changed: bool
