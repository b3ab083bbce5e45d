"""Compare the scheduler with FIFO and plain backfill in a simulated week of a large cluster.

    python -m benchmarks.fleet [--hosts 1000] [--jobs 10000] [--days 7] [--seed 1]

The code of the scheduler decides (`plan_pass` of `jobs.queue.scheduling.placement`), on a simulated clock. It runs
twice: all jobs have time limits, or none. A time limit is 1.1 to 3 times the run time, and is the only predicted end.
The other policies use the same hosts and gangs and ignore priorities and projects. FIFO starts jobs in order. Plain
backfill starts each job that fits, the oldest first.

More jobs arrive by day than by night. Their sizes are powers of two up to 512 slots, and their lengths are lognormal.
One of three projects with equal weights submits most jobs. Jain's index is computed over the speeds of the projects,
which are one over the mean slowdown of their jobs. An index of 1 is fair. The slowdown is the time from submit to end
over the run time, which counts as ten minutes at least.
"""

from __future__ import annotations

import argparse
import heapq
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from statistics import median
from typing import NamedTuple

from jobs.queue.scheduling.placement import plan_pass, sort_queue
from jobs.queue.scheduling.slot_allocator import spread_slots
from jobs.queue.scheduling.states import (
    HostState,
    Occupant,
    Placement,
    PointRates,
    ProjectUse,
    QueuedJob,
    Share,
    compute_decayed_use,
    compute_points,
    compute_share_factors,
)
from planner.facts.kinds import SlotDemand

SLOTS = 8
BEGIN = datetime(2026, 11, 16, tzinfo=UTC)
DAY_S = 86_400.0
PASS_EVERY_S = 60.0  # the scheduler decides once per minute of simulated time, after an event
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SIZE_WEIGHTS = (20, 12, 14, 22, 10, 8, 6, 4, 3, 1)
PROJECTS = {"busy": 6, "usual": 3, "quiet": 1}  # how often each submits
PRIORITIES = {0: 85, 5: 12, 10: 3}
RATES = PointRates(per_hour=0.1, share=1.0)  # the defaults of MESHBOARD_AGEING_PER_HOUR and MESHBOARD_SHARE_POINTS
HALF_LIFE_S = DAY_S
LOAD = 0.95  # of the slots, asked for over the week
MIN_LIMIT, MAX_LIMIT = 1.1, 3.0  # time limit over the run time


class SimulatedJob(NamedTuple):
    """A job of the week, with times in seconds since its start."""

    id: str
    project: str
    priority: int
    slots: int
    unit: int
    submitted: float
    lasts: float
    limit_s: int | None


class WeekResult(NamedTuple):
    """Start time of each job, and the use of the cluster until the end of the week."""

    started: dict[str, float]
    busy_slot_s: float
    passes: int
    longest_pass_s: float


Policy = Callable[["Cluster", float], list[Placement]]


class Cluster:
    """Hosts, running jobs, and waiting jobs."""

    def __init__(self, hosts: int) -> None:
        self.free = {f"host-{n:04}": tuple(range(SLOTS)) for n in range(hosts)}
        self.waiting: dict[str, SimulatedJob] = {}
        self.running: dict[str, dict[str, tuple[int, float | None]]] = {name: {} for name in self.free}
        self.kept: dict[str, tuple[str, ...]] = {}
        self.used = dict.fromkeys(PROJECTS, 0.0)
        self.held = dict.fromkeys(PROJECTS, 0)
        self.counted = 0.0

    def hosts(self, now: float) -> list[HostState]:
        kept = {name for names in self.kept.values() for name in names}
        return [
            HostState(name, "cuda", SLOTS, free, device_name="gpu", occupants=self._list_occupants(name, now, kept))
            for name, free in self.free.items()
        ]

    def _list_occupants(self, name: str, now: float, kept: set[str]) -> tuple[Occupant, ...]:
        """Return the running jobs of a kept host, as `jobs.queue.scheduling.snapshot.load_hosts` does."""
        return tuple(
            Occupant(
                job, 0, BEGIN, slots, is_ending=False, is_preemptible=False,
                ends_s=None if limit is None else limit - now, limit_ends_s=None if limit is None else limit - now,
            )
            for job, (slots, limit) in (self.running[name].items() if name in kept else ())
        )  # fmt: skip

    def count_use(self, now: float) -> None:
        """Add the use since the last call, as `jobs.queue.termination.count_use` does."""
        for project in PROJECTS:
            self.used[project] = compute_decayed_use(
                self.used[project], self.held[project], now - self.counted, HALF_LIFE_S
            )
        self.counted = now

    def take_slots(self, job: SimulatedJob, shares: tuple[Share, ...], now: float) -> None:
        for name, slots in shares:
            self.free[name] = tuple(slot for slot in self.free[name] if slot not in slots)
            self.running[name][job.id] = (len(slots), None if job.limit_s is None else now + job.limit_s)

    def release_slots(self, job: str, shares: tuple[Share, ...]) -> None:
        for name, slots in shares:
            self.free[name] = tuple(sorted((*self.free[name], *slots)))
            del self.running[name][job]


