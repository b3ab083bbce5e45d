"""Which queued job starts where: a pure function of the queue and the hosts, without database or clock.

The queue is gone through by priority, then age. A job takes all its slots on one host or none, and of the hosts with
room the one with the fewest free slots: large holes stay for large jobs. A job that cannot start now but fits a host
that takes jobs is blocked, and no later job may delay it where it holds a host:

- A blocked job that asks for one host holds that host, unless a job before it does. It holds nothing else, so one that
  asks for an absent, drained or too small host holds nothing.
- The first other blocked job of each device, its head, holds one host: of those large enough and not held, the one
  that needs the fewest further slots to come free. It keeps that host from pass to pass (`Waiting.kept`, from
  `Plan.kept`) while the host takes jobs and no job before it holds it.

A held host takes no later job, all others do. Nobody knows how long a job runs, so a slot given away on the held host
could keep its holder out for ever; one given away elsewhere cannot. The holder starts, at the latest, when enough of
the jobs that ran on its host as it began to hold it have ended, whatever comes after it, and earlier where another
host has room first. What later jobs can cost it is such a chance elsewhere: none where one host alone is large
enough. (To spare it that, every host that is large enough would have to idle.) Were the host chosen anew in each
pass, a second one that drew level would let later jobs onto the first, and the promise would be none.

Nobody starves: if jobs end, a head starts, then the next blocked job is head, and finitely many are before each (but
for a stream of higher priority, which means to go first). Only one head a device: if every blocked job held a host, a
queue of large jobs would idle as many hosts as it is long.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

from jobs.queue.waiting import reason


class Waiting(NamedTuple):
    """A queued job, as far as placing it goes."""

    id: str
    name: str
    owner: int
    device: str
    num_slots: int
    wanted_host: str  # "" for any
    priority: int
    created: datetime
    kept: str = ""  # the host that the last plan kept for it


class HostState(NamedTuple):
    """A host as it is now."""

    name: str
    device: str
    slots: int
    free: tuple[int, ...]  # the slots that nothing holds, ascending
    drained: bool = False
    live: bool = True


class Placement(NamedTuple):
    """A gang and the slots it gets."""

    job: str
    host: str
    slots: tuple[int, ...]


class Plan(NamedTuple):
    """What a pass decided. Each job of the queue is either placed or has a reason."""

    placements: list[Placement]
    reasons: dict[str, str]  # by job: why it waits
    kept: dict[str, str]  # by device's head: the host that is kept for it


class Pool:
    """The hosts of one device while a pass goes through the queue."""

    def __init__(self, device: str, hosts: list[HostState]) -> None:
        self.device = device
        self.connected = any(host.live for host in hosts)
        self.hosts = {host.name: host for host in hosts}
        self.taking = {name: host for name, host in self.hosts.items() if host.live and not host.drained}
        self.largest = max((host.slots for host in self.taking.values()), default=0)
        self.free = {name: host.free for name, host in self.taking.items()}
        self.holders: dict[str, Waiting] = {}  # by host
        self.head: Waiting | None = None
        self.open = sorted((len(free), name) for name, free in self.free.items())  # hosts that nobody holds

    def take(self, job: Waiting) -> Placement | None:
        """Give the job its slots if a host that is open to it has room."""
        name = self._room(job)
        if name is None:
            return None
        self._close(name)
        slots, self.free[name] = self.free[name][: job.num_slots], self.free[name][job.num_slots :]
        insort(self.open, (len(self.free[name]), name))
        return Placement(job.id, name, slots)

    def hold(self, job: Waiting) -> None:
        """Let a blocked job hold what it may."""
        name = self._to_hold(job)
        if name is None:
            return
        self.holders[name] = job
        self._close(name)
        if not job.wanted_host:
            self.head = job

    def fits(self, job: Waiting) -> bool:
        """Whether it could run on a host that takes jobs, were that host empty."""
        if not job.wanted_host:
            return job.num_slots <= self.largest
        host = self.taking.get(job.wanted_host)
        return host is not None and job.num_slots <= host.slots

    def _room(self, job: Waiting) -> str | None:
        if job.wanted_host:
            open_to_it = job.wanted_host in self.taking and job.wanted_host not in self.holders
            return job.wanted_host if open_to_it and len(self.free[job.wanted_host]) >= job.num_slots else None
        tightest = bisect_left(self.open, (job.num_slots, ""))
        return self.open[tightest][1] if tightest < len(self.open) else None

    def _to_hold(self, job: Waiting) -> str | None:
        if job.wanted_host:
            return job.wanted_host if job.wanted_host not in self.holders else None
        if self.head is not None:
            return None
        enough = {name: free for free, name in self.open if self.taking[name].slots >= job.num_slots}
        if job.kept in enough:
            return job.kept
        return min(enough, key=lambda name: (-enough[name], self.taking[name].slots, name), default=None)

    def _close(self, name: str) -> None:
        del self.open[bisect_left(self.open, (len(self.free[name]), name))]


def place(queue: Iterable[Waiting], hosts: Iterable[HostState]) -> Plan:
    """Decide what starts now and why the rest waits. The order of the arguments' items means nothing."""
    queue, hosts = sorted(queue, key=lambda job: (-job.priority, job.created, job.id)), list(hosts)
    pools = {device: Pool(device, [h for h in hosts if h.device == device]) for device in {job.device for job in queue}}
    placements: list[Placement] = []
    blocked: list[Waiting] = []
    for job in queue:
        pool = pools[job.device]
        if placement := pool.take(job):
            placements.append(placement)
            continue
        blocked.append(job)
        if pool.fits(job):
            pool.hold(job)
    kept = {job.id: name for pool in pools.values() for name, job in pool.holders.items() if job is pool.head}
    return Plan(placements, _reasons(blocked, pools), kept)


def _reasons(blocked: list[Waiting], pools: dict[str, Pool]) -> dict[str, str]:
    """Told after everything was placed, so that what they say is free is free."""
    ahead: dict[str, int] = dict.fromkeys(pools, 0)
    first: dict[str, Waiting] = {}
    reasons = {}
    for job in blocked:
        pool = pools[job.device]
        reasons[job.id] = reason(job, pool, ahead[job.device], first.get(job.device))
        if pool.fits(job):
            ahead[job.device] += 1
            first.setdefault(job.device, job)
    return reasons
