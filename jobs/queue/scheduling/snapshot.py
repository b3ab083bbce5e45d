"""Queue, hosts and projects as they are now, read from the database in few statements and without a spec.

Whose queued jobs may start: those of who could submit them now, by the rule of `jobs.core.access.may_submit_to`.

Whose earlier attempt may still be alive: given up, or on a host that came back with it. Two never train at once.
"""

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
)
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
AHEAD = timedelta(days=366)  # of reservations: none further away can matter to a job (its limit is a year at most)


class QueueEntry(NamedTuple):
    """A queued job and what is written about it. `bar`: why it cannot start whatever is free; empty where it can."""

    job: QueuedJob
    attempt: int
    reason: str
    block_reason: str
    points: PriorityPoints


class DependencyState(NamedTuple):
    """What a job comes after: those that have not ended, and those that did not succeed."""

    unended: list[str]
    failed: list[str]


def is_queue_paused() -> bool:
    return QueueState.objects.filter(paused=True).exists()


def load_queue(now: datetime) -> list[QueueEntry]:
    """Every queued job that our hosts run."""
    attempts = Attempt.objects.filter(job=OuterRef("pk"), number=OuterRef("attempt"))
    rows = Job.objects.filter(status=Status.QUEUED, engine="hosts").values_list(
        "id", "name", "owner", "device", "num_slots", "wanted_host", "priority", "created",
        "unit", "wide_unit", "max_hosts", "project", "pool", Cast("labels", TextField()), "time_limit_s",
        *STANDS, "attempt", "wait_reason", "held", "moved", Exists(attempts),
    )  # fmt: skip
    kept: dict[str, list[str]] = {}
    for job, host in KeptHost.objects.values_list("job_id", "host__name"):
        kept.setdefault(job, []).append(host)
    again = {id for id, *_, attempt, _reason, _held, _moved, _placed in rows if attempt > 1}
    waits, alive = load_dependencies(), find_running_attempts(again, now)
    has = _load_checkpoint_hosts() if again else {}
    share = compute_share_factors({p.name: ProjectUse(p.used, p.weight) for p in Project.objects.all()})
    rates = PointRates(settings.AGEING_PER_HOUR, settings.SHARE_POINTS)
    owners, found = SubmitRights(), []
    for (
        id, name, owner, device, num_slots, wanted, priority, created,
        unit, wide, most, project, pool, labels, limit_s,
        active, of_staff, attempt, reason, held, moved, placed_before,
    ) in rows:  # fmt: skip
        stands = compute_points(priority, (now - created).total_seconds(), share.get(project, 1.0), moved, rates)
        waiting = QueuedJob(
            id, name, owner, device, num_slots, wanted, priority, created, tuple(kept.get(id, ())),
            (wide, unit) if wide != unit else (unit,), most, stands.total, project, pool, _labels(labels), limit_s,
            has.get(id, ""),
        )  # fmt: skip
        bar = alive.get(id, "")
        if owner_bar := owners.bar(owner, project, active=active, staff=of_staff):
            bar = owner_bar
        elif held:
            bar = JOB_HELD
        elif id in waits and waits[id].unended:
            bar = _after_words(waits[id].unended)
        if placed_before:
            bar = f"Attempt {attempt} already started on a host. Cancel the job, then queue it again."
        found.append(QueueEntry(waiting, attempt, reason, bar, stands))
    return found


def _load_checkpoint_hosts() -> dict[str, str]:
    """Return the host with the latest checkpoint of an earlier attempt, by queued job."""
    saved = Attempt.objects.exclude(checkpoint="").filter(job__status=Status.QUEUED, members__node=0)
    return dict(saved.order_by("number").values_list("job_id", "members__host_name"))


@lru_cache(maxsize=1000)
def _labels(text: str) -> frozenset[str]:
    """Of thousands of jobs most ask for the same ones: read once, not for each."""
    return frozenset(json.loads(text))


def load_dependencies() -> dict[str, DependencyState]:
    """By queued job that comes after others: how those stand. One that was deleted did not succeed."""
    pairs = list(Dependency.objects.filter(job__status=Status.QUEUED).values_list("job_id", "needs"))
    known = dict(Job.objects.filter(id__in={needs for _, needs in pairs}).values_list("id", "status")) if pairs else {}
    found: dict[str, DependencyState] = {}
    for job, needs in pairs:
        ahead = found.setdefault(job, DependencyState([], []))
        status = known.get(needs, Status.LOST)
        if status not in TERMINAL:
            ahead.unended.append(needs)
        elif status != Status.SUCCEEDED:
            ahead.failed.append(needs)
    return found


def explain_blocked_jobs(jobs: Iterable[Job]) -> dict[str, str]:
    """Of queued jobs of any engine, by id: why each does not start whatever there is room for."""
    jobs = list(jobs)
    paused, waits, found = is_queue_paused(), load_dependencies(), owner_bars(job.id for job in jobs)
    for job in jobs:
        if paused:
            found[job.id] = QUEUE_PAUSED
        elif job.id in found:
            continue
        elif job.held:
            found[job.id] = JOB_HELD
        elif job.id in waits and waits[job.id].unended:
            found[job.id] = _after_words(waits[job.id].unended)
    return found


