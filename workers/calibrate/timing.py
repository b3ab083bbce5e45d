"""Timing on one rank, and together with others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from workers.rank_environment import get_group_timeout

MIN_RUNS = 3
WINDOW_S = 0.15  # long enough that ranks which start together really work together


@dataclass(frozen=True)
class ActiveRanks:
    """The first `ranks` ranks, which work while the others wait. `neighbours`: this rank's group by size."""

    ranks: int
    device: torch.device
    window_s: float
    workers: dist.ProcessGroup
    neighbours: dict[int, dist.ProcessGroup]

    @property
    def sizes(self) -> list[int]:
        """Of the groups that it divides into."""
        return get_group_sizes(self.ranks)


def get_group_sizes(ranks: int) -> list[int]:
    return [size for size in (2, 4, 8, 16) if ranks % size == 0]


def create_active_ranks(ranks: int, device: torch.device, window_s: float) -> ActiveRanks:
    """All ranks of the world call this alike."""
    me = dist.get_rank()
    workers = dist.new_group(list(range(ranks)), timeout=get_group_timeout())
    neighbours = {}
    for size in get_group_sizes(ranks):
        rows = [list(range(first, first + size)) for first in range(0, ranks, size)]
        groups = [dist.new_group(members, timeout=get_group_timeout()) for members in rows]
        if me < ranks:
            neighbours[size] = groups[me // size]
    return ActiveRanks(ranks, device, window_s, workers, neighbours)


def time_runs(work: Callable[[], object], crew: ActiveRanks) -> float:
    """Mean over a window of runs in a row, as many on every rank of the crew, after two to warm up."""
    _time_calls(work, 1, crew.device)
    once = torch.tensor(_time_calls(work, 1, crew.device))
    dist.all_reduce(once, dist.ReduceOp.MAX, group=crew.workers)
    runs = max(MIN_RUNS, math.ceil(crew.window_s / float(once)))
    return _time_calls(work, runs, crew.device) / runs


def measure_slowest(work: Callable[[], dict[str, float]], crew: ActiveRanks) -> dict[str, float] | None:
    """`work`'s figures of the slowest of the crew, which does it at once while the others wait.

    None on all but rank 0.
    """
    me = dist.get_rank()
    dist.barrier()
    mine = work() if me < crew.ranks else None
    gathered: list[dict[str, float] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    if me != 0:
        return None
    told = [figures for figures in gathered if figures is not None]
    return {name: max(figures[name] for figures in told) for name in told[0]}


def measure_added_seconds(
    work: Callable[[], object], between: Callable[[], object], rounds: int, crew: ActiveRanks
) -> float:
    """What `work` adds to a round of compute, the slowest rank's.

    A step alternates the two: caches hold another's data, and on shared cores a rank waits for the others' turns. Work
    in a row hides both. Where the difference drowns in noise, what the fastest call took is the least it can be.
    """

    def both() -> None:
        between()
        work()

    alone, with_work = (_slowest(partial(_rounds, call, rounds, crew), crew) for call in (between, both))
    fastest = _slowest(lambda: min(_time_calls(work, 1, crew.device) for _ in range(rounds)), crew)
    return max(fastest, with_work - alone)


def _rounds(call: Callable[[], object], rounds: int, crew: ActiveRanks) -> float:
    _time_calls(call, 1, crew.device)
    dist.barrier(crew.workers)
    return _time_calls(call, rounds, crew.device) / rounds


def _slowest(measure: Callable[[], float], crew: ActiveRanks) -> float:
    """The figure of the rank whose is largest."""
    told: list[float] = [0.0] * crew.ranks
    dist.all_gather_object(told, measure(), group=crew.workers)
    return max(told)


def _time_calls(work: Callable[[], object], runs: int, device: torch.device) -> float:
    started = time.perf_counter()
    for _ in range(runs):
        work()
    if device.type == "cuda":  # once, as a step does: a small kernel takes less than a wait for it
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
