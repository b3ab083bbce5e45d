"""What a pass of the scheduler goes by: jobs, hosts, projects as they are now; and what it decides.

A project holds no more slots at once than its quota.

Fair share: what projects used, of which half is forgotten in each half-life, against what was theirs to use.

A job's points: who has more goes first.

priority, as its owner's staff set it
+ so much an hour for waiting, without an end: no stream of higher priority keeps a job out for ever
+ a part between 0 and so much for belonging to a project that used less than its fair share
+ what staff gave it by moving it
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from planner.facts.kinds import SlotDemand
from planner.facts.validation import format_count

RESERVED_AHEAD_S = 24 * 3600.0  # so long before a reservation a job without a time limit starts there no more


class QueuedJob(NamedTuple):
    """A queued job, as far as placing it goes."""

    id: str
    name: str
    owner: int
    device: str
    num_slots: int
    wanted_host: str  # "" for any
    priority: int  # as its owner or staff set it: whom it may preempt
    created: datetime
    head_hosts: tuple[str, ...] = ()  # hosts that the last plan kept for it
    units: tuple[int, ...] = (1,)  # see `gang.Demand`
    max_hosts: int = 1  # 0: any number
    points: float = 0.0  # its points (`policy.standing`): who has more goes first
    project: str = "default"
    pool: str = ""  # "" for any
    labels: frozenset[str] = frozenset()  # a host of its has all of them
    limit_s: int | None = None  # it is ended after so long
    checkpoint_host: str = (
        ""  # the host with the checkpoint that it goes on from: of hosts that are as good it takes this
    )

    @property
    def demand(self) -> SlotDemand:
        return SlotDemand(self.num_slots, self.units, self.max_hosts)


class Occupant(NamedTuple):
    """An attempt that will leave its slots of a host, or would if asked to."""

    job: str
    priority: int
    began: datetime
    slots: int
    is_ending: bool  # it was told to end


class Booking(NamedTuple):
    """A reservation of a host. `in_s`: seconds until it begins, 0 or less while it lasts."""

    project: str
    in_s: float


class HostState(NamedTuple):
    """A host as it is now."""

    name: str
    device: str
    slots: int
    free: tuple[int, ...]  # the slots that nothing holds, ascending
    drained: bool = False
    live: bool = True
    device_name: str = ""
    labels: frozenset[str] = frozenset()
    pools: frozenset[str] = frozenset()
    paused: str = ""  # a pool of its that is paused
    bookings: tuple[Booking, ...] = ()
    occupants: tuple[Occupant, ...] = ()

    @property
    def takes_jobs(self) -> bool:
        return self.live and not self.drained and not self.paused

    def matches(self, job: QueuedJob) -> bool:
        """Whether the job may go there, whoever else is there."""
        if self.device != job.device or job.wanted_host not in ("", self.name):
            return False
        return (not job.pool or job.pool in self.pools) and job.labels <= self.labels

    def is_reserved_for_others(self, job: QueuedJob) -> bool:
        """Whether another project's reservation keeps the job away: it has begun, or begins before the job must end."""
        lasts_s = RESERVED_AHEAD_S if job.limit_s is None else job.limit_s
        return any(booking.project != job.project and booking.in_s < lasts_s for booking in self.bookings)

    def count_soon_free(self, priority: int) -> int:
        """Slots that are free, are being left, or could be taken from preemptible jobs of lower priority."""
        coming = (who.slots for who in self.occupants if who.is_ending or who.priority < priority)
        return len(self.free) + sum(coming)


class Quota(NamedTuple):
    """Slots that a project may hold at once (None: any number), and how many it holds."""

    slots: int | None
    used: int


class Share(NamedTuple):
    """The part of a gang that one host runs."""

    host: str
    slots: tuple[int, ...]


class Placement(NamedTuple):
    """A gang and the slots it gets, in the order of its nodes."""

    job: str
    shares: tuple[Share, ...]


class Preemption(NamedTuple):
    """A running job that gives way to a waiting one."""

    victim: str
    for_job: str


class QuotaBudget:
    """What each project holds while a pass goes through the queue."""

    def __init__(self, quotas: Mapping[str, Quota]) -> None:
        self._quotas = quotas
        self._used = {project: quota.used for project, quota in quotas.items()}
        self._full: set[str] = set()

    def explain_refusal(self, project: str, slots: int) -> str:
        """Why the project's quota does not allow a job of so many slots now; empty where it does."""
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
        """A job of the project holds so many, or they are kept for it."""
        if project in self._used:
            self._used[project] += slots


LEAST, MOST = 1e-3, 1e3  # of a weight, whatever is stored: one row must not stop the queue


class ProjectUse(NamedTuple):
    """Slot-seconds that a project used, and its weight."""

    used: float
    weight: float


def compute_decayed_use(used: float, slots: int, seconds: float, half_life_s: float) -> float:
    """Slot-seconds after so many seconds in which so many slots were held."""
    kept: float = 0.5 ** (seconds / half_life_s)
    return used * kept + slots * (1 - kept) * half_life_s / math.log(2)


def compute_share_factors(projects: Mapping[str, ProjectUse]) -> dict[str, float]:
    """1 for a project that used nothing, 1/2 for one that used exactly its part, towards 0 the more it used.

    2 to the minus of used part over fair part, as in Slurm's classic fair-share factor.
    """
    weights = {name: min(max(p.weight, LEAST), MOST) for name, p in projects.items()}
    used, weight = sum(p.used for p in projects.values()), sum(weights.values())
    if used <= 0:
        return dict.fromkeys(projects, 1.0)
    return {name: 2.0 ** -((p.used / used) / (weights[name] / weight)) for name, p in projects.items()}


class PointRates(NamedTuple):
    """Points for an hour of waiting, and for a project that used nothing."""

    per_hour: float
    share: float


class PriorityPoints(NamedTuple):
    """The parts of a job's points."""

    priority: float
    waited: float
    share: float
    moved: float

    @property
    def total(self) -> float:
        """Rounded: what is equal but for the last bits of a float goes by age."""
        return round(sum(self), 6)


def compute_points(priority: int, waited_s: float, share: float, moved: float, rates: PointRates) -> PriorityPoints:
    """`share`: `policy.share.factor` of its project, 1 for one that used nothing."""
    return PriorityPoints(float(priority), rates.per_hour * max(0.0, waited_s) / 3600, rates.share * share, moved)
