"""Time calls on one rank, and on several ranks at once."""

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
WINDOW_S = 0.15  # long enough that ranks which start together overlap


@dataclass(frozen=True)
class ActiveRanks:
    """The first `ranks` ranks, which are active while the others wait."""

    ranks: int
    device: torch.device
    window_s: float
    group: dist.ProcessGroup
    subgroups: dict[int, dist.ProcessGroup]  # of this rank and its neighbors, by size

    @property
    def sizes(self) -> list[int]:
        """Return the sizes of the subgroups."""
        return get_group_sizes(self.ranks)


def get_group_sizes(ranks: int) -> list[int]:
    return [size for size in (2, 4, 8, 16) if ranks % size == 0]


def create_active_ranks(ranks: int, device: torch.device, window_s: float) -> ActiveRanks:
    """Create the groups of the first `ranks` ranks. All ranks of the world call this."""
    rank = dist.get_rank()
    group = dist.new_group(list(range(ranks)), timeout=get_group_timeout())
    subgroups = {}
    for size in get_group_sizes(ranks):
        rows = [list(range(first, first + size)) for first in range(0, ranks, size)]
        groups = [dist.new_group(members, timeout=get_group_timeout()) for members in rows]
        if rank < ranks:
            subgroups[size] = groups[rank // size]
    return ActiveRanks(ranks, device, window_s, group, subgroups)


def time_runs(work: Callable[[], object], active: ActiveRanks) -> float:
    """Return the mean seconds of consecutive runs in a window, the same number on each active rank."""
    _time_calls(work, 1, active.device)
    once = torch.tensor(_time_calls(work, 1, active.device))
    dist.all_reduce(once, dist.ReduceOp.MAX, group=active.group)
    runs = max(MIN_RUNS, math.ceil(active.window_s / float(once)))
    return _time_calls(work, runs, active.device) / runs


def measure_slowest(work: Callable[[], dict[str, float]], active: ActiveRanks) -> dict[str, float] | None:
    """Run `work` on all active ranks at once. Return the values of the slowest on rank 0, None on the others."""
    rank = dist.get_rank()
    dist.barrier()
    own = work() if rank < active.ranks else None
    gathered: list[dict[str, float] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    if rank != 0:
        return None
    measured = [values for values in gathered if values is not None]
    return {name: max(values[name] for values in measured) for name in measured[0]}


def measure_added_seconds(
    work: Callable[[], object], between: Callable[[], object], rounds: int, active: ActiveRanks
) -> float:
    """Return the seconds that `work` adds to a round of compute on the slowest rank.

    A step alternates the two, so caches contain other data, and on shared cores a rank waits for other ranks.
    Consecutive runs would hide both effects. The fastest single call is a lower bound if the difference is noisy.
    """

    def both() -> None:
        between()
        work()

    alone, with_work = (_get_slowest(partial(_time_rounds, call, rounds, active), active) for call in (between, both))
    fastest = _get_slowest(lambda: min(_time_calls(work, 1, active.device) for _ in range(rounds)), active)
    return max(fastest, with_work - alone)


def _time_rounds(call: Callable[[], object], rounds: int, active: ActiveRanks) -> float:
    _time_calls(call, 1, active.device)
    dist.barrier(active.group)
    return _time_calls(call, rounds, active.device) / rounds


def _get_slowest(measure: Callable[[], float], active: ActiveRanks) -> float:
    """Return the largest value of all active ranks."""
    values: list[float] = [0.0] * active.ranks
    dist.all_gather_object(values, measure(), group=active.group)
    return max(values)


def _time_calls(work: Callable[[], object], runs: int, device: torch.device) -> float:
    started = time.perf_counter()
    for _ in range(runs):
        work()
    if device.type == "cuda":  # only once, because a synchronization takes longer than a small kernel
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