def place_with_meshboard(cluster: Cluster, now: float) -> list[Placement]:
    """Place jobs with the scheduler of Meshboard."""
    share = compute_share_factors({name: ProjectUse(used, 1.0) for name, used in cluster.used.items()})
    queue = [
        _build_waiting_gang(
            job,
            compute_points(job.priority, now - job.submitted, share[job.project], 0.0, RATES).total,
            cluster.kept.get(job.id, ()),
        )
        for job in cluster.waiting.values()
    ]
    plan = plan_pass(queue, cluster.hosts(now))
    cluster.kept = plan.head_hosts
    return plan.placements


def place_fifo(cluster: Cluster, now: float) -> list[Placement]:
    """Place jobs in order of age until one does not fit."""
    return _place_greedily(cluster, stops=True)


def place_backfill(cluster: Cluster, now: float) -> list[Placement]:
    """Place each job that fits, in order of age, without reservations."""
    return _place_greedily(cluster, stops=False)


def _place_greedily(cluster: Cluster, *, stops: bool) -> list[Placement]:
    free = dict(cluster.free)
    counts = {name: len(slots) for name, slots in free.items()}
    placed: list[Placement] = []
    refused: set[tuple[int, int]] = set()
    for job in sort_queue(_build_waiting_gang(job, 0.0, ()) for job in cluster.waiting.values()):
        key = (job.num_slots, job.units[0])
        shares = None if key in refused else spread_slots(SlotDemand(*key[:1], job.units, 0), job.units[0], counts)
        if shares is None:
            refused.add(key)
            if stops:
                break
            continue
        placed.append(Placement(job.id, tuple(Share(name, free[name][:take]) for name, take in shares.items())))
        for name, take in shares.items():
            free[name] = free[name][take:]
            counts[name] -= take
    return placed


def _build_waiting_gang(job: SimulatedJob, points: float, kept: tuple[str, ...]) -> QueuedJob:
    return QueuedJob(
        id=job.id, name=job.id, owner=1, device="cuda", num_slots=job.slots, wanted_host="", priority=job.priority,
        created=BEGIN + timedelta(seconds=job.submitted), head_hosts=kept, units=(job.unit,), max_hosts=0,
        points=points,
        project=job.project, limit_s=job.limit_s,
    )  # fmt: skip


def generate_week(jobs: int, hosts: int, days: float, seed: int) -> list[SimulatedJob]:
    """Generate jobs that keep LOAD of the slots busy."""
    chance = random.Random(seed)
    drawn = []
    for number in range(jobs):
        slots = chance.choices(SIZES, SIZE_WEIGHTS)[0]
        at = chance.uniform(0, days * DAY_S)
        while chance.random() > (1.0 if 8 <= at % DAY_S / 3600 < 20 else 0.3):
            at = chance.uniform(0, days * DAY_S)
        project = chance.choices([*PROJECTS], [*PROJECTS.values()])[0]
        priority = chance.choices([*PRIORITIES], [*PRIORITIES.values()])[0]
        lasts = chance.lognormvariate(0.0, 1.3)
        drawn.append(
            SimulatedJob(f"{number:05}", project, priority, min(slots, hosts * SLOTS), min(slots, 4), at, lasts, None)
        )
    request = sum(job.slots * job.lasts for job in drawn)
    scale = LOAD * hosts * SLOTS * days * DAY_S / request
    return sorted(
        (job._replace(lasts=min(2 * DAY_S, max(60.0, job.lasts * scale))) for job in drawn), key=lambda j: j.submitted
    )


def add_limits(jobs: list[SimulatedJob], seed: int) -> list[SimulatedJob]:
    """Return the jobs with time limits, which exceed the run times."""
    chance = random.Random(seed)
    return [job._replace(limit_s=int(job.lasts * chance.uniform(MIN_LIMIT, MAX_LIMIT)) + 1) for job in jobs]


