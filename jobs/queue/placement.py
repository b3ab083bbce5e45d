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

from collections.abc import Iterable
from typing import NamedTuple

from jobs.queue.pool import HostState, Placement, Pool, Waiting
from jobs.queue.waiting import reason


class Plan(NamedTuple):
    """What a pass decided. Each job of the queue is either placed or has a reason."""

    placements: list[Placement]
    reasons: dict[str, str]  # by job: why it waits
    kept: dict[str, str]  # by device's head: the host that is kept for it


def place(queue: Iterable[Waiting], hosts: Iterable[HostState], trouble: str = "") -> Plan:
    """Decide what starts now and why the rest waits. The order of the arguments' items means nothing.

    `trouble`: why a host may be well and yet not heard of.
    """
    queue, hosts = sorted(queue, key=lambda job: (-job.priority, job.created, job.id)), list(hosts)
    devices = {job.device for job in queue}
    pools = {device: Pool(device, [h for h in hosts if h.device == device], trouble) for device in devices}
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
