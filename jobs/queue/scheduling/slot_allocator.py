"""Allocate slots to gangs, keep hosts for blocked jobs, backfill kept hosts, and select jobs to preempt.

Ranks fill one node after another, with tp innermost. A share that is a multiple of the unit therefore never splits a
group that must stay on one host.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

from jobs.queue.scheduling.backfill import (
    BACKFILL_MARGIN_S,
    HeadStart,
    KeptSlots,
    compute_head_start,
    count_spare_slots,
    list_kept_slots,
)
from jobs.queue.scheduling.states import HostState, Occupant, Placement, Preemption, QueuedJob, Share
from planner.facts.kinds import SlotDemand, round_down


def spread_slots(demand: SlotDemand, unit: int, free: Mapping[str, int], preferred: str = "") -> dict[str, int] | None:
    """Return the slots per host, the largest share first, on as few hosts as possible, or None.

    The last share goes to the host with the fewest free slots, so large gaps remain for other gangs. The preferred
    host wins ties.
    """
    sizes = [(round_down(slots, unit), name) for name, slots in free.items()]
    usable = sorted(sizes, key=lambda row: (-row[0], row[1] != preferred, row[1]))[: demand.max_hosts or None]
    totals = accumulate(slots for slots, _ in usable)
    fewest = next((number for number, slots in enumerate(totals, 1) if slots >= demand.num_slots), None)
    if fewest is None:
        return None
    shares = {name: slots for slots, name in usable[: fewest - 1]}
    left = demand.num_slots - sum(shares.values())
    candidates = ((slots, name) for name, slots in free.items() if name not in shares and slots >= left)
    _, last = min(candidates, key=lambda row: (row[0], row[1] != preferred, row[1]))
    return {**shares, last: left}


class HeadHostCandidate(NamedTuple):
    """A host that could be kept for a blocked gang. `soon`: slots that are free without waiting for a job to finish."""

    name: str
    slots: int
    soon: int


def select_head_hosts(demand: SlotDemand, unit: int, hosts: Sequence[HeadHostCandidate]) -> tuple[str, ...]:
    """Return the hosts to keep for a gang that cannot start now, or nothing if they cannot hold it.

    Select as few hosts as could hold the gang if they were empty. Among such sets, select one that needs few more
    slots to become free.
    """
    fewest = _count_fewest_hosts(demand, unit, hosts)
    if fewest is None:
        return ()
    soonest = sorted(hosts, key=lambda host: (-round_down(host.soon, unit), host.slots, host.name))
    largest = sorted(hosts, key=lambda host: (-host.slots, host.name))
    chosen: list[str] = []
    slots = 0  # of the chosen hosts
    reserve = {host.name for host in largest[: fewest - 1]}  # the largest hosts, to complete the set
    reserve_slots = sum(round_down(host.slots, unit) for host in largest[: fewest - 1])
    for others in reversed(range(fewest)):
        next_largest = round_down(largest[others].slots, unit)
        missing = demand.num_slots - slots - reserve_slots
        one = next(
            host
            for host in soonest
            if (next_largest if host.name in reserve else round_down(host.slots, unit)) >= missing
        )
        chosen.append(one.name)
        slots += round_down(one.slots, unit)
        if others:
            removed = one if one.name in reserve else largest[others - 1]
            reserve.remove(removed.name)
            reserve_slots -= round_down(removed.slots, unit)
        largest.remove(one)
        soonest.remove(one)
    return tuple(sorted(chosen))


def _count_fewest_hosts(demand: SlotDemand, unit: int, hosts: Sequence[HeadHostCandidate]) -> int | None:
    if any(host.slots >= demand.num_slots for host in hosts):
        return 1
    sizes = sorted((round_down(host.slots, unit) for host in hosts), reverse=True)[: demand.max_hosts or None]
    return next((n for n, slots in enumerate(accumulate(sizes), 1) if slots >= demand.num_slots), None)


class EligibleHosts(NamedTuple):
    """Hosts that take jobs and that a job's spec allows, also grouped by hardware model because gangs use one model."""

    names: frozenset[str]
    by_model: tuple[tuple[str, ...], ...]


