"""Answer what would start now with more slots, a resumed pool, or another priority.

Describe what would happen to a draft if it were submitted now: fit, host and predicted start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

from django.conf import settings
from django.contrib.auth.models import User
from typing_extensions import TypedDict

from jobs.core.text import is_storable, parse_whole_number
from jobs.models import Job, Pool, Project
from jobs.planning.fit import Fit, compute_fit
from jobs.planning.hosts import AvailableHost, get_slot_device
from jobs.queue.scheduling.placement import MAX_FORECAST_JOBS, decide, forecast, list_additional_starts
from jobs.queue.scheduling.states import (
    HostState,
    PointRates,
    ProjectUse,
    QueuedJob,
    compute_points,
    compute_share_factors,
)
from jobs.queue.staff_actions import MAX_PRIORITY, MIN_PRIORITY
from jobs.queue.view import QueueView, load_running_attempts, load_view, predict_durations
from planner.facts.kinds import compute_slot_demand
from planner.facts.spec import JobSpec
from planner.facts.validation import Problem, SpecError, format_count

QUESTION_FIELDS = ("slots", "pool", "job", "priority")


MAX_SLOTS = 65536


class Question(NamedTuple):
    """Of each what is not asked is empty; a job is asked of together with its priority."""

    slots: int = 0  # of a host that joins each model
    pool: str = ""  # that is paused, and would go on
    job: str = ""
    priority: int = 0


def parse_question(given: Mapping[str, str], seen: QueueView) -> Question:
    """What a query asks; what stands there empty was not given.

    Raises:
        SpecError: naming every part that makes no sense, or that nothing was asked.
    """
    told = {name: given[name].strip() for name in QUESTION_FIELDS if given.get(name, "").strip()}
    slots = parse_whole_number(told.get("slots", "0"), 0, MAX_SLOTS)
    priority = _priority(told.get("priority", "0"))
    pool, job = told.get("pool", ""), told.get("job", "")
    problems = []
    if slots is None:
        problems.append(Problem("slots", f"`slots` is invalid. Use a whole number from 0 to {MAX_SLOTS}."))
    if priority is None:
        problems.append(
            Problem("priority", f"`priority` is invalid. Use a whole number from {MIN_PRIORITY} to {MAX_PRIORITY}.")
        )
    if pool and not (is_storable(pool) and Pool.objects.filter(name=pool).exists()):
        problems.append(Problem("pool", "The pool does not exist."))
    if job and job not in {queued.job.id for queued in seen.queue}:
        problems.append(Problem("job", "The job does not exist, or is not queued."))
    if ("job" in told) != ("priority" in told):
        missing, other = ("priority", "job") if "job" in told else ("job", "priority")
        problems.append(Problem(missing, f"`{missing}` is missing. Set `{missing}` and `{other}` together."))
    if not told:
        problems.append(
            Problem("slots", "The request changes nothing. Set `slots`, `pool`, or `job` together with `priority`.")
        )
    if problems or slots is None or priority is None:
        raise SpecError(problems)
    return Question(slots, pool, job, priority)


def list_starts(seen: QueueView, question: Question) -> list[str]:
    """Jobs that would start now if it were so; those that start anyway are left out."""
    free = [queued.job for queued in seen.queue if not queued.block_reason]
    now = decide(free, seen.hosts, quotas=seen.quotas)
    hosts = [host._replace(paused="" if host.paused == question.pool else host.paused) for host in seen.hosts]
    if question.slots:
        models = {(host.device, host.device_name): host for host in hosts}
        indices = tuple(range(question.slots))
        hosts += [
            HostState(f"one more {name or device}", device, question.slots, indices, device_name=name)
            for device, name in models
        ]
    priority = question.priority
    changed = [
        each._replace(priority=priority, points=each.points - each.priority + priority)
        if each.id == question.job
        else each
        for each in free
    ]
    return list_additional_starts(changed, hosts, seen.quotas, otherwise=now)


def _priority(text: str) -> int | None:
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text)
    number = parse_whole_number(digits, 0, MAX_PRIORITY)
    return None if number is None else sign * number


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

    `estimate` is for the hardware that the job would run on. `there` comes from `list_hosts`.
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
    seen = load_view()
    if seen.paused:
        return False, f"The queue is paused. {WAITS}"
    if spec.after:
        return False, f"Starts after {format_count(len(set(spec.after)), 'other job')}."
    draft = _as_queued(user, spec, device, seen)
    queue = [*(queued.job for queued in seen.queue if not queued.block_reason), draft]
    decided = decide(queue, seen.hosts, quotas=seen.quotas)
    for placement in decided.placements:
        if placement.job == DRAFT:
            hosts = [share.host for share in placement.shares]
            return True, f"Starts now on {hosts[0] if len(hosts) == 1 else f'{len(hosts)} hosts'}."
    if DRAFT in decided.quota_refusals:
        return False, f"Project {spec.project} has already reached its slot limit. {WAITS}"
    return False, _predict_wait(queue, seen) or f"Not enough slots are free now. {WAITS}"


def _predict_wait(queue: list[QueuedJob], seen: QueueView) -> str:
    """Return when the draft would start after others end, or an empty text if that is unknown."""
    if len(queue) > MAX_FORECAST_JOBS:
        return ""
    durations = predict_durations(Job.objects.filter(id__in=[job.id for job in queue if job.id != DRAFT]))
    expected = forecast(queue, seen.hosts, load_running_attempts(seen.now), durations, seen.quotas).get(DRAFT)
    return "" if expected is None else f"Starts in about {_minutes(expected.in_s)}."


def _minutes(seconds: float) -> str:
    if seconds < 60:
        return "1 min"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{round(minutes / 60)} h"


def _as_queued(user: User, spec: JobSpec, device: str, seen: QueueView) -> QueuedJob:
    """Return the draft as the scheduler would see it at the end of the queue."""
    asked, resources = compute_slot_demand(spec), spec.resources
    share = compute_share_factors({p.name: ProjectUse(p.used, p.weight) for p in Project.objects.all()})
    rates = PointRates(settings.AGEING_PER_HOUR, settings.SHARE_POINTS)
    return QueuedJob(
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
        points=compute_points(0, 0.0, share.get(spec.project, 1.0), 0, rates).total,
        project=spec.project,
        pool=resources.pool or "",
        labels=frozenset(resources.labels),
        limit_s=spec.run.time_limit_s,
    )
