"""Which preemptible jobs give way: only to a head of higher priority, only where it starts once they are gone, and no
more of them than it needs. The lowest priority goes first, then the one that ran the shortest.
"""

from __future__ import annotations

from jobs.queue.scheduling.gang import spread
from jobs.queue.scheduling.pool import Pool
from jobs.queue.scheduling.states import Occupant, Preemption, Waiting


def preemptions(pool: Pool) -> list[Preemption]:
    """For every head of the pool, on the hosts that are kept for it."""
    heads = {job.id: job for job in pool.holders.values()}
    return [each for job in sorted(heads.values(), key=lambda job: job.id) for each in _for(job, pool)]


def _for(job: Waiting, pool: Pool) -> list[Preemption]:
    names = pool.kept[job.id]
    free = {name: len(pool.free[name]) for name in names}
    on: dict[str, dict[str, int]] = {}
    told: dict[str, Occupant] = {}
    for name in names:
        for who in pool.taking[name].occupants:
            if who.leaving:
                free[name] += who.slots
            elif who.priority < job.priority:
                on.setdefault(who.job, {})[name] = who.slots
                told[who.job] = who
    victims: list[str] = []
    for victim in sorted(on, key=lambda one: (told[one].priority, -told[one].began.timestamp(), one)):
        if _starts(job, pool, free):
            break
        victims.append(victim)
        free = _with(free, on[victim])
    if not _starts(job, pool, free):
        return []
    for victim in victims[::-1]:  # one chosen early may have turned out not to be needed
        without = _with(free, {name: -slots for name, slots in on[victim].items()})
        if _starts(job, pool, without):
            victims.remove(victim)
            free = without
    return [Preemption(victim, job.id) for victim in victims]


def _starts(job: Waiting, pool: Pool, free: dict[str, int]) -> bool:
    unit = pool.unit(job)
    assert unit is not None, "the first job of the queue fits its hosts"
    if job.num_slots <= max(free.values()):
        return True
    return job.max_hosts != 1 and spread(job.demand, unit, free) is not None


def _with(free: dict[str, int], more: dict[str, int]) -> dict[str, int]:
    return {name: slots + more.get(name, 0) for name, slots in free.items()}
