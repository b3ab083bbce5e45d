"""Build and draw queues and hosts for the scheduler, and read its plans."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta

from hypothesis import strategies as st

from jobs.queue.scheduling.placement import SchedulingPlan, plan_pass
from jobs.queue.scheduling.states import Booking, HostState, QueuedJob, Share

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
MOSTLY_CPU = st.sampled_from(["cpu", "cpu", "cpu", "cuda"])
NAMES = [f"host-{letter}" for letter in "abcde"]
LONG = "x" * 100  # the longest name of a job or a host


def job(
    id: str, num_slots: int = 1, wanted_host: str = "", priority: int = 0, age: int = 0, **rest: object
) -> QueuedJob:
    """Create a queued job. A higher `age` means a longer wait."""
    fields = {"name": f"name-of-{id}", "owner": 1, "device": "cpu", **rest}
    told = {"num_slots": num_slots, "wanted_host": wanted_host, "priority": priority, "points": priority, **fields}
    return QueuedJob(id=id, created=EPOCH - timedelta(seconds=age), **told)


def host(name: str, slots: int, free: int | None = None, **rest: object) -> HostState:
    fields = {"device": "cpu", **rest}
    return HostState(name=name, slots=slots, free=tuple(range(slots if free is None else free)), **fields)


@st.composite
def some_hosts(draw: st.DrawFn) -> list[HostState]:
    hosts = []
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True)):
        slots = draw(st.integers(1, 8))
        free = draw(st.sets(st.integers(0, slots - 1)))
        drained, live = not draw(st.integers(0, 5)), bool(draw(st.integers(0, 5)))
        device = draw(MOSTLY_CPU)
        hosts.append(HostState(name, device, slots, tuple(sorted(free)), drained, live))
    return hosts


@st.composite
def some_queue(draw: st.DrawFn) -> list[QueuedJob]:
    one = st.builds(
        QueuedJob,
        id=st.just(""),
        name=st.just("name"),
        owner=st.integers(1, 2),
        device=MOSTLY_CPU,
        num_slots=st.integers(1, 4) | st.integers(1, 10),
        wanted_host=st.sampled_from(["", "", "", *NAMES, "absent"]),
        priority=st.just(0),
        points=st.sampled_from([-1.0, 0.0, 0.5, 1.0]),
        created=st.integers(0, 3).map(lambda s: EPOCH + timedelta(seconds=s)),
        head_hosts=st.just(()) | st.lists(st.sampled_from([*NAMES, "absent"]), unique=True).map(tuple),
        units=st.just((1,)),
        max_hosts=st.just(1),
        project=st.just("default"),
        pool=st.just(""),
        labels=st.just(frozenset()),
        limit_s=st.none(),
        checkpoint_host=st.sampled_from(["", "", *NAMES, "absent"]),
    )
    return [job._replace(id=f"id-{number}-") for number, job in enumerate(draw(st.lists(one, max_size=12)))]


def in_order(queue: list[QueuedJob]) -> list[QueuedJob]:
    return sorted(queue, key=lambda job: (-job.points, job.created, job.id))


def places(plan: SchedulingPlan) -> dict[str, str]:
    """Return the host of each placed job."""
    return {placement.job: share.host for placement in plan.placements for share in placement.shares}


def may_use(job: QueuedJob, host: HostState) -> bool:
    """Return whether the job fits the host in its current state."""
    takes = host.live and not host.drained and host.device == job.device and job.num_slots <= host.slots
    return takes and job.wanted_host in ("", host.name)


class World:
    """Hosts with jobs, and scheduling passes, independent of the implementation of `place`."""

    def __init__(self, slots: dict[str, int]) -> None:
        self.slots = slots
        self.running: dict[str, tuple[tuple[Share, ...], int]] = {}  # by job: where, and when it began
        self.queue: dict[str, QueuedJob] = {}
        self.kept: dict[str, tuple[str, ...]] = {}
        self.now = 0

    def free(self, name: str) -> tuple[int, ...]:
        taken = {slot for shares, _ in self.running.values() for on, slots in shares for slot in slots if on == name}
        return tuple(slot for slot in range(self.slots[name]) if slot not in taken)

    def schedule(self) -> SchedulingPlan:
        self.now += 1
        hosts = [HostState(name, "cpu", slots, self.free(name)) for name, slots in self.slots.items()]
        plan = plan_pass([job._replace(head_hosts=self.kept.get(job.id, ())) for job in self.queue.values()], hosts)
        for placement in plan.placements:
            del self.queue[placement.job]
            self.running[placement.job] = (placement.shares, self.now)
        self.kept = plan.head_hosts
        return plan


@st.composite
def full_world(draw: st.DrawFn, hosts: int) -> World:
    """Hosts of 2 to 6 slots with jobs that are older than any head."""
    world = World({name: draw(st.integers(2, 6)) for name in NAMES[:hosts]})
    for name, slots in world.slots.items():
        for at in draw(st.sets(st.integers(0, slots - 1), min_size=1)):
            world.running[f"old-{name}-{at}"] = ((Share(name, (at,)),), 0)
    return world


@st.composite
def some_gangs(draw: st.DrawFn) -> list[QueuedJob]:
    jobs = []
    for number in range(draw(st.integers(0, 10))):
        tp = draw(st.sampled_from([1, 2, 4]))
        wide = tp * draw(st.sampled_from([1, 1, 2]))
        jobs.append(
            job(
                f"id-{number}-",
                wide * draw(st.integers(1, 6)),
                draw(st.sampled_from(["", "", "", *NAMES])),
                priority=draw(st.integers(-1, 1)),
                age=draw(st.integers(0, 3)),
                units=tuple(dict.fromkeys((wide, tp))),
                max_hosts=draw(st.sampled_from([0, 0, 0, 1, 2, 3])),
                project=draw(st.sampled_from(["default", "other"])),
                pool=draw(st.sampled_from(["", "", "large", "absent"])),
                labels=draw(st.sampled_from([frozenset(), frozenset(), frozenset({"nvlink"})])),
                head_hosts=draw(st.just(()) | st.lists(st.sampled_from(NAMES), unique=True).map(tuple)),
                limit_s=draw(st.none() | st.just(60)),
                checkpoint_host=draw(st.sampled_from(["", "", *NAMES])),
            )
        )
    return [each._replace(max_hosts=1) if each.wanted_host else each for each in jobs]


@st.composite
def some_labelled_hosts(draw: st.DrawFn) -> list[HostState]:
    return [
        each._replace(
            device="cpu",
            device_name=draw(st.sampled_from(["a100", "a100", "h100"])),
            labels=draw(st.sampled_from([frozenset(), frozenset({"nvlink"})])),
            pools=draw(st.sampled_from([frozenset(), frozenset({"large"})])),
            paused=draw(st.sampled_from(["", "", "", "large"])),
            bookings=draw(st.sampled_from([(), (), (Booking("other", 0.0),), (Booking("other", 3600.0),)])),
        )
        for each in draw(some_hosts())
    ]


def may_be_on(job: QueuedJob, host: HostState) -> bool:
    """Return whether a rank of the job can be on the host."""
    closed = not host.live or host.drained or host.paused
    asked = job.wanted_host in ("", host.name) and job.pool in ("", *host.pools) and job.labels <= host.labels
    free_of = all(job.project == b.project or (job.limit_s or 10**9) <= b.in_s for b in host.bookings)
    return asked and free_of and not closed


def smallest_number_of_hosts(job: QueuedJob, unit: int, free: dict[str, int]) -> int | None:
    """Return the smallest number of hosts that can hold the job, found by trying every set."""
    for count in range(1, len(free) + 1):
        if job.max_hosts and count > job.max_hosts:
            return None
        for names in itertools.combinations(free, count):
            room = max(free.values()) if count == 1 else sum(free[name] // unit * unit for name in names)
            if room >= job.num_slots:
                return count
    return None


def gang(id: str, num_slots: int, unit: int = 1, **rest: object) -> QueuedJob:
    return job(id, num_slots, units=(unit,), **{"max_hosts": 0, **rest})


def shares_of(plan: SchedulingPlan) -> dict[str, dict[str, int]]:
    return {p.job: {share.host: len(share.slots) for share in p.shares} for p in plan.placements}
