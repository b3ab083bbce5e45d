"""Load the scheduler's input: queued jobs, hosts, quotas, and why jobs are blocked. Specs are not read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from functools import lru_cache
from typing import NamedTuple

from django.conf import settings
from django.contrib.auth.models import User
from django.db.models import Count, Exists, F, OuterRef, Q, QuerySet, Sum, TextField
from django.db.models.functions import Cast
from django.utils import timezone

from jobs.core.access import may_submit_to
from jobs.models import (
    DEFAULT_PROJECT,
    EXTERNAL_ENGINE,
    HOST_SILENT_AFTER,
    TERMINAL,
    Attempt,
    Dependency,
    Host,
    Job,
    KeptHost,
    Member,
    Membership,
    Pool,
    Project,
    QueueState,
    Reservation,
    Role,
    SlotAllocation,
    Status,
    find_host_problem,
)
from jobs.queue.scheduling.predicted_ends import load_running_attempts
from jobs.queue.scheduling.states import (
    Booking,
    HostState,
    Occupant,
    PointRates,
    PriorityPoints,
    ProjectUse,
    QueuedJob,
    Quota,
    compute_points,
    compute_share_factors,
)

QUEUE_PAUSED = "The queue is paused, so no job starts."
JOB_HELD = "The job is held until staff release it."
OWNER_DISABLED = "The account of the owner is disabled. The job can start after staff enable the account."
OWNER_NOT_SUBMITTER = "The owner is no longer allowed to submit jobs to project {}, so the job does not start."
OWNER_FIELDS = ("owner__is_active", "owner__is_staff")
MAX_RESERVATION_LEAD = timedelta(days=366)  # the maximum time limit of a job is a year
AVOID_FAULTY_HOST = timedelta(minutes=15)  # longer than a host stays closed after failed launches
# Between the last messages of a host and its supervisor, and between the ends of the lease and the ranks.
LEASE_MARGIN = timedelta(seconds=30)


class QueueEntry(NamedTuple):
    """A queued job, its stored wait reason, and why it cannot start even if slots are free ("": it can)."""

    job: QueuedJob
    attempt: int
    reason: str
    block_reason: str
    points: PriorityPoints


class DependencyState(NamedTuple):
    """Jobs that another job waits for: those that have not ended, and those that did not succeed."""

    unended: list[str]
    failed: list[str]


def is_queue_paused() -> bool:
    return QueueState.objects.filter(paused=True).exists()


def load_point_factors() -> tuple[dict[str, float], PointRates]:
    """Return the fair-share factors of all projects, and the rates of priority points."""
    factors = compute_share_factors({p.name: ProjectUse(p.used, p.weight) for p in Project.objects.all()})
    return factors, PointRates(settings.AGEING_PER_HOUR, settings.SHARE_POINTS)


def load_queue(now: datetime) -> list[QueueEntry]:
    """Load all queued jobs for connected hosts."""
    attempts = Attempt.objects.filter(job=OuterRef("pk"), number=OuterRef("attempt"))
    rows = Job.objects.filter(status=Status.QUEUED, engine="hosts").values_list(
        "id", "name", "owner", "device", "num_slots", "wanted_host", "priority", "created",
        "unit", "wide_unit", "max_hosts", "project", "pool", Cast("labels", TextField()), "time_limit_s",
        *OWNER_FIELDS, "attempt", "wait_reason", "held", "moved", Exists(attempts),
    )  # fmt: skip
    head_hosts: dict[str, list[str]] = {}
    for job, host in KeptHost.objects.values_list("job_id", "host__name"):
        head_hosts.setdefault(job, []).append(host)
    retries = {id for id, *_, attempt, _reason, _held, _moved, _has_attempt in rows if attempt > 1}
    dependencies, running = load_dependencies(), find_running_attempts(retries, now)
    checkpoint_hosts = _load_checkpoint_hosts() if retries else {}
    faulty_hosts = _load_faulty_hosts(retries, now) if retries else {}
    share_factors, rates = load_point_factors()
    rights, found = SubmitRights(), []
    for (
        id, name, owner, device, num_slots, wanted, priority, created,
        unit, wide_unit, max_hosts, project, pool, labels, limit_s,
        active, staff, attempt, reason, is_held, moved, has_attempt,
    ) in rows:  # fmt: skip
        waited_s = (now - created).total_seconds()
        points = compute_points(priority, waited_s, share_factors.get(project, 1.0), moved, rates)
        queued = QueuedJob(
            id, name, owner, device, num_slots, wanted, priority, created, tuple(head_hosts.get(id, ())),
            (wide_unit, unit) if wide_unit != unit else (unit,), max_hosts, points.total, project, pool,
            _parse_labels(labels), limit_s, checkpoint_hosts.get(id, ""),
            frozenset(faulty_hosts.get(id, ())),
        )  # fmt: skip
        if has_attempt:
            block_reason = f"Attempt {attempt} already started on a host. Cancel the job, then queue it again."
        elif owner_reason := rights.explain_missing(owner, project, active=active, staff=staff):
            block_reason = owner_reason
        else:
            block_reason = _explain_hold(id, dependencies, is_held=is_held) or running.get(id, "")
        found.append(QueueEntry(queued, attempt, reason, block_reason, points))
    return found


def _load_checkpoint_hosts() -> dict[str, str]:
    """Return the host with the latest checkpoint of earlier attempts, by queued job."""
    saved = Attempt.objects.exclude(checkpoint="").filter(job__status=Status.QUEUED, members__node=0)
    return dict(saved.order_by("number").values_list("job_id", "members__host_name"))


def _load_faulty_hosts(queued: set[str], now: datetime) -> dict[str, list[str]]:
    """Return the hosts that recently made attempts of queued jobs fail."""
    failed = Member.objects.filter(attempt__job_id__in=queued, outcome="failed", ended__gte=now - AVOID_FAULTY_HOST)
    found: dict[str, list[str]] = {}
    rows = failed.filter(attempt__exit__host_fault__in=("launch", "ranks"))
    for job, host in rows.values_list("attempt__job_id", "host_name"):
        found.setdefault(job, []).append(host)
    return found


@lru_cache(maxsize=1000)
def _parse_labels(text: str) -> frozenset[str]:
    """Parse labels once per text, because thousands of jobs have equal labels."""
    return frozenset(json.loads(text))


def find_running_attempts(queued: set[str], now: datetime | None = None) -> Mapping[str, str]:
    """Return queued jobs whose earlier attempt may still run, with reasons. Two attempts must never train at once.

    A gang on a silent host ends when its lease ends. Other lost attempts are stopped as soon as they have contact.
    A job on one host has no lease: staff who mark its host as lost confirm that the attempt has ended.
    """
    if not queued:
        return {}
    now = now or timezone.now()
    lost = Member.objects.filter(attempt__job_id__in=queued, outcome="lost").order_by()
    # A supervisor can report a lost attempt even if its host worker is silent.
    reported = lost.filter(heard__gt=F("ended"), heard__gte=now - HOST_SILENT_AFTER)
    reasons = {
        job: f"waiting until the supervisor process on host {name} ends attempt {number}"
        for job, number, name in reported.values_list("attempt__job_id", "attempt__number", "host_name")
    }
    # Reports from before a host was marked as lost do not count.
    holding_hosts = Host.objects.present().exclude(holding=[]).exclude(given_up__gt=F("last_seen"))
    for name, holding in holding_hosts.values_list("name", "holding"):
        for job, number, _ in holding:
            if job in queued:
                reasons[job] = f"waiting until host {name} ends attempt {number}"
    lease = timedelta(seconds=settings.LEASE_S) + LEASE_MARGIN
    silent_gangs = lost.filter(host__last_seen__lt=F("ended"), attempt__members__node__gt=0).distinct()
    rows = silent_gangs.values_list("attempt__job_id", "attempt__number", "host_name", "host__last_seen", "heard")
    for job, number, host, last_seen, supervisor_seen in rows:
        ends = max(last_seen, supervisor_seen or last_seen) + lease
        if job not in reasons and ends > now:
            until = f"{ends:%H:%M:%S} UTC"
            reasons[job] = f"attempt {number} may still run on silent host {host} until its lease ends at {until}"
    return reasons


def load_dependencies() -> dict[str, DependencyState]:
    """Return the state of dependencies by queued job. A deleted dependency counts as failed."""
    pairs = list(Dependency.objects.filter(job__status=Status.QUEUED).values_list("job_id", "needs"))
    known = dict(Job.objects.filter(id__in={needs for _, needs in pairs}).values_list("id", "status")) if pairs else {}
    found: dict[str, DependencyState] = {}
    for job, needs in pairs:
        state = found.setdefault(job, DependencyState([], []))
        status = known.get(needs, Status.LOST)
        if status not in TERMINAL:
            state.unended.append(needs)
        elif status != Status.SUCCEEDED:
            state.failed.append(needs)
    return found


def explain_blocked_jobs(jobs: Iterable[Job]) -> dict[str, str]:
    """Return why queued jobs of any engine cannot start even if slots are free, by ID of the blocked jobs."""
    jobs = list(jobs)
    if is_queue_paused():
        return dict.fromkeys((job.id for job in jobs), QUEUE_PAUSED)
    dependencies, rights, reasons = load_dependencies(), SubmitRights(), {}
    held = {job.id: job.held for job in jobs}
    rows = Job.objects.filter(id__in=held).values_list("id", "owner", "project", *OWNER_FIELDS)
    for id, owner, project, active, staff in rows:
        owner_reason = rights.explain_missing(owner, project, active=active, staff=staff)
        if reason := owner_reason or _explain_hold(id, dependencies, is_held=held[id]):
            reasons[id] = reason
    return reasons


def _explain_hold(job: str, dependencies: Mapping[str, DependencyState], *, is_held: bool) -> str:
    """Return that a job is held or waits for other jobs, or an empty text."""
    if is_held:
        return JOB_HELD
    if job not in dependencies or not dependencies[job].unended:
        return ""
    needs = dependencies[job].unended
    if len(needs) == 1:
        return f"The job waits until job {needs[0]} has ended."
    more = f" and {len(needs) - 3} more" if len(needs) > 3 else ""
    return f"The job waits until jobs {', '.join(sorted(needs)[:3])}{more} have ended."


def load_hosts(now: datetime) -> dict[int, HostState]:
    """Load all hosts by primary key."""
    reservations = Reservation.objects.filter(ends__gt=now, starts__lt=now + MAX_RESERVATION_LEAD)
    bookings = [
        (host, pool, Booking(project, (starts - now).total_seconds()))
        for host, pool, project, starts in reservations.values_list("host_id", "pool__name", "project__name", "starts")
    ]
    occupants = _load_occupants(now)
    return {
        key: host._replace(
            bookings=tuple(booking for host_key, pool, booking in bookings if host_key == key or pool in host.pools),
            occupants=tuple(occupants.get(key, ())),
        )
        for key, host in load_host_slots(now).items()
    }


def count_free_slots() -> dict[int, int]:
    """Return the number of slots that the queue can use now by host. Hosts that take no jobs have 0."""
    return {key: len(host.free) if host.takes_jobs else 0 for key, host in load_host_slots(timezone.now()).items()}


def load_host_slots(now: datetime) -> dict[int, HostState]:
    """Load all hosts by primary key, without bookings and occupants.

    A slot is free if it is not allocated and the host reports no live attempt there.
    """
    seen_after = now - HOST_SILENT_AFTER
    allocated: dict[int, set[int]] = {}
    for host, slot in SlotAllocation.objects.values_list("host", "slot"):
        allocated.setdefault(host, set()).add(slot)
    pools = [(p.name, frozenset(p.labels), p.paused) for p in Pool.objects.all()]
    hosts = {}
    rows = Host.objects.present().values_list(
        "id", "name", "device", "slots", "drained", "last_seen", "holding", "device_name", "labels",
        "problem", "closed_until", "closed_reason",
    )  # fmt: skip
    for (
        key, name, device, slots, drained, last_seen, holding, model, host_labels,
        problem, closed_until, closed_reason,
    ) in rows:  # fmt: skip
        used = allocated.get(key, set()).union(*(live for _job, _attempt, live in holding))
        free = tuple(slot for slot in range(slots) if slot not in used)
        labels = frozenset(host_labels)
        host_pools = {pool: is_paused for pool, pool_labels, is_paused in pools if pool_labels <= labels}
        paused = min((pool for pool, is_paused in host_pools.items() if is_paused), default="")
        hosts[key] = HostState(
            name, device, slots, free, drained, last_seen >= seen_after, model, labels, frozenset(host_pools), paused,
            problem=find_host_problem(problem, closed_until, closed_reason, now),
        )  # fmt: skip
    return hosts


def _load_occupants(now: datetime) -> dict[int, list[Occupant]]:
    """Return ending and preemptible attempts by host, and all attempts of hosts that may be kept for a job."""
    kept = Q(pk__in=KeptHost.objects.values("host"))
    wanted = Job.objects.filter(status=Status.QUEUED, engine="hosts").exclude(wanted_host="").values("wanted_host")
    kept_hosts = set(Host.objects.filter(kept | Q(name__in=wanted)).values_list("pk", flat=True))
    members = (
        Member.objects.filter(ended__isnull=True, host__isnull=False)
        .filter(Q(attempt__job__status=Status.CANCELLING) | Q(attempt__job__preemptible=True) | Q(host__in=kept_hosts))
        .annotate(slots=Count("allocations"))
        .values_list(
            "host_id", "attempt_id", "attempt__job_id", "attempt__job__priority", "ordered", "slots",
            "attempt__job__status", "attempt__job__preemptible", "attempt__job__time_limit_s",
        )
    )  # fmt: skip
    rows = list(members)
    limited = {attempt for host, attempt, *_, limit_s in rows if host in kept_hosts and limit_s is not None}
    running = load_running_attempts(now, limited) if limited else []
    ends = {each.job: (each.left_s, each.limit_left_s) for each in running}
    found: dict[int, list[Occupant]] = {}
    for host, _attempt, job, priority, began, slots, status, preemptible, _limit_s in rows:
        is_ending = status == Status.CANCELLING
        occupant = Occupant(job, priority, began, slots, is_ending, preemptible, *ends.get(job, (None, None)))
        found.setdefault(host, []).append(occupant)
    return found


def load_quotas() -> dict[str, Quota]:
    """Load the quotas of limited projects, with the slots of their attempts that have not ended.

    Attempts that are pending in Slurm count, because Slurm later starts them without asking Meshboard.
    """
    limits = {project.name: project.max_slots for project in Project.objects.only("name", "slots", "own_slots")}
    limited = {name: slots for name, slots in limits.items() if slots is not None}
    used = _sum_slots(_filter_unended(limited)) if limited else {}
    return {name: Quota(slots, used.get(name, 0)) for name, slots in limited.items()}


def count_held_slots(projects: Iterable[str]) -> dict[str, int]:
    """Return the slots in use by project, without attempts that are pending in Slurm."""
    return _sum_slots(_filter_unended(projects).exclude(job__status=Status.QUEUED))


def _filter_unended(projects: Iterable[str]) -> QuerySet[Attempt]:
    """Return unended attempts, without runs that started outside Meshboard."""
    return Attempt.objects.filter(ended__isnull=True, job__project__in=list(projects)).exclude(
        job__engine=EXTERNAL_ENGINE
    )


def _sum_slots(attempts: QuerySet[Attempt]) -> dict[str, int]:
    return dict(attempts.order_by().values_list("job__project").annotate(slots=Sum("job__num_slots")))


class SubmitRights:
    """Check whether owners may still submit to the projects of their jobs, by the rule of `may_submit_to`.

    Memberships are read once, because PostgreSQL takes ten times as long with a lookup per job. Rights of staff are
    looked up once per project.
    """

    def __init__(self, submitters: set[tuple[int, str]] | None = None) -> None:
        self._submitters = submitters
        self._staff: dict[tuple[int, str], bool] = {}

    def explain_missing(self, owner: int, project: str, *, active: bool, staff: bool) -> str:
        """Return why jobs of the owner cannot start in the project, or an empty text."""
        if not active:
            return OWNER_DISABLED
        if project == DEFAULT_PROJECT:
            return ""
        if self._submitters is None:
            members = Membership.objects.filter(role__gte=Role.SUBMITTER).order_by()
            self._submitters = set(members.values_list("user", "project__name"))
        key = (owner, project)
        if key in self._submitters:
            return ""
        if staff and key not in self._staff:
            self._staff[key] = may_submit_to(User.objects.get(pk=owner), project)
        return "" if staff and self._staff[key] else OWNER_NOT_SUBMITTER.format(project)


def lock_startable_jobs(jobs: Mapping[str, tuple[int, str]]) -> set[str]:
    """Return which of these jobs may start, given their owners and projects.

    Accounts and roles are locked until the transaction ends. Jobs whose account or role is being changed are skipped.
    """
    owners, projects = {owner for owner, _ in jobs.values()}, {project for _, project in jobs.values()}
    rows = User.objects.select_for_update(skip_locked=True, no_key=True).filter(pk__in=owners).order_by("pk")
    users, roles = {user.pk: user for user in rows}, set()
    if projects - {DEFAULT_PROJECT}:
        members = Membership.objects.select_for_update(skip_locked=True, no_key=True, of=("self",))
        found = members.filter(user__in=owners, project__name__in=projects, role__gte=Role.SUBMITTER)
        roles = {(member.user_id, member.project.name) for member in found.select_related("project").order_by("pk")}
    rights = SubmitRights(roles)
    return {
        id
        for id, (owner, project) in jobs.items()
        if (user := users.get(owner))
        and not rights.explain_missing(owner, project, active=user.is_active, staff=user.is_staff)
    }