def simulate(jobs: list[SimulatedJob], hosts: int, end: float, policy: Policy) -> WeekResult:
    """Run the policy until all jobs have started."""
    cluster, coming = Cluster(hosts), iter(jobs)
    known = {job.id: job for job in jobs}
    ends: list[tuple[float, str, tuple[Share, ...]]] = []
    started: dict[str, float] = {}
    busy, passes, longest = 0.0, 0, 0.0
    following = next(coming, None)
    while following is not None or cluster.waiting:
        first = min([job.submitted for job in [following] if job] + [each[0] for each in ends[:1]])
        now = (first // PASS_EVERY_S + 1) * PASS_EVERY_S
        while following is not None and following.submitted <= now:
            cluster.waiting[following.id] = following
            following = next(coming, None)
        cluster.count_use(now)
        while ends and ends[0][0] <= now:
            _, job_id, shares = heapq.heappop(ends)
            cluster.release_slots(job_id, shares)
            cluster.held[known[job_id].project] -= known[job_id].slots
        if not cluster.waiting:
            continue
        begin = time.perf_counter()
        placed = policy(cluster, now)
        passes, longest = passes + 1, max(longest, time.perf_counter() - begin)
        for placement in placed:
            job = cluster.waiting.pop(placement.job)
            cluster.take_slots(job, placement.shares, now)
            cluster.held[job.project] += job.slots
            started[job.id] = now
            heapq.heappush(ends, (now + job.lasts, job.id, placement.shares))
            busy += max(0.0, min(end, now + job.lasts) - min(end, now)) * job.slots
    return WeekResult(started, busy, passes, longest)


def compute_jain_index(values: list[float]) -> float:
    """Return 1 for equal values, or 1 / n if one has everything (Jain, Chiu, Hawe 1984)."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values)) if any(values) else 1.0


def compute_fairness(jobs: list[SimulatedJob], outcome: WeekResult) -> float:
    """Return Jain's index over one over the mean slowdown of the jobs of each project."""
    speeds = []
    for project in PROJECTS:
        own = [job for job in jobs if job.project == project]
        slowdowns = [(outcome.started[job.id] - job.submitted + job.lasts) / max(job.lasts, 600.0) for job in own]
        speeds.append(len(slowdowns) / sum(slowdowns) if slowdowns else 1.0)
    return compute_jain_index(speeds)


def format_waits(jobs: list[SimulatedJob], outcome: WeekResult, chosen: Callable[[SimulatedJob], bool]) -> str:
    waits = sorted((outcome.started[job.id] - job.submitted) / 3600 for job in jobs if chosen(job))
    if not waits:
        return "-"
    return f"{median(waits):6.2f} / {waits[int(0.95 * (len(waits) - 1))]:7.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    jobs = generate_week(options.jobs, options.hosts, options.days, options.seed)
    end = options.days * DAY_S
    print(
        f"{len(jobs):,} jobs in {options.days:g} days on {options.hosts:,} hosts of {SLOTS} slots, seed {options.seed}"
    )
    print("waits in hours, median / 95th percentile")
    chosen: dict[str, Callable[[SimulatedJob], bool]] = {
        f"priority {priority}": lambda job, p=priority: job.priority == p for priority in sorted(PRIORITIES)
    }
    chosen |= {f"project {name}": lambda job, n=name: job.project == n for name in PROJECTS}
    chosen["1 to 8 slots"] = lambda job: job.slots <= 8
    chosen["16 to 32 slots"] = lambda job: 8 < job.slots < 64
    chosen["64 slots or more"] = lambda job: job.slots >= 64
    table: dict[str, list[str]] = {}
    policies: dict[str, tuple[Policy, list[SimulatedJob]]] = {
        "with time limits": (place_with_meshboard, add_limits(jobs, options.seed)),
        "no time limits": (place_with_meshboard, jobs),
        "FIFO": (place_fifo, jobs),
        "plain backfill": (place_backfill, jobs),
    }
    for policy, week in policies.values():
        begin = time.perf_counter()
        outcome = simulate(week, options.hosts, end, policy)
        took = time.perf_counter() - begin
        for words, of in chosen.items():
            table.setdefault(words, []).append(format_waits(jobs, outcome, of))
        longest = max(outcome.started[job.id] - job.submitted for job in jobs) / 3600
        table.setdefault("longest wait (h)", []).append(f"{longest:.2f}")
        used = outcome.busy_slot_s / (options.hosts * SLOTS * end)
        table.setdefault("utilization", []).append(f"{used:.1%}")
        table.setdefault("Jain's index of projects", []).append(f"{compute_fairness(jobs, outcome):.3f}")
        table.setdefault("passes, longest", []).append(f"{outcome.passes:,}, {outcome.longest_pass_s * 1e3:.0f} ms")
        table.setdefault("simulation time", []).append(f"{took:.0f} s")
    print(f"{'':28}" + "".join(f"{name:>20}" for name in policies))
    for words, cells in table.items():
        print(f"{words:28}" + "".join(f"{cell:>20}" for cell in cells))


if __name__ == "__main__":
    main()
