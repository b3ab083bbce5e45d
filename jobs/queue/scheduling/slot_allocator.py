"""Distribute the ranks of a job over hosts, reserve hosts for blocked jobs, and select jobs to preempt."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from jobs.queue.scheduling.states import HostState, Occupant, Placement, Preemption, QueuedJob, Share
from planner.facts.kinds import SlotDemand, round_down


def spread_slots(demand: SlotDemand, unit: int, free: Mapping[str, int], liked: str = "") -> dict[str, int] | None:
    """Slots by host, the largest share first: over as few hosts as their free slots allow; None where they cannot.

    Of the hosts that could take the last share it is the one with the fewest free slots, so that large holes stay. Of
    hosts that are as good the one that is `liked` comes first.
    """

    def turn(name: str) -> tuple[bool, str]:
        return name != liked, name

    sizes = [(round_down(slots, unit), name) for name, slots in free.items()]
    usable = sorted(sizes, key=lambda row: (-row[0], *turn(row[1])))
    usable = usable[: demand.max_hosts or None]
    reached = list(accumulate(slots for slots, _ in usable))
    fewest = next((number for number, slots in enumerate(reached, 1) if slots >= demand.num_slots), None)
    if fewest is None:
        return None
    shares = {name: slots for slots, name in usable[: fewest - 1]}
    left = demand.num_slots - sum(shares.values())
    last = min((slots, *turn(name)) for name, slots in free.items() if name not in shares and slots >= left)
    return {**shares, last[-1]: left}


class Candidate(NamedTuple):
    """A host that could be kept for a gang. `soon`: slots that are free, or will be without waiting for a job's end."""

    name: str
    slots: int
    soon: int


def to_keep(demand: SlotDemand, unit: int, hosts: Sequence[Candidate]) -> tuple[str, ...]:
    """The hosts to keep for a gang that cannot start now: as few as would hold it empty, of such sets one that needs
    few further slots to come free. Nothing where they cannot hold it.
    """
    fewest = _fewest(demand, unit, hosts)
    if fewest is None:
        return ()
    soonest = sorted(hosts, key=lambda host: (-round_down(host.soon, unit), host.slots, host.name))
    largest = sorted(hosts, key=lambda host: (-host.slots, host.name))
    chosen: list[str] = []
    slots = 0  # of those chosen
    after = {host.name for host in largest[: fewest - 1]}  # the largest, as many as are chosen after this one
    most = sum(round_down(host.slots, unit) for host in largest[: fewest - 1])  # that they could hold
    for others in reversed(range(fewest)):
        next_largest = round_down(largest[others].slots, unit)
        # This one, and the largest after it, hold the gang.
        lacking = demand.num_slots - slots - most
        one = next(
            host
            for host in soonest
            if (next_largest if host.name in after else round_down(host.slots, unit)) >= lacking
        )
        chosen.append(one.name)
        slots += round_down(one.slots, unit)
        if others:
            left_out = one if one.name in after else largest[others - 1]
            after.remove(left_out.name)
            most -= round_down(left_out.slots, unit)
        largest.remove(one)
        soonest.remove(one)
    return tuple(sorted(chosen))


def _fewest(demand: SlotDemand, unit: int, hosts: Sequence[Candidate]) -> int | None:
    if any(host.slots >= demand.num_slots for host in hosts):
        return 1
    sizes = sorted((round_down(host.slots, unit) for host in hosts), reverse=True)[: demand.max_hosts or None]
    return next((n for n, slots in enumerate(accumulate(sizes), 1) if slots >= demand.num_slots), None)


class Ground(NamedTuple):
    """The hosts that a job may ever go to, of those that take jobs now; by model of device, as a gang has one."""

    hosts: frozenset[str]
    by_model: tuple[tuple[str, ...], ...]