def _after_words(jobs: list[str]) -> str:
    if len(jobs) == 1:
        return f"The job waits until job {jobs[0]} has ended."
    named = ", ".join(sorted(jobs)[:3])
    more = f" and {len(jobs) - 3} more" if len(jobs) > 3 else ""
    return f"The job waits until jobs {named}{more} have ended."


def load_hosts(now: datetime) -> dict[int, HostState]:
    """All hosts by key."""
    booked, occupants = _reservations(now), _occupants()
    return {
        key: host._replace(
            bookings=tuple(booking for of, pool, booking in booked if of == key or pool in host.pools),
            occupants=tuple(occupants.get(key, ())),
        )
        for key, host in load_host_slots(now).items()
    }


def count_free_slots() -> dict[int, int]:
    """By host, how many slots could be given away now: of one that takes no jobs none. Whoever says so asks here."""
    return {key: len(host.free) if host.takes_jobs else 0 for key, host in load_host_slots(timezone.now()).items()}


def load_host_slots(now: datetime) -> dict[int, HostState]:
    """All hosts by key, without who reserved or leaves them. A slot is free if no attempt was given it and the host
    names none that lives there."""
    seen_after = now - HOST_SILENT_AFTER
    taken: dict[int, set[int]] = {}
    for host, slot in SlotAllocation.objects.values_list("host", "slot"):
        taken.setdefault(host, set()).add(slot)
    pools = [(p.name, frozenset(p.labels), p.paused) for p in Pool.objects.all()]
    hosts = {}
    rows = Host.objects.present().values_list(
        "id", "name", "device", "slots", "drained", "last_seen", "holding", "device_name", "labels"
    )
    for key, name, device, slots, drained, last_seen, holding, model, told in rows:
        held = taken.get(key, set()).union(*(alive for _job, _attempt, alive in holding))
        free = tuple(slot for slot in range(slots) if slot not in held)
        labels = frozenset(told)
        of = {pool: paused for pool, asked, paused in pools if asked <= labels}
        paused = min((pool for pool, is_paused in of.items() if is_paused), default="")
        hosts[key] = HostState(
            name, device, slots, free, drained, last_seen >= seen_after, model, labels, frozenset(of), paused
        )
    return hosts


def _reservations(now: datetime) -> list[tuple[int | None, str | None, Booking]]:
    rows = Reservation.objects.filter(ends__gt=now, starts__lt=now + AHEAD)
    return [
        (host, pool, Booking(project, (starts - now).total_seconds()))
        for host, pool, project, starts in rows.values_list("host_id", "pool__name", "project__name", "starts")
    ]


def _occupants() -> dict[int, list[Occupant]]:
    """By host: attempts that were told to end, or would be for one of higher priority."""
    rows = (
        Member.objects.filter(ended__isnull=True, host__isnull=False)
        .filter(Q(attempt__job__status=Status.CANCELLING) | Q(attempt__job__preemptible=True))
        .annotate(slots=Count("allocations"))
        .values_list("host_id", "attempt__job_id", "attempt__job__priority", "ordered", "slots", "attempt__job__status")
    )
    found: dict[int, list[Occupant]] = {}
    for host, job, priority, began, slots, status in rows:
        found.setdefault(host, []).append(Occupant(job, priority, began, slots, status == Status.CANCELLING))
    return found


def load_quotas() -> dict[str, Quota]:
    """By project that has one: what its attempts hold until they have ended. One that waits in Slurm's own queue counts
    too: it begins when Slurm says, and nobody is asked then."""
    most = {project.name: project.max_slots for project in Project.objects.only("name", "slots", "own_slots")}
    limited = {name: slots for name, slots in most.items() if slots is not None}
    used = _slots(_unended(limited)) if limited else {}
    return {name: Quota(slots, used.get(name, 0)) for name, slots in limited.items()}


def count_held_slots(projects: Iterable[str]) -> dict[str, int]:
    """Slots in use by project: what waits in Slurm's own queue uses none."""
    return _slots(_unended(projects).exclude(job__status=Status.QUEUED))


def _unended(projects: Iterable[str]) -> QuerySet[Attempt]:
    """Attempts that are ours to count: what somebody else launched takes no slot."""
    return Attempt.objects.filter(ended__isnull=True, job__project__in=list(projects)).exclude(
        job__engine=EXTERNAL_ENGINE
    )


def _slots(attempts: QuerySet[Attempt]) -> dict[str, int]:
    return dict(attempts.order_by().values_list("job__project").annotate(slots=Sum("job__num_slots")))


OWNER_DISABLED = "The account of the owner is disabled. The job can start after staff enable the account."
OWNER_NOT_SUBMITTER = "The owner is no longer allowed to submit jobs to project {}, so the job does not start."
STANDS = ("owner__is_active", "owner__is_staff")  # of a job's owner, read with the job