class SlotAllocator:
    """Track the hosts of one device during a scheduling pass.

    Args:
        now_s: Seconds since the hosts were read.
    """

    def __init__(self, device: str, hosts: list[HostState], trouble: str = "", now_s: float = 0.0) -> None:
        self.device, self.trouble, self._now_s = device, trouble, now_s
        self.hosts = {host.name: host for host in hosts}
        self.taking = {name: host for name, host in self.hosts.items() if host.takes_jobs}
        self.free = {name: host.free for name, host in self.taking.items()}
        self.holders: dict[str, QueuedJob] = {}  # job that each host is kept for
        self.head_hosts: dict[str, tuple[str, ...]] = {}  # by job
        self.head_starts: dict[str, HeadStart] = {}  # by job, when the hosts were kept
        self._kept: dict[str, KeptSlots] = {}  # by host
        self._spare: dict[str, int] = {}  # by kept host: free slots that the head cannot use
        self.open = sorted((len(free), name) for name, free in self.free.items())  # hosts that are kept for no job
        self._heads: set[frozenset[str]] = set()
        self._eligible_by_job: dict[str, EligibleHosts] = {}
        self._eligible: dict[object, EligibleHosts] = {}
        self._unit_by_job: dict[str, int | None] = {}
        self._units: dict[object, int | None] = {}
        self._unplaceable: set[object] = set()  # free slots only decrease during a pass
        self._not_backfillable: set[object] = set()
        self._has_bookings = any(host.bookings for host in hosts)

    def allocate(self, job: QueuedJob) -> Placement | None:
        """Allocate slots on hosts that are open to the job, or return None."""
        key = (self.get_eligible(job).names, job.demand)
        if key in self._unplaceable:
            return None
        shares = self._find_slots(job)
        if shares is None:
            self._unplaceable.add(key)
            return None
        return Placement(job.id, tuple(self._take(name, slots) for name, slots in shares.items()))

    def keep_hosts(self, job: QueuedJob) -> None:
        """Keep hosts for a blocked job if it is the first one with these eligible hosts."""
        eligible = self.get_eligible(job).names
        if eligible in self._heads:
            return
        names = self._select_hosts(job)
        if not names:
            return
        self._heads.add(eligible)
        self.head_hosts[job.id] = names
        for name in names:
            self._close(name)
            self.holders[name] = job
            self._kept[name] = list_kept_slots(self.taking[name], len(self.free[name]), job.priority)
        kept = [self._kept[name] for name in names]
        self.head_starts[job.id] = compute_head_start(job.num_slots, self._get_fitting_unit(job), kept)

    def backfill(self, job: QueuedJob) -> Placement | None:
        """Allocate slots also on kept hosts if that delays none of the jobs that hosts are kept for, or return None."""
        unit, eligible = self.get_unit(job), self.get_eligible(job)
        if unit is None or not self.holders:
            return None
        outlasted = frozenset(head for head in self.head_hosts if self._ends_before_start(job, head))
        key = (eligible.names, job.demand, outlasted)
        if key in self._not_backfillable:
            return None
        usable = [{name: self._count_backfill_slots(name, outlasted) for name in names} for names in eligible.by_model]
        shares = _choose_spread(job, unit, usable)
        if shares is None:
            self._not_backfillable.add(key)
            return None
        limit_ends_s = None if job.limit_s is None else self._now_s + job.limit_s
        for name in shares.keys() & self._kept.keys():
            self._kept[name] = self._kept[name].add_tenant(shares[name], limit_ends_s)
            self._spare.pop(name, None)
        taken = tuple(self._take(name, slots) for name, slots in shares.items())
        return Placement(job.id, taken, is_backfilled=True)

    def _ends_before_start(self, job: QueuedJob, head: str) -> bool:
        """Return whether the time limit ends the job before the predicted start of the head."""
        start_s = self.head_starts[head].predicted_s
        if job.limit_s is None or start_s is None:
            return False
        return self._now_s + job.limit_s + BACKFILL_MARGIN_S <= start_s

    def _count_backfill_slots(self, name: str, outlasted: Collection[str]) -> int:
        head = self.holders.get(name)
        if head is None or head.id in outlasted:
            return len(self.free[name])
        if name not in self._spare:
            unit, hosts = self._get_fitting_unit(head), len(self.head_hosts[head.id])
            self._spare[name] = count_spare_slots(self._kept[name], head.num_slots, unit, hosts)
        return self._spare[name]

    def _get_fitting_unit(self, job: QueuedJob) -> int:
        unit = self.get_unit(job)
        assert unit is not None, "hosts are kept only for jobs that can fit"
        return unit

    def can_fit(self, job: QueuedJob) -> bool:
        """Return whether the job could run if all hosts that take jobs were empty."""
        return self.get_unit(job) is not None

    def get_unit(self, job: QueuedJob) -> int | None:
        """Return the unit that each host's share is a multiple of, or None if the job cannot fit."""
        if job.id not in self._unit_by_job:
            self._unit_by_job[job.id] = self._find_unit(self.get_eligible(job), job.demand)
        return self._unit_by_job[job.id]

    def _find_unit(self, eligible: EligibleHosts, demand: SlotDemand) -> int | None:
        key = (eligible.names, demand)
        if key not in self._units:
            models = ([self.taking[name].slots for name in names] for names in eligible.by_model)
            fitting = {demand.get_best_unit(sizes) for sizes in models}
            self._units[key] = next((unit for unit in demand.units if unit in fitting), None)
        return self._units[key]

    def get_eligible(self, job: QueuedJob) -> EligibleHosts:
        """Return the hosts that the job can use. Jobs with equal conditions share one object."""
        if job.id not in self._eligible_by_job:
            booking_key = (job.project, job.limit_s) if self._has_bookings else None
            faults_key = (job.faulty_hosts, job.demand) if job.faulty_hosts else None
            key = (job.wanted_host, job.pool, job.labels, faults_key, booking_key)
            if key not in self._eligible:
                self._eligible[key] = self._find_eligible(job)
            self._eligible_by_job[job.id] = self._eligible[key]
        return self._eligible_by_job[job.id]

    def _find_eligible(self, job: QueuedJob) -> EligibleHosts:
        names = [job.wanted_host] if job.wanted_host else list(self.taking)
        candidates = (self.taking[name] for name in names if name in self.taking)
        matching = [host for host in candidates if host.matches(job) and not host.is_reserved_for_others(job)]
        if job.faulty_hosts:
            others = _group_by_model(host for host in matching if host.name not in job.faulty_hosts)
            if self._find_unit(others, job.demand) is not None:
                return others
        return _group_by_model(matching)

    def find_most_open(self, job: QueuedJob) -> str | None:
        """Return the host with the most free slots among the hosts that are open to the job."""
        eligible = self.get_eligible(job).names
        return next((name for _, name in reversed(self.open) if name in eligible), None)

    def count_open_slots(self, job: QueuedJob, unit: int) -> int:
        """Return the slots that the job could get at most on open hosts of one model."""
        models = self._iterate_open_models(job)
        return max((job.demand.get_max_slots(list(free.values()), unit) for free in models), default=0)

    def _find_slots(self, job: QueuedJob) -> dict[str, int] | None:
        demand, preferred = job.demand, job.checkpoint_host
        if (one := self._find_one_host(self.get_eligible(job).names, demand, preferred)) is not None:
            return {one: demand.num_slots}
        unit = self.get_unit(job)
        if demand.max_hosts == 1 or unit is None:
            return None
        return _choose_spread(job, unit, self._iterate_open_models(job))

    def _find_one_host(self, eligible: frozenset[str], demand: SlotDemand, preferred: str) -> str | None:
        """Return the smallest gap that holds the whole job. The preferred host wins a tie."""
        first = bisect_left(self.open, (demand.num_slots, ""))
        found = next((each for each in self.open[first:] if each[1] in eligible), None)
        if found is None:
            return None
        is_tie = preferred in eligible and preferred not in self.holders and len(self.free[preferred]) == found[0]
        return preferred if is_tie else found[1]

    def _iterate_open_models(self, job: QueuedJob) -> Iterator[dict[str, int]]:
        for names in self.get_eligible(job).by_model:
            yield {name: len(self.free[name]) for name in names if name not in self.holders}

    def _select_hosts(self, job: QueuedJob) -> tuple[str, ...]:
        unit = self.get_unit(job)
        if unit is None:
            return ()
        models = [[name for name in names if name not in self.holders] for names in self.get_eligible(job).by_model]
        before = job.head_hosts
        if before and any(set(before) <= set(names) for names in models) and self._is_minimal(job, unit, before):
            return tuple(sorted(before))
        sets = [select_head_hosts(job.demand, unit, [self._rate(job, name) for name in names]) for names in models]
        return min((names for names in sets if names), key=lambda names: self._rank(job, unit, names), default=())

    def _is_minimal(self, job: QueuedJob, unit: int, names: Collection[str]) -> bool:
        """Return whether these hosts could hold the gang if empty, but not without the smallest host."""
        demand = job.demand._replace(units=(unit,))
        sizes = sorted(self.taking[name].slots for name in names)
        fits, fits_on_fewer = (demand.get_best_unit(some) is not None for some in (sizes, sizes[1:]))
        return fits and not fits_on_fewer and len(names) <= (demand.max_hosts or len(names))

    def _rate(self, job: QueuedJob, name: str) -> HeadHostCandidate:
        host = self.taking[name]
        allocated = len(host.free) - len(self.free[name])
        return HeadHostCandidate(name, host.slots, host.count_soon_free(job.priority) - allocated)

    def _rank(self, job: QueuedJob, unit: int, names: tuple[str, ...]) -> tuple[object, ...]:
        """Return the number of hosts, of slots that must become free, and of slots in total. Smaller is better."""
        hosts = [self._rate(job, name) for name in names]
        soon = job.demand.get_max_slots([host.soon for host in hosts], unit)
        return len(names), job.num_slots - soon, sum(host.slots for host in hosts), names

    def _take(self, name: str, count: int) -> Share:
        if name not in self.holders:
            self._close(name)
        slots, self.free[name] = self.free[name][:count], self.free[name][count:]
        if name not in self.holders:
            insort(self.open, (len(self.free[name]), name))
        return Share(name, slots)

    def _close(self, name: str) -> None:
        del self.open[bisect_left(self.open, (len(self.free[name]), name))]