class SlotAllocator:
    """The hosts of one device while a pass goes through the queue."""

    def __init__(self, device: str, hosts: list[HostState], trouble: str = "") -> None:
        self.device, self.trouble = device, trouble
        self.hosts = {host.name: host for host in hosts}
        self.taking = {name: host for name, host in self.hosts.items() if host.takes_jobs}
        self.free = {name: host.free for name, host in self.taking.items()}
        self.holders: dict[str, QueuedJob] = {}  # by host
        self.head_hosts: dict[str, tuple[str, ...]] = {}  # hosts by holder
        self.open = sorted((len(free), name) for name, free in self.free.items())  # hosts kept for nobody
        self._heads: dict[frozenset[str], QueuedJob] = {}
        self._ground_of: dict[str, Ground] = {}  # by job
        self._grounds: dict[object, Ground] = {}
        self._unit_of: dict[str, int | None] = {}  # by job
        self._units: dict[object, int | None] = {}
        self._refused: set[object] = set()  # demands that found no room: it only shrinks during a pass
        self._booked = any(host.bookings for host in hosts)

    def take(self, job: QueuedJob) -> Placement | None:
        """Give the job its slots if hosts that are open to it have room."""
        asked = (self.ground(job).hosts, job.demand)
        if asked in self._refused:
            return None
        shares = self._room(job)
        if shares is None:
            self._refused.add(asked)
            return None
        return Placement(job.id, tuple(self._give(name, slots) for name, slots in shares.items()))

    def hold(self, job: QueuedJob) -> None:
        """Keep hosts for a blocked job, if it is the first of those that may go where it may."""
        hosts = self.ground(job).hosts
        if hosts in self._heads:
            return
        names = self._to_keep(job)
        if not names:
            return
        self._heads[hosts] = job
        self.head_hosts[job.id] = names
        for name in names:
            self.holders[name] = job
            self._close(name)

    def head(self, job: QueuedJob) -> QueuedJob | None:
        """Who is first of those that may go where the job may."""
        return self._heads.get(self.ground(job).hosts)

    def fits(self, job: QueuedJob) -> bool:
        """Whether it could run on hosts that take jobs, were they empty."""
        return self.unit(job) is not None

    def unit(self, job: QueuedJob) -> int | None:
        """What each host's share of it is a multiple of; None where no hosts that take jobs could ever hold it."""
        if job.id not in self._unit_of:
            self._unit_of[job.id] = self._fitting_unit(job)
        return self._unit_of[job.id]

    def _fitting_unit(self, job: QueuedJob) -> int | None:
        ground, demand = self.ground(job), job.demand
        key = (ground.hosts, demand)
        if key not in self._units:
            sizes = [[self.taking[name].slots for name in names] for names in ground.by_model]
            units = (demand.get_best_unit(model) for model in sizes)
            fitting = {unit for unit in units if unit is not None}
            self._units[key] = next((unit for unit in demand.units if unit in fitting), None)
        return self._units[key]

    def ground(self, job: QueuedJob) -> Ground:
        """The hosts that it may ever go to."""
        if job.id not in self._ground_of:
            self._ground_of[job.id] = self._shared_ground(job)
        return self._ground_of[job.id]

    def _shared_ground(self, job: QueuedJob) -> Ground:
        """One for all jobs that ask for the same."""
        booked = (job.project, job.limit_s) if self._booked else None
        key = (job.wanted_host, job.pool, job.labels, booked)
        if key not in self._grounds:
            named = [self.taking[job.wanted_host]] if job.wanted_host in self.taking else []
            asked = named if job.wanted_host else self.taking.values()
            may = [h for h in asked if h.matches(job) and not h.is_reserved_for_others(job)]
            models: dict[str, list[str]] = {}
            for host in may:
                models.setdefault(host.device_name, []).append(host.name)
            self._grounds[key] = Ground(
                frozenset(host.name for host in may), tuple(tuple(sorted(models[model])) for model in sorted(models))
            )
        return self._grounds[key]

    def most_open(self, job: QueuedJob) -> str | None:
        """Of the hosts open to it the one with the most free slots."""
        hosts = self.ground(job).hosts
        return next((name for _, name in reversed(self.open) if name in hosts), None)

    def open_slots(self, job: QueuedJob, unit: int) -> int:
        """Slots that a gang like it could have at most on hosts of one model that are open to it."""
        models = self._open_by_model(job)
        return max((job.demand.get_max_slots(list(free.values()), unit) for free in models), default=0)

    def _room(self, job: QueuedJob) -> dict[str, int] | None:
        demand = job.demand
        if (one := self._one_host(self.ground(job).hosts, demand, job.checkpoint_host)) is not None:
            return {one: demand.num_slots}
        unit = self.unit(job)
        if demand.max_hosts == 1 or unit is None:
            return None
        spreads = [spread_slots(demand, unit, free, job.checkpoint_host) for free in self._open_by_model(job)]
        found = (each for each in spreads if each)
        return min(found, key=lambda each: (len(each), job.checkpoint_host not in each, *each), default=None)

    def _one_host(self, hosts: frozenset[str], demand: SlotDemand, saved_on: str) -> str | None:
        """The one with the fewest free slots; of these the one that its checkpoint is on, if it is among them."""
        tightest = bisect_left(self.open, (demand.num_slots, ""))
        found = next((each for each in self.open[tightest:] if each[1] in hosts), None)
        if found is None:
            return None
        as_good = saved_on in hosts and saved_on not in self.holders and len(self.free[saved_on]) == found[0]
        return saved_on if as_good else found[1]

    def _open_by_model(self, job: QueuedJob) -> Iterator[dict[str, int]]:
        for names in self.ground(job).by_model:
            yield {name: len(self.free[name]) for name in names if name not in self.holders}

    def _to_keep(self, job: QueuedJob) -> tuple[str, ...]:
        unit = self.unit(job)
        if unit is None:
            return ()
        models = [[name for name in names if name not in self.holders] for names in self.ground(job).by_model]
        for names in models:
            if (
                job.head_hosts
                and set(job.head_hosts) <= set(names)
                and self._holds_barely(job.demand, unit, job.head_hosts)
            ):
                return tuple(sorted(job.head_hosts))
        sets = [to_keep(job.demand, unit, [self._candidate(job, name) for name in names]) for names in models]
        return min((found for found in sets if found), key=lambda found: self._lacks(job, unit, found), default=())

    def _holds_barely(self, demand: SlotDemand, unit: int, names: Collection[str]) -> bool:
        """Whether all of these hosts together could hold the gang empty, and not without the smallest."""
        sizes = sorted(self.taking[name].slots for name in names)
        asked = demand._replace(units=(unit,))
        fits_on_fewer = asked.get_best_unit(sizes[1:]) is not None
        return (
            asked.get_best_unit(sizes) is not None
            and not fits_on_fewer
            and len(names) <= (demand.max_hosts or len(names))
        )

    def _candidate(self, job: QueuedJob, name: str) -> Candidate:
        gone = len(self.taking[name].free) - len(self.free[name])
        return Candidate(name, self.taking[name].slots, self.taking[name].count_soon_free(job.priority) - gone)

    def _lacks(self, job: QueuedJob, unit: int, names: tuple[str, ...]) -> tuple[object, ...]:
        """For the smallest: how many hosts, further slots, slots in all, their names."""
        hosts = [self._candidate(job, name) for name in names]
        soon = job.demand.get_max_slots([host.soon for host in hosts], unit)
        return len(names), job.num_slots - soon, sum(host.slots for host in hosts), names

    def _give(self, name: str, count: int) -> Share:
        self._close(name)
        slots, self.free[name] = self.free[name][:count], self.free[name][count:]
        insort(self.open, (len(self.free[name]), name))
        return Share(name, slots)

    def _close(self, name: str) -> None:
        del self.open[bisect_left(self.open, (len(self.free[name]), name))]


def preemptions(pool: SlotAllocator) -> list[Preemption]:
    """For every head of the pool, on the hosts that are kept for it."""
    heads = {job.id: job for job in pool.holders.values()}
    return [each for job in sorted(heads.values(), key=lambda job: job.id) for each in _for(job, pool)]


def _for(job: QueuedJob, pool: SlotAllocator) -> list[Preemption]:
    names = pool.head_hosts[job.id]
    free = {name: len(pool.free[name]) for name in names}
    on: dict[str, dict[str, int]] = {}
    told: dict[str, Occupant] = {}
    for name in names:
        for who in pool.taking[name].occupants:
            if who.is_ending:
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


def _starts(job: QueuedJob, pool: SlotAllocator, free: dict[str, int]) -> bool:
    unit = pool.unit(job)
    assert unit is not None, "the first job of the queue fits its hosts"
    if job.num_slots <= max(free.values()):
        return True
    return job.max_hosts != 1 and spread_slots(job.demand, unit, free) is not None


def _with(free: dict[str, int], more: dict[str, int]) -> dict[str, int]:
    return {name: slots + more.get(name, 0) for name, slots in free.items()}
