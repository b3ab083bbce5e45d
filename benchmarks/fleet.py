"""A simulated week of a large cluster through the real scheduler, beside FIFO and plain backfill.

    python -m benchmarks.fleet [--hosts 1000] [--jobs 10000] [--days 7] [--seed 1]

The scheduler's own code decides (`placement.place` with `policy`, both of `jobs.queue.scheduling`), on a clock that is
moved from event to event; nothing else is simulated of it. The others use the same hosts and the same gangs: FIFO
starts nothing before the first that waits has started; plain backfill starts whatever fits, in order of age. Neither
knows priorities or projects.

Jobs come by day more than by night; their sizes are powers of two up to 512 slots, most small; their lengths are
lognormal. Of three projects with equal weights one submits most. Jain's index is over the projects' speeds, one over
the mean slowdown of their jobs (time from submit to end over the time they run, ten minutes at least): 1 is even.
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
PASS_EVERY_S = 60.0  # decisions are made once a minute of simulated time, where anything happened
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SIZE_WEIGHTS = (20, 12, 14, 22, 10, 8, 6, 4, 3, 1)
PROJECTS = {"busy": 6, "usual": 3, "quiet": 1}  # how often each submits
PRIORITIES = {0: 85, 5: 12, 10: 3}
RATES = PointRates(per_hour=0.1, share=1.0)  # the defaults of MESHBOARD_AGEING_PER_HOUR and MESHBOARD_SHARE_POINTS
HALF_LIFE_S = DAY_S
LOAD = 0.95  # of the slots, asked for over the week


class Job(NamedTuple):
    """A job of the week. Times in seconds from its begin."""

    id: str
    project: str
    priority: int
    slots: int
    unit: int
    submitted: float
    lasts: float


class Outcome(NamedTuple):
    """When each job started, and what the machine did until the week's end."""

    started: dict[str, float]
    busy_slot_s: float
    passes: int
    longest_pass_s: float


Policy = Callable[["Cluster", float], list[Placement]]


class Cluster:
    """Hosts, what runs on them, and who waits."""

    def __init__(self, hosts: int) -> None:
        self.free = {f"host-{n:04}": tuple(range(SLOTS)) for n in range(hosts)}
        self.waiting: dict[str, Job] = {}
        self.kept: dict[str, tuple[str, ...]] = {}
        self.used = dict.fromkeys(PROJECTS, 0.0)
        self.held = dict.fromkeys(PROJECTS, 0)
        self.counted = 0.0

    def hosts(self) -> list[HostState]:
        return [HostState(name, "cuda", SLOTS, free, device_name="gpu") for name, free in self.free.items()]

    def count_use(self, now: float) -> None:
        """As `jobs.queue.termination.count_use` does."""
        for project in PROJECTS:
            self.used[project] = compute_decayed_use(
                self.used[project], self.held[project], now - self.counted, HALF_LIFE_S
            )
        self.counted = now

    def take(self, shares: tuple[Share, ...]) -> None:
        for name, slots in shares:
            self.free[name] = tuple(slot for slot in self.free[name] if slot not in slots)

    def give_back(self, shares: tuple[Share, ...]) -> None:
        for name, slots in shares:
            self.free[name] = tuple(sorted((*self.free[name], *slots)))


def meshboard(cluster: Cluster, now: float) -> list[Placement]:
    """The real thing."""
    share = compute_share_factors({name: ProjectUse(used, 1.0) for name, used in cluster.used.items()})
    queue = [
        _waiting(
            job,
            compute_points(job.priority, now - job.submitted, share[job.project], 0.0, RATES).total,
            cluster.kept.get(job.id, ()),
        )
        for job in cluster.waiting.values()
    ]
    plan = plan_pass(queue, cluster.hosts())
    cluster.kept = plan.head_hosts
    return plan.placements


def fifo(cluster: Cluster, now: float) -> list[Placement]:
    """In order of age; the first that has no room stops all behind it."""
    return _greedy(cluster, stops=True)


def backfill(cluster: Cluster, now: float) -> list[Placement]:
    """In order of age; whoever has no room is passed over, and nothing is kept for him."""
    return _greedy(cluster, stops=False)


def _greedy(cluster: Cluster, *, stops: bool) -> list[Placement]:
    free = dict(cluster.free)
    counts = {name: len(slots) for name, slots in free.items()}
    placed: list[Placement] = []
    refused: set[tuple[int, int]] = set()
    for job in sort_queue(_waiting(job, 0.0, ()) for job in cluster.waiting.values()):
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


