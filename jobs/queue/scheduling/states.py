"""What a pass of the scheduler goes by: jobs, hosts, projects as they are now; and what it decides."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from planner.facts.kinds import SlotDemand

RESERVED_AHEAD_S = 24 * 3600.0  # so long before a reservation a job without a time limit starts there no more


class Waiting(NamedTuple):
    """A queued job, as far as placing it goes."""

    id: str
    name: str
    owner: int
    device: str
    num_slots: int
    wanted_host: str  # "" for any
    priority: int  # as its owner or staff set it: whom it may preempt
    created: datetime
    kept: tuple[str, ...] = ()  # hosts that the last plan kept for it
    units: tuple[int, ...] = (1,)  # see `gang.Demand`
    max_hosts: int = 1  # 0: any number
    standing: float = 0.0  # its points (`policy.standing`): who has more goes first
    project: str = "default"
    pool: str = ""  # "" for any
    labels: frozenset[str] = frozenset()  # a host of its has all of them
    limit_s: int | None = None  # it is ended after so long
    saved_on: str = ""  # the host with the checkpoint that it goes on from: of hosts that are as good it takes this

    @property
    def demand(self) -> SlotDemand:
        return SlotDemand(self.num_slots, self.units, self.max_hosts)


class Occupant(NamedTuple):
    """An attempt that will leave its slots of a host, or would if asked to."""

    job: str
    priority: int
    began: datetime
    slots: int
    leaving: bool  # it was told to end


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

    def is_asked_for_by(self, job: Waiting) -> bool:
        """Whether the job may go there, whoever else is there."""
        if self.device != job.device or job.wanted_host not in ("", self.name):
            return False
        return (not job.pool or job.pool in self.pools) and job.labels <= self.labels

    def is_reserved_from(self, job: Waiting) -> bool:
        """Whether another project's reservation keeps the job away: it has begun, or begins before the job must end."""
        lasts_s = RESERVED_AHEAD_S if job.limit_s is None else job.limit_s
        return any(booking.project != job.project and booking.in_s < lasts_s for booking in self.bookings)

    def soon(self, priority: int) -> int:
        """Slots that are free, are being left, or could be taken from preemptible jobs of lower priority."""
        coming = (who.slots for who in self.occupants if who.leaving or who.priority < priority)
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
