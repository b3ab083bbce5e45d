"""Timing on one rank, and together with others."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

WINDOW_S = 0.08  # long enough that ranks which start together really work together


def seconds(work: Callable[[], object], device: torch.device, window_s: float) -> float:
    """Mean over a window of runs in a row, after one to warm up: other ranks are at it all the while."""
    work()
    _wait(device)
    runs, started, elapsed = 0, time.perf_counter(), 0.0
    while runs < 2 or elapsed < window_s:
        work()
        _wait(device)
        runs += 1
        elapsed = time.perf_counter() - started
    return elapsed / runs


def together(work: Callable[[], dict[str, float]], ranks: int) -> dict[str, float] | None:
    """`work`'s figures of the slowest of the first `ranks` ranks, which do it at once while the others wait.

    None on all but rank 0.
    """
    me = dist.get_rank()
    dist.barrier()
    mine = work() if me < ranks else None
    gathered: list[dict[str, float] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    if me != 0:
        return None
    told = [figures for figures in gathered if figures is not None]
    return {name: max(figures[name] for figures in told) for name in told[0]}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