def _group_by_model(hosts: Iterable[HostState]) -> EligibleHosts:
    models: dict[str, list[str]] = {}
    for host in hosts:
        models.setdefault(host.device_name, []).append(host.name)
    by_model = tuple(tuple(sorted(models[model])) for model in sorted(models))
    return EligibleHosts(frozenset(chain(*by_model)), by_model)


def _choose_spread(job: QueuedJob, unit: int, models: Iterable[Mapping[str, int]]) -> dict[str, int] | None:
    """Return the slots per host on the fewest hosts of one model, from the usable slots of each model."""
    spreads = (spread_slots(job.demand, unit, usable, job.checkpoint_host) for usable in models)
    return min(
        (shares for shares in spreads if shares),
        key=lambda shares: (len(shares), job.checkpoint_host not in shares, *shares),
        default=None,
    )


def select_preemptions(allocator: SlotAllocator) -> list[Preemption]:
    """Select jobs to preempt for each job that hosts are kept for.

    Preempt only jobs with lower priority, only if the head then starts, and no more jobs than needed. The lowest
    priority goes first, then the shortest run.
    """
    heads = {job.id: job for job in allocator.holders.values()}
    return [Preemption(victim, id) for id, job in sorted(heads.items()) for victim in _select_victims(job, allocator)]


