"""Define the scheduler's input and output, quota budgets, and priority points."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from planner.facts.kinds import SlotDemand
from planner.facts.validation import format_count

RESERVED_AHEAD_S = 24 * 3600.0  # jobs without a time limit need this long before the next reservation
MIN_WEIGHT, MAX_WEIGHT = 1e-3, 1e3  # one bad weight in the database cannot stop the queue


class QueuedJob(NamedTuple):
    """The fields of a queued job that decide its placement."""

    id: str
    name: str
    owner: int
    device: str
    num_slots: int
    wanted_host: str  # "": any
    priority: int  # as the owner or staff set it, decides which jobs it may preempt
    created: datetime
    head_hosts: tuple[str, ...] = ()  # hosts that the last pass kept for this job
    units: tuple[int, ...] = (1,)  # as in `SlotDemand`
    max_hosts: int = 1  # 0: any number
    points: float = 0.0  # jobs with more points are placed first
    project: str = "default"
    pool: str = ""  # "": any
    labels: frozenset[str] = frozenset()  # a host needs all of them
    limit_s: int | None = None  # time limit
    checkpoint_host: str = ""  # has the checkpoint to resume from, and is preferred among equal hosts
    faulty_hosts: frozenset[str] = frozenset()  # an attempt failed there because of the host; used if no other fits

    @property
    def demand(self) -> SlotDemand:
        return SlotDemand(self.num_slots, self.units, self.max_hosts)


class Occupant(NamedTuple):
    """An attempt on a host.

    Both ends are in seconds since the host was read, and None without a time limit. `ends_s` is the predicted end.
    """

    job: str
    priority: int
    began: datetime
    slots: int
    is_ending: bool
    is_preemptible: bool = True
    ends_s: float | None = None
    limit_ends_s: float | None = None

    def is_leaving_for(self, priority: int) -> bool:
        """Return whether the attempt is ending, or a job with this priority can preempt it."""
        return self.is_ending or (self.is_preemptible and self.priority < priority)


class Booking(NamedTuple):
    """A reservation of a host. `in_s`: seconds until it begins, at most 0 if it has begun."""

    project: str
    in_s: float


class HostState(NamedTuple):
    """The slots of a host and the conditions for placing jobs there."""

    name: str
    device: str
    slots: int
    free: tuple[int, ...]  # ascending slot numbers
    drained: bool = False
    live: bool = True
    device_name: str = ""
    labels: frozenset[str] = frozenset()
    pools: frozenset[str] = frozenset()
    paused: str = ""  # name of a paused pool that has the host
    bookings: tuple[Booking, ...] = ()
    occupants: tuple[Occupant, ...] = ()
    problem: str = ""  # why the host is sick

    @property
    def takes_jobs(self) -> bool:
        return self.live and not self.drained and not self.paused and not self.problem

    def matches(self, job: QueuedJob) -> bool:
        """Return whether the job's spec allows this host."""
        if self.device != job.device or job.wanted_host not in ("", self.name):
            return False
        return (not job.pool or job.pool in self.pools) and job.labels <= self.labels

    def is_reserved_for_others(self, job: QueuedJob) -> bool:
        """Return whether another project's reservation begins before the job must end."""
        lasts_s = RESERVED_AHEAD_S if job.limit_s is None else job.limit_s
        return any(booking.project != job.project and booking.in_s < lasts_s for booking in self.bookings)

    def count_soon_free(self, priority: int) -> int:
        """Count slots that are free, belong to ending attempts, or can be preempted with this priority."""
        return len(self.free) + sum(one.slots for one in self.occupants if one.is_leaving_for(priority))


class Quota(NamedTuple):
    """The slot limit of a project (None: unlimited), and its slots in use."""

    slots: int | None
    used: int


class Share(NamedTuple):
    """The slots of one host in a gang."""

    host: str
    slots: tuple[int, ...]


class Placement(NamedTuple):
    """The slots of a gang, in the order of its nodes. `is_backfilled`: some hosts are kept for an earlier job."""

    job: str
    shares: tuple[Share, ...]
    is_backfilled: bool = False


class Preemption(NamedTuple):
    """A running job that ends to free slots for a queued job."""

    victim: str
    for_job: str


class QuotaBudget:
    """Count the slots of each project during a scheduling pass."""

    def __init__(self, quotas: Mapping[str, Quota]) -> None:
        self._quotas = quotas
        self._used = {project: quota.used for project, quota in quotas.items()}
        self._full: set[str] = set()

    def explain_refusal(self, project: str, slots: int) -> str:
        """Return why the quota does not allow a job with this many slots, or an empty text."""
        quota = self._quotas.get(project)
        if quota is None or quota.slots is None:
            return ""
        limit = f"Project {project} is limited to {format_count(quota.slots, 'slot')}."
        needs = f"The job needs {format_count(slots, 'slot')}. {limit}"
        if slots > quota.slots:
            return needs
        if project in self._full:
            return f"{needs} Another job of the project is ahead in the queue."
        if self._used[project] + slots <= quota.slots:
            return ""
        self._full.add(project)
        return f"{needs} Other jobs of the project use or reserve {format_count(self._used[project], 'slot')}."

    def take(self, project: str, slots: int) -> None:
        """Add slots that a job of the project gets, or that are kept for it."""
        if project in self._used:
            self._used[project] += slots


class ProjectUse(NamedTuple):
    """Decayed slot-seconds of a project, and its fair-share weight."""

    used: float
    weight: float


def compute_decayed_use(used: float, slots: int, seconds: float, half_life_s: float) -> float:
    """Return the decayed slot-seconds after `slots` slots were in use for some seconds."""
    remaining: float = 0.5 ** (seconds / half_life_s)
    return used * remaining + slots * (1 - remaining) * half_life_s / math.log(2)


def compute_share_factors(projects: Mapping[str, ProjectUse]) -> dict[str, float]:
    """Return the fair-share factor of each project: 2 ** -(share of use / share of weights).

    The factor is 1 without use, and 1/2 at exactly the fair share, as in Slurm's classic fair-share factor.
    """
    weights = {name: min(max(p.weight, MIN_WEIGHT), MAX_WEIGHT) for name, p in projects.items()}
    used, weight = sum(p.used for p in projects.values()), sum(weights.values())
    if used <= 0:
        return dict.fromkeys(projects, 1.0)
    return {name: 2.0 ** -((p.used / used) / (weights[name] / weight)) for name, p in projects.items()}


class PointRates(NamedTuple):
    """Points per hour of waiting, and points of a project without use."""

    per_hour: float
    share: float


class PriorityPoints(NamedTuple):
    """The terms of a job's points: priority, waiting time, fair share, and moves by staff.

    Waiting time counts without limit, so a stream of jobs with higher priority cannot starve a job.
    """

    priority: float
    waited: float
    share: float
    moved: float

    @property
    def total(self) -> float:
        """Return the sum, rounded so that equal jobs are ordered by age despite rounding errors."""
        return round(sum(self), 6)


def compute_points(priority: int, waited_s: float, share: float, moved: float, rates: PointRates) -> PriorityPoints:
    """Return the points of a job. `share` is its project's factor from `compute_share_factors`."""
    return PriorityPoints(float(priority), rates.per_hour * max(0.0, waited_s) / 3600, rates.share * share, moved)