def _waiting(job: Job, points: float, kept: tuple[str, ...]) -> QueuedJob:
    return QueuedJob(
        id=job.id, name=job.id, owner=1, device="cuda", num_slots=job.slots, wanted_host="", priority=job.priority,
        created=BEGIN + timedelta(seconds=job.submitted), head_hosts=kept, units=(job.unit,), max_hosts=0,
        points=points,
        project=job.project,
    )  # fmt: skip


def week(jobs: int, hosts: int, days: float, seed: int) -> list[Job]:
    """What is asked for: as much work as LOAD of the slots could do in the time."""
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
        drawn.append(Job(f"{number:05}", project, priority, min(slots, hosts * SLOTS), min(slots, 4), at, lasts))
    asked = sum(job.slots * job.lasts for job in drawn)
    scale = LOAD * hosts * SLOTS * days * DAY_S / asked
    return sorted(
        (job._replace(lasts=min(2 * DAY_S, max(60.0, job.lasts * scale))) for job in drawn), key=lambda j: j.submitted
    )


def run(jobs: list[Job], hosts: int, end: float, policy: Policy) -> Outcome:
    """Until every job has started."""
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
            cluster.give_back(shares)
            cluster.held[known[job_id].project] -= known[job_id].slots
        if not cluster.waiting:
            continue
        begin = time.perf_counter()
        placed = policy(cluster, now)
        passes, longest = passes + 1, max(longest, time.perf_counter() - begin)
        for placement in placed:
            job = cluster.waiting.pop(placement.job)
            cluster.take(placement.shares)
            cluster.held[job.project] += job.slots
            started[job.id] = now
            heapq.heappush(ends, (now + job.lasts, job.id, placement.shares))
            busy += max(0.0, min(end, now + job.lasts) - min(end, now)) * job.slots
    return Outcome(started, busy, passes, longest)


def jain(values: list[float]) -> float:
    """1 where all are equal, 1 / n where one has everything (Jain, Chiu, Hawe 1984)."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values)) if any(values) else 1.0


def fairness(jobs: list[Job], outcome: Outcome) -> float:
    """Jain's index over one over the mean slowdown of each project's jobs."""
    speeds = []
    for project in PROJECTS:
        own = [job for job in jobs if job.project == project]
        slowdowns = [(outcome.started[job.id] - job.submitted + job.lasts) / max(job.lasts, 600.0) for job in own]
        speeds.append(len(slowdowns) / sum(slowdowns) if slowdowns else 1.0)
    return jain(speeds)


def wait_words(jobs: list[Job], outcome: Outcome, chosen: Callable[[Job], bool]) -> str:
    waits = sorted((outcome.started[job.id] - job.submitted) / 3600 for job in jobs if chosen(job))
    if not waits:
        return "-"
    return f"{median(waits):6.2f} / {waits[int(0.95 * (len(waits) - 1))]:7.2f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    jobs = week(asked.jobs, asked.hosts, asked.days, asked.seed)
    end = asked.days * DAY_S
    print(f"{len(jobs):,} jobs in {asked.days:g} days on {asked.hosts:,} hosts of {SLOTS} slots, seed {asked.seed}")
    print("waits in hours, median / 95th percentile")
    chosen: dict[str, Callable[[Job], bool]] = {
        f"priority {priority}": lambda job, p=priority: job.priority == p for priority in sorted(PRIORITIES)
    }
    chosen |= {f"project {name}": lambda job, n=name: job.project == n for name in PROJECTS}
    chosen["64 slots or more"] = lambda job: job.slots >= 64
    table: dict[str, list[str]] = {}
    policies: dict[str, Policy] = {"Meshboard": meshboard, "FIFO": fifo, "plain backfill": backfill}
    for policy in policies.values():
        begin = time.perf_counter()
        outcome = run(jobs, asked.hosts, end, policy)
        took = time.perf_counter() - begin
        for words, of in chosen.items():
            table.setdefault(words, []).append(wait_words(jobs, outcome, of))
        longest = max(outcome.started[job.id] - job.submitted for job in jobs) / 3600
        table.setdefault("longest wait (h)", []).append(f"{longest:.2f}")
        used = outcome.busy_slot_s / (asked.hosts * SLOTS * end)
        table.setdefault("utilization", []).append(f"{used:.1%}")
        table.setdefault("Jain's index of projects", []).append(f"{fairness(jobs, outcome):.3f}")
        table.setdefault("passes, longest", []).append(f"{outcome.passes:,}, {outcome.longest_pass_s * 1e3:.0f} ms")
        table.setdefault("simulation time", []).append(f"{took:.0f} s")
    print(f"{'':28}" + "".join(f"{name:>20}" for name in policies))
    for words, cells in table.items():
        print(f"{words:28}" + "".join(f"{cell:>20}" for cell in cells))


if __name__ == "__main__":
    main()