def _select_victims(job: QueuedJob, allocator: SlotAllocator) -> list[str]:
    names = allocator.head_hosts[job.id]
    free = {name: len(allocator.free[name]) for name in names}
    slots_by_victim: dict[str, dict[str, int]] = {}
    occupants: dict[str, Occupant] = {}
    for name in names:
        for occupant in allocator.taking[name].occupants:
            if occupant.is_ending:
                free[name] += occupant.slots
            elif occupant.is_leaving_for(job.priority):
                slots_by_victim.setdefault(occupant.job, {})[name] = occupant.slots
                occupants[occupant.job] = occupant
    victims: list[str] = []
    for victim in sorted(occupants, key=lambda one: (occupants[one].priority, -occupants[one].began.timestamp(), one)):
        if _can_start(job, allocator, free):
            break
        victims.append(victim)
        free = _add(free, slots_by_victim[victim])
    if not _can_start(job, allocator, free):
        return []
    for victim in victims[::-1]:  # a later victim can make an earlier one unnecessary
        without = _add(free, {name: -slots for name, slots in slots_by_victim[victim].items()})
        if _can_start(job, allocator, without):
            victims.remove(victim)
            free = without
    return victims


def _can_start(job: QueuedJob, allocator: SlotAllocator, free: dict[str, int]) -> bool:
    unit = allocator.get_unit(job)
    assert unit is not None, "hosts are kept only for jobs that can fit"
    if job.num_slots <= max(free.values()):
        return True
    return job.max_hosts != 1 and spread_slots(job.demand, unit, free) is not None


def _add(free: dict[str, int], more: dict[str, int]) -> dict[str, int]:
    return {name: slots + more.get(name, 0) for name, slots in free.items()}