class SubmitRights:
    """Why owners may have nothing started. Who submits to what is read once, where a project but `default` is asked of:
    of thousands of jobs PostgreSQL takes ten times as long when each looks it up. What staff may by their rights is
    looked up once for all their jobs."""

    def __init__(self, submitters: set[tuple[int, str]] | None = None) -> None:
        self._submitters = submitters
        self._staff: dict[tuple[int, str], bool] = {}

    def bar(self, owner: int, project: str, *, active: bool, staff: bool) -> str:
        """Empty where they may."""
        if not active:
            return OWNER_DISABLED
        if project == DEFAULT_PROJECT or self._submits(owner, project) or (staff and self._may(owner, project)):
            return ""
        return OWNER_NOT_SUBMITTER.format(project)

    def _submits(self, owner: int, project: str) -> bool:
        if self._submitters is None:
            members = Membership.objects.filter(role__gte=Role.SUBMITTER).order_by()
            self._submitters = set(members.values_list("user", "project__name"))
        return (owner, project) in self._submitters

    def _may(self, owner: int, project: str) -> bool:
        if (owner, project) not in self._staff:
            self._staff[owner, project] = may_submit_to(User.objects.get(pk=owner), project)
        return self._staff[owner, project]


def owner_bars(jobs: Iterable[str]) -> dict[str, str]:
    """By job that may not start for its owner's sake: why."""
    owners, found = SubmitRights(), {}
    rows = Job.objects.filter(id__in=list(jobs)).values_list("id", "owner", "project", *STANDS)
    for id, owner, project, active, staff in rows:
        if bar := owners.bar(owner, project, active=active, staff=staff):
            found[id] = bar
    return found


def lock_startable_jobs(jobs: Mapping[str, tuple[int, str]]) -> set[str]:
    """Of jobs, by owner and project, those that may start; whoever disables an account or takes a role waits until the
    transaction ends, and whose row is being changed now has nothing started in it.
    """
    asked, projects = {owner for owner, _ in jobs.values()}, {project for _, project in jobs.values()}
    rows = User.objects.select_for_update(skip_locked=True, no_key=True).filter(pk__in=asked).order_by("pk")
    people, roles = {user.pk: user for user in rows}, set()
    if projects - {DEFAULT_PROJECT}:
        members = Membership.objects.select_for_update(skip_locked=True, no_key=True, of=("self",))
        found = members.filter(user__in=asked, project__name__in=projects, role__gte=Role.SUBMITTER)
        roles = {(member.user_id, member.project.name) for member in found.select_related("project").order_by("pk")}
    owners = SubmitRights(roles)
    return {
        id
        for id, (owner, project) in jobs.items()
        if (user := people.get(owner)) and not owners.bar(owner, project, active=user.is_active, staff=user.is_staff)
    }


# From the last word of a host to the last of its supervisor, and from the end of the lease to that of the ranks.
MARGIN = timedelta(seconds=30)


def find_running_attempts(queued: set[str], now: datetime | None = None) -> Mapping[str, str]:
    """Of queued jobs that ran before those that must not start yet, and why.

    A member of a gang on a silent host ends by itself when its lease is over; one that is heard of, or a supervisor of
    which is, is told to end. A job on one host has no lease: who gives its host up takes it upon himself that nothing
    lives there.
    """
    if not queued:
        return {}
    now = now or timezone.now()
    waits = dict([*_still_heard(queued, now), *_still_held(queued)])
    lease = timedelta(seconds=settings.LEASE_S) + MARGIN
    untold = Member.objects.filter(
        attempt__job_id__in=queued, outcome="lost", host__last_seen__lt=F("ended")
    ).order_by()
    in_gangs = untold.filter(attempt__members__node__gt=0).distinct()
    rows = in_gangs.values_list("attempt__job_id", "attempt__number", "host_name", "host__last_seen", "heard")
    for job, number, host, last_seen, heard in rows:
        ends = max(last_seen, heard or last_seen) + lease
        if job not in waits and ends > now:
            until = f"{ends:%H:%M:%S} UTC"
            waits[job] = f"attempt {number} may still run on silent host {host} until its lease ends at {until}"
    return waits


def _still_heard(queued: set[str], now: datetime) -> list[tuple[str, str]]:
    """Also where it runs elsewhere now than it should: a supervisor speaks of what has ended for the board."""
    speak = Member.objects.filter(attempt__job_id__in=queued, outcome="lost", heard__gt=F("ended"))
    rows = speak.filter(heard__gte=now - HOST_SILENT_AFTER).order_by()
    return [
        (job, f"waiting until the supervisor process on host {name} ends attempt {number}")
        for job, number, name in rows.values_list("attempt__job_id", "attempt__number", "host_name")
    ]


def _still_held(queued: set[str]) -> list[tuple[str, str]]:
    """What a host said before it was given up counts no more."""
    known = Host.objects.present().exclude(holding=[]).exclude(given_up__gt=F("last_seen"))
    return [
        (job, f"waiting until host {name} ends attempt {number}")
        for name, holding in known.values_list("name", "holding")
        for job, number, _ in holding
        if job in queued
    ]
