"""Describe what would happen to a draft if it were submitted now: fit, host and predicted start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from django.conf import settings
from django.contrib.auth.models import User
from typing_extensions import TypedDict

from jobs.models import Job, Project
from jobs.planning.fit import Fit, compute_fit
from jobs.planning.hosts import AvailableHost, get_slot_device
from jobs.queue.scheduling.forecast import MOST_JOBS, forecast
from jobs.queue.scheduling.placement import decide
from jobs.queue.scheduling.policy import Rates, Use, factors, standing
from jobs.queue.scheduling.states import Waiting
from jobs.queue.view import View, lasting, running, view
from planner.facts.kinds import compute_slot_demand
from planner.facts.spec import JobSpec
from planner.facts.validation import format_count

DRAFT = ""  # the id of the draft among the queued jobs
WAITS = "The job would wait."


class Readiness(TypedDict):
    """The badge next to Submit. With `confirm`, the form asks for confirmation before it submits."""

    state: Literal["ready", "waits", "warns", "unfit"]
    message: str
    confirm: bool


def describe_readiness(
    user: Any, spec: JobSpec, estimate: Mapping[str, Any] | None, there: Sequence[AvailableHost]
) -> Readiness:
    """Describe what would happen to a valid draft.

    `estimate` is for the hardware that the job would run on. `there` comes from `hosts_there`.
    """
    fit = compute_fit(spec, estimate, there)
    starts, start = _predict_start(cast(User, user), spec, there)
    return {
        "state": _state(fit, starts=starts),
        "message": f"{fit.summary} {start}".strip(),
        "confirm": fit.state == "unfit",
    }


def _state(fit: Fit, *, starts: bool) -> Literal["ready", "waits", "warns", "unfit"]:
    if fit.state == "unfit":
        return "unfit"
    if fit.state in ("tight", "uncertain"):
        return "warns"
    return "ready" if starts else "waits"


def _predict_start(user: User, spec: JobSpec, there: Sequence[AvailableHost]) -> tuple[bool, str]:
    """Return whether the draft would start now, and a sentence about its start."""
    if spec.resources.engine != "hosts":
        return False, "Slurm decides when the job starts."
    device = get_slot_device(spec, there)
    if not any(host.device == device and host.is_live for host in there):
        return False, f"No {device.upper()} host is connected. {WAITS}"
    seen = view()
    if seen.paused:
        return False, f"The queue is paused. {WAITS}"
    if spec.after:
        return False, f"Starts after {format_count(len(set(spec.after)), 'other job')}."
    draft = _as_queued(user, spec, device, seen)
    queue = [*(queued.job for queued in seen.queue if not queued.bar), draft]
    decided = decide(queue, seen.hosts, quotas=seen.quotas)
    for placement in decided.placements:
        if placement.job == DRAFT:
            hosts = [share.host for share in placement.shares]
            return True, f"Starts now on {hosts[0] if len(hosts) == 1 else f'{len(hosts)} hosts'}."
    if DRAFT in decided.refused:
        return False, f"Project {spec.project} has already reached its slot limit. {WAITS}"
    return False, _predict_wait(queue, seen) or f"Not enough slots are free now. {WAITS}"


def _predict_wait(queue: list[Waiting], seen: View) -> str:
    """Return when the draft would start after others end, or an empty text if that is unknown."""
    if len(queue) > MOST_JOBS:
        return ""
    durations = lasting(Job.objects.filter(id__in=[job.id for job in queue if job.id != DRAFT]))
    expected = forecast(queue, seen.hosts, running(seen.now), durations, seen.quotas).get(DRAFT)
    return "" if expected is None else f"Starts in about {_minutes(expected.in_s)}."


def _minutes(seconds: float) -> str:
    if seconds < 60:
        return "1 min"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{round(minutes / 60)} h"


def _as_queued(user: User, spec: JobSpec, device: str, seen: View) -> Waiting:
    """Return the draft as the scheduler would see it at the end of the queue."""
    asked, resources = compute_slot_demand(spec), spec.resources
    share = factors({p.name: Use(p.used, p.weight) for p in Project.objects.all()})
    rates = Rates(settings.AGEING_PER_HOUR, settings.SHARE_POINTS)
    return Waiting(
        id=DRAFT,
        name=spec.name,
        owner=user.pk,
        device=device,
        num_slots=asked.num_slots,
        wanted_host=resources.host or "",
        priority=0,
        created=seen.now,
        units=asked.units,
        max_hosts=asked.max_hosts,
        standing=standing(0, 0.0, share.get(spec.project, 1.0), 0, rates).points,
        project=spec.project,
        pool=resources.pool or "",
        labels=frozenset(resources.labels),
        limit_s=spec.run.time_limit_s,
    )
