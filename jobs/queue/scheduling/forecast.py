"""When queued jobs should start: the scheduler's own decisions, played on with predicted durations. An estimate.

A job without a predicted duration counts with its time limit; without that too, nothing is foretold from its end.

What would start now if there were more slots, a pool went on, or a job had another priority. Nothing is changed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jobs.queue.scheduling.placement import Decided, decide, in_order
from jobs.queue.scheduling.states import HostState, Quota, Share, Waiting

MOST_PASSES = 60
MOST_JOBS = 200  # of the queue's front; those behind them are not foretold


class Running(NamedTuple):
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
    queue: Iterable[Waiting],
    hosts: Iterable[HostState],
    running: Iterable[Running],
    durations: Mapping[str, float | None],
    quotas: Mapping[str, Quota],
) -> dict[str, Forecast]:
    """By job, for those of which something can be told."""
    left = {job.id: job for job in in_order(queue)[:MOST_JOBS]}
    there = {host.name: host._replace(occupants=()) for host in hosts}
    quotas = dict(quotas)
    ends = [(each.left_s, each.job, each.project, each.shares) for each in running if each.left_s is not None]
    heapq.heapify(ends)
    now, ended, told = 0.0, "", dict[str, Forecast]()
    for _ in range(MOST_PASSES):
        plan = decide(left.values(), there.values(), quotas=quotas)
        for placement in plan.placements:
            job = left.pop(placement.job)
            told[job.id] = Forecast(now, ended)
            there = _with(there, placement.shares, taken=True)
            quotas = _held(quotas, job.project, job.num_slots)
            if (lasts := durations.get(job.id)) is not None:
                heapq.heappush(ends, (now + lasts, job.id, job.project, placement.shares))
        left = {id: job._replace(kept=plan.kept.get(id, ())) for id, job in left.items()}
        if not left or not ends:
            break
        now, ended, project, shares = heapq.heappop(ends)
        there = _with(there, shares, taken=False)
        quotas = _held(quotas, project, -sum(len(share.slots) for share in shares))
    return told


def started_if(
    queue: Iterable[Waiting],
    hosts: Iterable[HostState],
    quotas: Mapping[str, Quota],
    *,
    otherwise: Decided,
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
