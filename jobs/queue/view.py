"""Build the queue as its page and REST show it, with predicted starts."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Annotated, Any, NamedTuple

from django.utils import timezone
from pydantic import Field
from typing_extensions import TypedDict

from jobs.core.access import get_visible_jobs
from jobs.core.job_details import Timestamp
from jobs.core.kinds import format_layout
from jobs.models import Job
from jobs.queue.scheduling.placement import MAX_FORECAST_JOBS, Forecast, forecast, sort_queue
from jobs.queue.scheduling.predicted_ends import load_running_attempts, predict_durations
from jobs.queue.scheduling.snapshot import QueueEntry, is_queue_paused, load_hosts, load_queue, load_quotas
from jobs.queue.scheduling.states import HostState, Quota


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
