"""The queue as its page and REST show it: order, points, why each waits, when it should start."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.utils import timezone

from jobs.access import visible_jobs
from jobs.kinds import KINDS, layout_words
from jobs.models import Attempt, Job, StateChange, Status
from jobs.queue.scheduling.forecast import MOST_JOBS, Forecast, Running, forecast, started_if
from jobs.queue.scheduling.placement import in_order, place
from jobs.queue.scheduling.snapshot import Queued, hosts_now, queue_now, queue_paused, quotas_now
from jobs.queue.scheduling.states import HostState, Quota, Share

RUNS = (Status.STARTING, Status.RUNNING, Status.UNREACHABLE, Status.CANCELLING)


class View(NamedTuple):
    """Queue and hosts as a page was asked for."""

    now: datetime
    queue: list[Queued]  # in order
    hosts: list[HostState]
    quotas: dict[str, Quota]
    paused: bool


def view() -> View:
    now = timezone.now()
    queue = {queued.job.id: queued for queued in queue_now(now)}
    order = [queue[job.id] for job in in_order(queued.job for queued in queue.values())]
    return View(now, order, list(hosts_now(now).values()), quotas_now(), queue_paused())


def rows(seen: View, user: Any, shown: Iterable[Queued]) -> list[dict[str, Any]]:
    """Lines for jobs of the queue that the user may see."""
    places = {queued.job.id: number for number, queued in enumerate(seen.queue, 1)}
    ids = [queued.job.id for queued in shown]
    jobs = visible_jobs(user).filter(id__in=ids).defer("estimate", "hardware", "chosen").in_bulk()
    told = _forecasts(seen)
    names = dict(visible_jobs(user).filter(id__in={f.ends for f in told.values()}).values_list("id", "name"))
    return [
        _row(seen, queued, jobs[queued.job.id], places[queued.job.id], told.get(queued.job.id), names)
        for queued in shown
        if queued.job.id in jobs
    ]


def _row(
    seen: View, queued: Queued, job: Job, place: int, told: Forecast | None, names: dict[str, str]
) -> dict[str, Any]:
    return {
        "id": job.id,
        "place": place,
        "name": job.name,
        "owner": job.owner.get_username(),
        "project": job.project,
        "layout": layout_words(job.spec),
        "num_slots": job.num_slots,
        "priority": job.priority,
        "points": queued.standing.points,
        "parts": queued.standing._asdict(),
        "held": job.held,
        "reason": queued.bar or job.wait_reason,
        "starts": None if told is None else (seen.now + timedelta(seconds=told.in_s)),
        "starts_when": _when(told, names),
        "created": job.created,
    }


def _when(told: Forecast | None, names: dict[str, str]) -> str:
    if told is None:
        return ""
    if not told.ends:
        return "with the next pass"
    return f"when {names[told.ends]} ends" if told.ends in names else "when another job ends"


def _forecasts(seen: View) -> dict[str, Forecast]:
    """Nothing while the queue is paused: nobody can tell for how long."""
    if seen.paused:
        return {}
    free = [queued.job for queued in seen.queue if not queued.bar]
    durations = lasting(Job.objects.filter(id__in=[job.id for job in free[:MOST_JOBS]]))
    return forecast(free, seen.hosts, running(seen.now), durations, seen.quotas)


def lasting(jobs: Any) -> dict[str, float | None]:
    """Predicted seconds of whole attempts: steps of the estimate, at most the time limit; None where neither is."""
    found: dict[str, float | None] = {}
    rows = jobs.values_list("id", "kind", "spec__train__steps", "estimate__time__step_s", "time_limit_s")
    for id, kind, steps, step_s, limit_s in rows:
        known = [float(limit_s)] if limit_s else []
        if KINDS[kind].steps == "asked" and steps and step_s:
            known.append(steps * step_s)
        found[id] = min(known, default=None)
    return found


def running(now: datetime) -> list[Running]:
    """Attempts that hold slots, with the seconds they should still run."""
    attempts = Attempt.objects.filter(ended__isnull=True, job__status__in=RUNS).prefetch_related("members__allocations")
    unended = list(attempts.select_related("job").only("number", "created", "job__id", "job__project"))
    durations = lasting(Job.objects.filter(id__in=[attempt.job_id for attempt in unended]))
    began = {
        (job, number): at
        for job, number, at in StateChange.objects.filter(
            job__in=[attempt.job_id for attempt in unended], status=Status.RUNNING
        ).values_list("job_id", "attempt", "at")
    }
    found = []
    for attempt in unended:
        shares = tuple(
            Share(member.host_name, tuple(sorted(held.slot for held in member.allocations.all())))
            for member in attempt.members.all()
        )
        lasts = durations.get(attempt.job_id)
        since = (now - began.get((attempt.job_id, attempt.number), now)).total_seconds()
        left = None if lasts is None else max(0.0, lasts - since)
        found.append(Running(attempt.job_id, attempt.job.project, shares, left))
    return found


def what_if(seen: View, *, slots: int = 0, pool: str = "", job: str = "", priority: int = 0) -> list[str]:
    """Jobs that would start now if a host with so many slots more joined each model, a paused pool went on, or a job
    had another priority; those that start anyway are left out.
    """
    free = [queued.job for queued in seen.queue if not queued.bar]
    now = place(free, seen.hosts, quotas=seen.quotas)
    hosts = [host._replace(paused="" if host.paused == pool else host.paused) for host in seen.hosts]
    if slots:
        models = {(host.device, host.device_name): host for host in hosts}
        hosts += [
            HostState(f"one more {name or device}", device, slots, tuple(range(slots)), device_name=name)
            for device, name in models
        ]
    changed = [
        each._replace(priority=priority, standing=each.standing - each.priority + priority) if each.id == job else each
        for each in free
    ]
    return started_if(changed, hosts, seen.quotas, otherwise=now)
