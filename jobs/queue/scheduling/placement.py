"""Decide which queued jobs start where, and forecast when the others start.

This module reads neither a database nor a clock.

The queue is processed by points, then by age. A job gets all its slots or none. If one host has enough
free slots, the job gets the smallest sufficient gap. Otherwise, it gets as few hosts of one model as possible.

A job that cannot start now but fits the hosts is blocked. The first blocked job with the same eligible hosts is their
head. As few hosts as could hold the head are kept for it, from pass to pass. A kept host takes a later job only as
backfill (see `jobs.queue.scheduling.backfill`). So the head starts at the latest when the jobs that ran on its hosts
have ended, or have reached their time limits. Other hosts
take any later job. If every blocked job kept hosts, a queue of large jobs would leave most hosts idle, so only heads
do.

No job starves: heads start one after another, and points grow with waiting time.

A project never exceeds its quota. The first job that the quota refuses also blocks the later jobs of its project.
Otherwise, small jobs could block it forever. Slots that a head will need count as used. A job larger than the quota
blocks no other job.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import NamedTuple

from jobs.queue.scheduling.slot_allocator import SlotAllocator, select_preemptions
from jobs.queue.scheduling.states import (
    HostState,
    Occupant,
    Placement,
    Preemption,
    QueuedJob,
    Quota,
    QuotaBudget,
    Share,
)
from jobs.queue.scheduling.waiting_reasons import explain_wait

MAX_FORECAST_PASSES = 60
MAX_FORECAST_JOBS = 200  # at the front of the queue


class SchedulingPlan(NamedTuple):
    """The result of a pass. Each job of the queue has either a placement or a reason why it waits."""

    placements: list[Placement]
    reasons: dict[str, str]
    head_hosts: dict[str, tuple[str, ...]]
    preemptions: list[Preemption]
    latest_starts: dict[str, float]  # seconds until the heads start at the latest, if time limits bound the start


class SchedulingDecision(NamedTuple):
    """The result of a pass without reasons and preemptions, which take as long as the decision itself."""

    placements: list[Placement]
    head_hosts: dict[str, tuple[str, ...]]  # by job: the hosts that are kept for it
    quota_refusals: dict[str, str]
    blocked: list[QueuedJob]
    allocators: dict[str, SlotAllocator]  # by device


def sort_queue(queue: Iterable[QueuedJob]) -> list[QueuedJob]:
    """Return the jobs in scheduling order."""
    return sorted(queue, key=lambda job: (-job.points, job.created, job.id))


def plan_pass(
    queue: Iterable[QueuedJob],
    hosts: Iterable[HostState],
    trouble: str = "",
    quotas: Mapping[str, Quota] | None = None,
) -> SchedulingPlan:
    """Decide what starts now and explain why the other jobs wait. The order of queue and hosts has no effect.

    `trouble`: why silent hosts may be well. Projects without a quota are unlimited.
    """
    return explain_decision(decide(queue, hosts, trouble, quotas))


def explain_decision(decision: SchedulingDecision) -> SchedulingPlan:
    """Add wait reasons and preemptions to a decision."""
    allocators = decision.allocators.values()
    preemptions = [each for allocator in allocators for each in select_preemptions(allocator)]
    heads = {each.for_job for each in preemptions}
    reasons = decision.quota_refusals | _explain_blocked(decision.blocked, decision.allocators, heads)
    latest = {
        job: start.latest_s
        for allocator in allocators
        for job, start in allocator.head_starts.items()
        if start.latest_s is not None
    }
    return SchedulingPlan(decision.placements, reasons, decision.head_hosts, preemptions, latest)


def decide(
    queue: Iterable[QueuedJob],
    hosts: Iterable[HostState],
    trouble: str = "",
    quotas: Mapping[str, Quota] | None = None,
    now_s: float = 0.0,
) -> SchedulingDecision:
    """Decide what starts now, with the arguments of `plan_pass`. `now_s`: seconds since the hosts were read."""
    queue, hosts = sort_queue(queue), sorted(hosts, key=lambda host: host.name)
    allocators = {
        device: SlotAllocator(device, [host for host in hosts if host.device == device], trouble, now_s)
        for device in sorted({job.device for job in queue})
    }
    budget = QuotaBudget(quotas or {})
    placements: list[Placement] = []
    blocked: list[QueuedJob] = []
    refusals: dict[str, str] = {}
    for job in queue:
        allocator = allocators[job.device]
        fits = allocator.can_fit(job)
        if fits and (refusal := budget.explain_refusal(job.project, job.num_slots)):
            refusals[job.id] = refusal
            continue
        if placement := allocator.allocate(job) or allocator.backfill(job):
            placements.append(placement)
            budget.take(job.project, job.num_slots)
            continue
        blocked.append(job)
        if fits:
            allocator.keep_hosts(job)
            if job.id in allocator.head_hosts:
                budget.take(job.project, job.num_slots)
    head_hosts = {
        job.id: names
        for job in blocked
        if not job.wanted_host and (names := allocators[job.device].head_hosts.get(job.id))
    }
    return SchedulingDecision(placements, head_hosts, refusals, blocked, allocators)


def _explain_blocked(
    blocked: list[QueuedJob], allocators: dict[str, SlotAllocator], heads_with_preemptions: set[str]
) -> dict[str, str]:
    """Explain all blocked jobs after the placements, because reasons state which slots are free."""
    ahead: dict[str, int] = dict.fromkeys(allocators, 0)
    first: dict[str, QueuedJob] = {}
    reasons = {}
    for job in blocked:
        allocator = allocators[job.device]
        reasons[job.id] = explain_wait(job, allocator, ahead[job.device], first.get(job.device))
        if job.id in heads_with_preemptions:
            reasons[job.id] += " Preemptible jobs with lower priority are ending to free slots."
        if allocator.can_fit(job):
            ahead[job.device] += 1
            first.setdefault(job.device, job)
    return reasons


class RunningAttempt(NamedTuple):
    """An attempt that uses slots.

    `left_s`: predicted seconds until it ends, or None if unknown. `limit_left_s`: seconds until its time limit.
    """

    job: str
    project: str
    shares: tuple[Share, ...]
    left_s: float | None
    limit_left_s: float | None = None


class Forecast(NamedTuple):
    """Seconds until a job starts, and the job that ends just before. `ends` is "" for a start in the next pass."""

    in_s: float
    ends: str


def forecast(
    queue: Iterable[QueuedJob],
    hosts: Iterable[HostState],
    running: Iterable[RunningAttempt],
    durations: Mapping[str, float | None],
    quotas: Mapping[str, Quota],
) -> dict[str, Forecast]:
    """Predict starts by simulating passes of the scheduler. Jobs without a predicted start are omitted.

    `durations`: predicted seconds of queued jobs. None: unknown, so no start depends on the end of the job.
    """
    left = {job.id: job for job in sort_queue(queue)[:MAX_FORECAST_JOBS]}
    states = {host.name: host._replace(occupants=()) for host in hosts}
    quotas = dict(quotas)
    ends = []
    for attempt in running:
        states = _add_occupants(states, attempt)
        if attempt.left_s is not None:
            ends.append((attempt.left_s, attempt.job, attempt.project, attempt.shares))
    heapq.heapify(ends)
    now, ended, found = 0.0, "", dict[str, Forecast]()
    for _ in range(MAX_FORECAST_PASSES):
        decision = decide(left.values(), states.values(), quotas=quotas, now_s=now)
        for placement in decision.placements:
            job = left.pop(placement.job)
            found[job.id] = Forecast(now, ended)
            ends_s = None if (duration_s := durations.get(job.id)) is None else now + duration_s
            limit_ends_s = None if job.limit_s is None else now + job.limit_s
            states = _change_free_slots(states, placement.shares, taken=True)
            started = RunningAttempt(job.id, job.project, placement.shares, ends_s, limit_ends_s)
            states = _add_occupants(states, started)
            quotas = _change_use(quotas, job.project, job.num_slots)
            if ends_s is not None:
                heapq.heappush(ends, (ends_s, job.id, job.project, placement.shares))
        left = {id: job._replace(head_hosts=decision.head_hosts.get(id, ())) for id, job in left.items()}
        if not left or not ends:
            break
        now, ended, project, shares = heapq.heappop(ends)
        states = _remove_occupants(_change_free_slots(states, shares, taken=False), ended, shares)
        quotas = _change_use(quotas, project, -sum(len(share.slots) for share in shares))
    return found


def _change_free_slots(hosts: dict[str, HostState], shares: tuple[Share, ...], *, taken: bool) -> dict[str, HostState]:
    changed = dict(hosts)
    for name, slots in shares:
        if name in changed:
            free = set(changed[name].free)
            changed[name] = changed[name]._replace(free=tuple(sorted(free - {*slots} if taken else free | {*slots})))
    return changed


def _add_occupants(hosts: dict[str, HostState], attempt: RunningAttempt) -> dict[str, HostState]:
    """Add an attempt to its hosts. Without a time limit, its end is unknown."""
    changed = dict(hosts)
    ends_s = None if attempt.limit_left_s is None else attempt.left_s
    for name, slots in attempt.shares:
        if name in changed:
            occupant = Occupant(attempt.job, 0, datetime.min, len(slots), False, False, ends_s, attempt.limit_left_s)
            changed[name] = changed[name]._replace(occupants=(*changed[name].occupants, occupant))
    return changed


def _remove_occupants(hosts: dict[str, HostState], job: str, shares: tuple[Share, ...]) -> dict[str, HostState]:
    changed = dict(hosts)
    for name, _ in shares:
        if name in changed:
            left = tuple(each for each in changed[name].occupants if each.job != job)
            changed[name] = changed[name]._replace(occupants=left)
    return changed


def _change_use(quotas: dict[str, Quota], project: str, slots: int) -> dict[str, Quota]:
    quota = quotas.get(project)
    return quotas if quota is None else {**quotas, project: quota._replace(used=quota.used + slots)}
