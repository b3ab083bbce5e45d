"""Which queued job starts where: a pure function of the queue, the hosts and the quotas, without database or clock.

The queue is gone through by standing, then age. A job takes all its slots or none (`gang`): on one host
where one has room, of those the one with the fewest free slots, else over as few hosts of one model as have; of hosts
that are as good it takes the one with the checkpoint that it goes on from. A job that cannot start now but fits the
hosts that take jobs is blocked, and no later job may delay it where hosts are kept:

- Of all blocked jobs that may go to the same hosts (any; those of a pool; one named host) the first, their head, has
  hosts kept for it: as few as could hold it empty, of such sets the one that needs few further slots to come free, and
  none that are kept for a job before it. Where it can have none it keeps nothing, and the next may be head.
- It keeps them from pass to pass (`Waiting.kept`, from `Plan.kept`) while they take jobs and no job before it has one.

A kept host takes no later job, all others do. Nobody knows how long a job runs, so a slot given away on a kept host
could keep its holder out for ever; one given away elsewhere cannot. The holder starts, at the latest, when enough of
the jobs that ran on its hosts as they began to be kept have ended, whatever comes after it, and earlier where others
have room first. What later jobs can cost it is such a chance elsewhere: none where no other hosts are large enough.
(To spare it that, every host that is large enough would have to idle.) Were the hosts chosen anew in each pass, others
that drew level would let later jobs onto the first, and the promise would be none.

Nobody starves: if jobs end, a head starts, then the next blocked job is head, and finitely many are before each (but
for a stream of higher standing, against which `policy.standing` lets points grow with age). Only one head for the same
hosts: if every blocked job kept hosts, a queue of large jobs would idle as many as it is long.

A project's quota is never exceeded. Its first job that the quota holds back holds back all behind it of that project,
or small ones would keep it out for ever; and what a head will need of its project's quota is kept for it as its hosts
are. One that is larger than the quota holds back nobody.

How a gang lies on hosts: whole or not at all, over as few as possible, each host with a multiple of one unit.

Ranks fill node after node with tp innermost, so a share that is a multiple of the unit (`planner.facts.kinds`) never
divides a group that must stay inside a host.

The hosts of one device while a pass goes through the queue: who takes which slots, for whom which hosts are kept.

Which preemptible jobs give way: only to a head of higher priority, only where it starts once they are gone, and no
more of them than it needs. The lowest priority goes first, then the one that ran the shortest.

When queued jobs should start: the scheduler's own decisions, played on with predicted durations. An estimate.

A job without a predicted duration counts with its time limit; without that too, nothing is foretold from its end.

What would start now if there were more slots, a pool went on, or a job had another priority. Nothing is changed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jobs.queue.scheduling.slot_allocator import SlotAllocator, preemptions
from jobs.queue.scheduling.states import HostState, Placement, Preemption, QueuedJob, Quota, QuotaBudget, Share
from jobs.queue.scheduling.waiting_reasons import explain_wait


class SchedulingPlan(NamedTuple):
    """What a pass decided. Each job of the queue is either placed or has a reason."""

    placements: list[Placement]
    reasons: dict[str, str]  # by job: why it waits
    head_hosts: dict[str, tuple[str, ...]]  # by head: the hosts that are kept for it
    preemptions: list[Preemption]


def sort_queue(queue: Iterable[QueuedJob]) -> list[QueuedJob]:
    """As it is gone through."""
    return sorted(queue, key=lambda job: (-job.points, job.created, job.id))


class SchedulingDecision(NamedTuple):
    """What a pass decided, without the words: those cost as much again, and a pass that is only played needs none."""

    placements: list[Placement]
    head_hosts: dict[str, tuple[str, ...]]  # as in `Plan`
    quota_refusals: dict[str, str]  # by job: what its project's quota says
    blocked: list[QueuedJob]
    pools: dict[str, SlotAllocator]  # by device


def plan_pass(
    queue: Iterable[QueuedJob],
    hosts: Iterable[HostState],
    trouble: str = "",
    quotas: Mapping[str, Quota] | None = None,
) -> SchedulingPlan:
    """Decide what starts now and why the rest waits. The order of the arguments' items means nothing.

    `trouble`: why a host may be well and yet not heard of. `quotas`: by project; one that is not there has none.
    """
    return explain_decision(decide(queue, hosts, trouble, quotas))


def explain_decision(found: SchedulingDecision) -> SchedulingPlan:
    """What was decided, with why each job waits and who gives way."""
    preempted = [each for pool in found.pools.values() for each in preemptions(pool)]
    giving_way = {each.for_job for each in preempted}
    reasons = found.quota_refusals | _reasons(found.blocked, found.pools, giving_way)
    return SchedulingPlan(found.placements, reasons, found.head_hosts, preempted)


def decide(
    queue: Iterable[QueuedJob],
    hosts: Iterable[HostState],
    trouble: str = "",
    quotas: Mapping[str, Quota] | None = None,
) -> SchedulingDecision:
    """As `place`, which tells besides why each job waits and who gives way."""
    queue, hosts = sort_queue(queue), sorted(hosts, key=lambda host: host.name)
    devices = {job.device for job in queue}
    pools = {
        device: SlotAllocator(device, [h for h in hosts if h.device == device], trouble) for device in sorted(devices)
    }
    budget = QuotaBudget(quotas or {})
    placements: list[Placement] = []
    blocked: list[QueuedJob] = []
    refused: dict[str, str] = {}
    for job in queue:
        pool = pools[job.device]
        fits = pool.fits(job)
        if fits and (refusal := budget.explain_refusal(job.project, job.num_slots)):
            refused[job.id] = refusal
            continue
        if placement := pool.take(job):
            placements.append(placement)
            budget.take(job.project, job.num_slots)
            continue
        blocked.append(job)
        if fits:
            pool.hold(job)
            if job.id in pool.head_hosts:
                budget.take(job.project, job.num_slots)
    kept = {job.id: pools[job.device].head_hosts.get(job.id, ()) for job in blocked if not job.wanted_host}
    return SchedulingDecision(placements, {job: names for job, names in kept.items() if names}, refused, blocked, pools)


def _reasons(blocked: list[QueuedJob], pools: dict[str, SlotAllocator], giving_way: set[str]) -> dict[str, str]:
    """Told after everything was placed, so that what they say is free is free."""
    ahead: dict[str, int] = dict.fromkeys(pools, 0)
    first: dict[str, QueuedJob] = {}
    reasons = {}
    for job in blocked:
        pool = pools[job.device]
        reasons[job.id] = explain_wait(job, pool, ahead[job.device], first.get(job.device))
        if job.id in giving_way:
            reasons[job.id] += " Preemptible jobs with lower priority are ending to free slots."
        if pool.fits(job):
            ahead[job.device] += 1
            first.setdefault(job.device, job)
    return reasons


MAX_FORECAST_PASSES = 60
MAX_FORECAST_JOBS = 200  # of the queue's front; those behind them are not foretold


class RunningAttempt(NamedTuple):
    """An attempt that holds slots. `left_s`: seconds until it should have ended, None where nothing tells."""

    job: str
    project: str
    shares: tuple[Share, ...]
    left_s: float | None


class Forecast(NamedTuple):
    """Seconds until a job should start, and the job whose end lets it; "" where it starts with the next pass."""

    in_s: float
    ends: str


def forecast(
    queue: Iterable[QueuedJob],
    hosts: Iterable[HostState],
    running: Iterable[RunningAttempt],
    durations: Mapping[str, float | None],
    quotas: Mapping[str, Quota],
) -> dict[str, Forecast]:
    """By job, for those of which something can be told."""
    left = {job.id: job for job in sort_queue(queue)[:MAX_FORECAST_JOBS]}
    there = {host.name: host._replace(occupants=()) for host in hosts}
    quotas = dict(quotas)
    ends = [(each.left_s, each.job, each.project, each.shares) for each in running if each.left_s is not None]
    heapq.heapify(ends)
    now, ended, told = 0.0, "", dict[str, Forecast]()
    for _ in range(MAX_FORECAST_PASSES):
        plan = decide(left.values(), there.values(), quotas=quotas)
        for placement in plan.placements:
            job = left.pop(placement.job)
            told[job.id] = Forecast(now, ended)
            there = _with(there, placement.shares, taken=True)
            quotas = _held(quotas, job.project, job.num_slots)
            if (lasts := durations.get(job.id)) is not None:
                heapq.heappush(ends, (now + lasts, job.id, job.project, placement.shares))
        left = {id: job._replace(head_hosts=plan.head_hosts.get(id, ())) for id, job in left.items()}
        if not left or not ends:
            break
        now, ended, project, shares = heapq.heappop(ends)
        there = _with(there, shares, taken=False)
        quotas = _held(quotas, project, -sum(len(share.slots) for share in shares))
    return told


def list_additional_starts(
    queue: Iterable[QueuedJob],
    hosts: Iterable[HostState],
    quotas: Mapping[str, Quota],
    *,
    otherwise: SchedulingDecision,
) -> list[str]:
    """Jobs that start now in this queue on these hosts, and would not by the plan as it is."""
    known = {placement.job for placement in otherwise.placements}
    return [p.job for p in decide(queue, hosts, quotas=quotas).placements if p.job not in known]


def _with(hosts: dict[str, HostState], shares: tuple[Share, ...], *, taken: bool) -> dict[str, HostState]:
    changed = dict(hosts)
    for name, slots in shares:
        if name in changed:
            free = set(changed[name].free)
            changed[name] = changed[name]._replace(free=tuple(sorted(free - {*slots} if taken else free | {*slots})))
    return changed


def _held(quotas: dict[str, Quota], project: str, more: int) -> dict[str, Quota]:
    quota = quotas.get(project)
    return quotas if quota is None else {**quotas, project: quota._replace(used=quota.used + more)}
