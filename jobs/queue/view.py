"""Build the queue as its page and REST show it, with predicted starts."""

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

MIN_STEPS_FOR_RATE = 3
ACTIVE = (Status.STARTING, Status.RUNNING, Status.UNREACHABLE, Status.CANCELLING)


class QueueSnapshot(NamedTuple):
    """The queue in scheduling order, and the hosts, at one time."""

    now: datetime
    queue: list[QueueEntry]
    hosts: list[HostState]
    quotas: dict[str, Quota]
    paused: bool


def load_queue_snapshot() -> QueueSnapshot:
    now = timezone.now()
    entries = {entry.job.id: entry for entry in load_queue(now)}
    queue = [entries[job.id] for job in sort_queue(entry.job for entry in entries.values())]
    return QueueSnapshot(now, queue, list(load_hosts(now).values()), load_quotas(), is_queue_paused())


def build_rows(view: QueueSnapshot, user: Any, shown: Iterable[QueueEntry]) -> list[dict[str, Any]]:
    """Build the rows of queued jobs that the user may see."""
    shown = list(shown)
    places = {entry.job.id: number for number, entry in enumerate(view.queue, 1)}
    jobs = get_visible_jobs(user).filter(id__in=[entry.job.id for entry in shown])
    jobs_by_id = jobs.defer("estimate", "hardware", "chosen").in_bulk()
    forecasts = _forecast_starts(view)
    ending = get_visible_jobs(user).filter(id__in={each.ends for each in forecasts.values()})
    names = dict(ending.values_list("id", "name"))
    rows = []
    for entry in shown:
        if (job := jobs_by_id.get(entry.job.id)) is None:
            continue
        start = forecasts.get(job.id)
        rows.append(
            {
                "id": job.id,
                "place": places[job.id],
                "name": job.name,
                "owner": job.owner.get_username(),
                "project": job.project,
                "layout": format_layout(job.spec),
                "num_slots": job.num_slots,
                "priority": job.priority,
                "points": entry.points.total,
                "parts": entry.points._asdict(),
                "held": job.held,
                "reason": entry.block_reason or job.wait_reason,
                "starts": None if start is None else (view.now + timedelta(seconds=start.in_s)),
                "starts_when": _format_start_event(start, names),
                "created": job.created,
            }
        )
    return rows


def _format_start_event(start: Forecast | None, names: dict[str, str]) -> str:
    if start is None:
        return ""
    if not start.ends:
        return "in the next scheduling pass"
    return f'after job "{names[start.ends]}" ends' if start.ends in names else "after another job ends"


def _forecast_starts(view: QueueSnapshot) -> dict[str, Forecast]:
    if view.paused:
        return {}
    free = [entry.job for entry in view.queue if not entry.block_reason]
    durations = predict_durations(Job.objects.filter(id__in=[job.id for job in free[:MAX_FORECAST_JOBS]]))
    return forecast(free, view.hosts, load_running_attempts(view.now), durations, view.quotas)


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


def load_running_attempts(now: datetime) -> list[RunningAttempt]:
    """Load attempts that use slots, with predicted seconds until they end.

    The prediction uses measured step times if available. It is 0 for attempts that are CANCELLING, and None without
    contact.
    """
    attempts = list(
        Attempt.objects.filter(ended__isnull=True, job__status__in=ACTIVE)
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
        found.append(RunningAttempt(job.id, job.project, shares, left_s))
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


class PointParts(TypedDict):
    """Terms of the scheduling points of a job."""

    priority: float
    waited: float
    share: float
    moved: float


class QueuedRow(TypedDict):
    """A queued job."""

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
    """The queue, with the jobs that the user may see."""

    paused: bool
    queued: Annotated[int, Field(description="Number of all queued jobs, also those that the user may not see.")]
    jobs: list[QueuedRow]


class UnchangedJob(TypedDict):
    """A requested job that an action did not change."""

    job: str
    reason: str


class ActionResult(TypedDict):
    """Jobs that an action changed, and why it did not change the others."""

    changed: list[str]
    unchanged: list[UnchangedJob]


class MoveResult(TypedDict):
    """Whether the job moved, and the reason if it did not."""

    moved: bool
    reason: str


class StartableJob(TypedDict):
    """A queued job that would start."""

    id: str
    name: str


class WhatIfResult(TypedDict):
    """Jobs that would start in the next pass only because of the change."""

    jobs: list[StartableJob]


class PauseResult(TypedDict):
    """Whether it is paused now, and whether the request changed that."""

    paused: bool
    changed: bool
