"""Predict whether a draft would start, and which queued jobs would start after a change of the queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

from django.contrib.auth.models import User
from typing_extensions import TypedDict

from jobs.core.text import is_storable, parse_whole_number
from jobs.models import Job, Pool
from jobs.planning.fit import compute_fit
from jobs.planning.hosts import AvailableHost, get_slot_device
from jobs.queue.scheduling.placement import MAX_FORECAST_JOBS, decide, forecast
from jobs.queue.scheduling.predicted_ends import load_running_attempts, predict_durations
from jobs.queue.scheduling.snapshot import load_point_factors
from jobs.queue.scheduling.states import HostState, QueuedJob, compute_points
from jobs.queue.staff_actions import MAX_PRIORITY, MIN_PRIORITY
from jobs.queue.view import QueueSnapshot, load_queue_snapshot
from planner.facts.kinds import compute_slot_demand
from planner.facts.spec import JobSpec
from planner.facts.validation import Problem, SpecError, format_count

QUESTION_FIELDS = ("slots", "pool", "job", "priority")
MAX_SLOTS = 65536
DRAFT = ""  # ID of the draft in the queue
WAITS = "The job would wait."


class Question(NamedTuple):
    """A hypothetical change of the queue. Empty fields change nothing."""

    slots: int = 0  # of an additional host of each hardware model
    pool: str = ""  # paused pool that would resume
    job: str = ""  # job that would get `priority`
    priority: int = 0


def parse_question(query: Mapping[str, str], view: QueueSnapshot) -> Question:
    """Parse the query of a request.

    Raises:
        SpecError: With all problems. An empty query is one.
    """
    fields = {name: query[name].strip() for name in QUESTION_FIELDS if query.get(name, "").strip()}
    slots = parse_whole_number(fields.get("slots", "0"), 0, MAX_SLOTS)
    text = fields.get("priority", "0")
    magnitude = parse_whole_number(text.removeprefix("-"), 0, MAX_PRIORITY)
    pool, job = fields.get("pool", ""), fields.get("job", "")
    problems = []
    if slots is None:
        problems.append(Problem("slots", f"`slots` is invalid. Use a whole number from 0 to {MAX_SLOTS}."))
    if magnitude is None:
        limits = f"{MIN_PRIORITY} to {MAX_PRIORITY}"
        problems.append(Problem("priority", f"`priority` is invalid. Use a whole number from {limits}."))
    if pool and not (is_storable(pool) and Pool.objects.filter(name=pool).exists()):
        problems.append(Problem("pool", "The pool does not exist."))
    if job and job not in {entry.job.id for entry in view.queue}:
        problems.append(Problem("job", "The job does not exist, or is not queued."))
    if ("job" in fields) != ("priority" in fields):
        missing, other = ("priority", "job") if "job" in fields else ("job", "priority")
        problems.append(Problem(missing, f"`{missing}` is missing. Set `{missing}` and `{other}` together."))
    if not fields:
        problems.append(
            Problem("slots", "The request changes nothing. Set `slots`, `pool`, or `job` together with `priority`.")
        )
    if problems or slots is None or magnitude is None:
        raise SpecError(problems)
    return Question(slots, pool, job, -magnitude if text.startswith("-") else magnitude)


def list_starts(view: QueueSnapshot, question: Question) -> list[str]:
    """List the jobs that would start now only because of the change."""
    queue = [entry.job for entry in view.queue if not entry.block_reason]
    hosts = [host._replace(paused="" if host.paused == question.pool else host.paused) for host in view.hosts]
    if question.slots:
        slots = tuple(range(question.slots))
        hosts += [
            HostState(f"one more {name or device}", device, question.slots, slots, device_name=name)
            for device, name in dict.fromkeys((host.device, host.device_name) for host in hosts)
        ]
    changed = [
        job._replace(priority=question.priority, points=job.points - job.priority + question.priority)
        if job.id == question.job
        else job
        for job in queue
    ]
    starting = {placement.job for placement in decide(queue, view.hosts, quotas=view.quotas).placements}
    placements = decide(changed, hosts, quotas=view.quotas).placements
    return [placement.job for placement in placements if placement.job not in starting]


class Readiness(TypedDict):
    """The badge next to Submit. With `confirm`, the form asks for confirmation before it submits."""

    state: Literal["ready", "waits", "warns", "unfit"]
    message: str
    confirm: bool


def describe_readiness(
    user: Any, spec: JobSpec, estimate: Mapping[str, Any] | None, hosts: Sequence[AvailableHost]
) -> Readiness:
    """Describe what would happen to a valid draft if it were submitted now.

    `estimate` is for the hardware that the job would run on. `hosts` comes from `list_hosts`.
    """
    fit = compute_fit(spec, estimate, hosts)
    starts, start = _predict_start(cast(User, user), spec, hosts)
    state: Literal["ready", "waits", "warns", "unfit"] = "ready" if starts else "waits"
    if fit.state == "unfit":
        state = "unfit"
    elif fit.state in ("tight", "uncertain"):
        state = "warns"
    return {"state": state, "message": f"{fit.summary} {start}".strip(), "confirm": fit.state == "unfit"}


def _explain_sick_hosts(spec: JobSpec, device: str, hosts: Sequence[AvailableHost]) -> str:
    """Return why all connected hosts of a draft are sick, or an empty text."""
    wanted = spec.resources.host
    live = [host for host in hosts if host.device == device and host.is_live and wanted in (None, host.name)]
    if not live or not all(host.problem for host in live):
        return ""
    first = f"host {live[0].name} is sick: {live[0].problem}"
    return f"H{first[1:]}" if len(live) == 1 else f"All {len(live)} connected hosts are sick. For example, {first}"


def _predict_start(user: User, spec: JobSpec, hosts: Sequence[AvailableHost]) -> tuple[bool, str]:
    """Return whether the draft would start now, and a sentence about its start."""
    if spec.resources.engine != "hosts":
        return False, "Slurm decides when the job starts."
    device = get_slot_device(spec, hosts)
    if not any(host.device == device and host.is_live for host in hosts):
        return False, f"No {device.upper()} host is connected. {WAITS}"
    if reason := _explain_sick_hosts(spec, device, hosts):
        return False, f"{reason} {WAITS}"
    view = load_queue_snapshot()
    if view.paused:
        return False, f"The queue is paused. {WAITS}"
    if spec.after:
        return False, f"Starts after {format_count(len(set(spec.after)), 'other job')}."
    queue = [*(entry.job for entry in view.queue if not entry.block_reason), _build_draft(user, spec, device, view)]
    decision = decide(queue, view.hosts, quotas=view.quotas)
    for placement in decision.placements:
        if placement.job == DRAFT:
            names = [share.host for share in placement.shares]
            return True, f"Starts now on {names[0] if len(names) == 1 else f'{len(names)} hosts'}."
    if DRAFT in decision.quota_refusals:
        return False, f"Project {spec.project} has already reached its slot limit. {WAITS}"
    return False, _predict_wait(queue, view) or f"Not enough slots are free now. {WAITS}"


def _predict_wait(queue: list[QueuedJob], view: QueueSnapshot) -> str:
    """Return when the draft would start after others end, or an empty text if that is unknown."""
    if len(queue) > MAX_FORECAST_JOBS:
        return ""
    durations = predict_durations(Job.objects.filter(id__in=[job.id for job in queue if job.id != DRAFT]))
    starts = forecast(queue, view.hosts, load_running_attempts(view.now), durations, view.quotas)
    if DRAFT not in starts:
        return ""
    minutes = max(1, round(starts[DRAFT].in_s / 60))
    return f"Starts in about {f'{minutes} min' if minutes < 120 else f'{round(minutes / 60)} h'}."


def _build_draft(user: User, spec: JobSpec, device: str, view: QueueSnapshot) -> QueuedJob:
    """Return the draft as the scheduler would see it at the end of the queue."""
    demand, resources = compute_slot_demand(spec), spec.resources
    share_factors, rates = load_point_factors()
    return QueuedJob(
        id=DRAFT,
        name=spec.name,
        owner=user.pk,
        device=device,
        num_slots=demand.num_slots,
        wanted_host=resources.host or "",
        priority=0,
        created=view.now,
        units=demand.units,
        max_hosts=demand.max_hosts,
        points=compute_points(0, 0.0, share_factors.get(spec.project, 1.0), 0, rates).total,
        project=spec.project,
        pool=resources.pool or "",
        labels=frozenset(resources.labels),
        limit_s=spec.run.time_limit_s,
    )
