"""Collectives over sizes, in neighbouring groups, with as many ranks at work as one of the counts says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from contracts.telemetry import Op
from planner.profile import CollectivePoint

SIZES = {"cpu": [2**10, 2**16, 2**20, 2**22], "cuda": [2**14, 2**20, 2**24, 2**27]}
ROUNDS = 20
LEAST_S = 1e-6
Call = Callable[[], object]


def collective_points(
    device: torch.device, counts: Sequence[int], say: Callable[[str], None]
) -> Iterator[CollectivePoint]:
    """Points of every op; on rank 0 alone."""
    me = dist.get_rank()
    for ranks in (n for n in counts if n > 1):
        for size in (s for s in (2, 4, 8, 16) if ranks % s == 0):
            say(f"collectives over groups of {size}, {ranks} ranks at work")
            groups = [dist.new_group(list(range(first, first + size))) for first in range(0, ranks, size)]
            workers = dist.new_group(list(range(ranks)))
            if me < ranks:
                yield from _points(groups[me // size], workers, ranks, device)
            dist.barrier()


def _points(
    group: dist.ProcessGroup, workers: dist.ProcessGroup, ranks: int, device: torch.device
) -> Iterator[CollectivePoint]:
    between = _some_compute(device, workers)
    alone = _loop(lambda: None, between, workers, device)
    for payload in SIZES[device.type]:
        for op, call in _operations(payload, group, device):
            added = _loop(call, between, workers, device) - alone
            told: list[float] = [0.0] * ranks
            dist.all_gather_object(told, added, group=workers)
            if dist.get_rank() == 0:
                seconds = max(LEAST_S, *told)
                yield CollectivePoint(
                    ranks=ranks, op=op, group_size=group.size(), payload_bytes=payload, seconds=seconds
                )


def _loop(call: Call, between: Call, workers: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds of a round of a little compute and a call.

    A step alternates the two, and on shared cores a rank waits for the others' turns: calls in a row would hide that.
    """
    between()
    call()
    dist.barrier(workers)
    started = time.perf_counter()
    for _ in range(ROUNDS):
        between()
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - started) / ROUNDS


def _some_compute(device: torch.device, workers: dist.ProcessGroup) -> Call:
    """About a millisecond of products, as many on every rank."""
    a = torch.randn(192, 192, device=device)
    each = _loop(lambda: None, lambda: torch.mm(a, a), workers, device)
    told: list[float] = [0.0] * workers.size()
    dist.all_gather_object(told, each, group=workers)
    products = max(1, round(1e-3 / min(told)))

    def between() -> None:
        for _ in range(products):
            torch.mm(a, a)

    return between


def _operations(payload: int, group: dist.ProcessGroup, device: torch.device) -> Iterator[tuple[Op, Call]]:
    """Each op on a buffer that is `payload` bytes in full."""
    full = torch.ones(payload // 4, device=device)
    part = torch.ones(payload // 4 // group.size(), device=device)
    out = torch.empty_like(full)
    first, me = dist.get_global_rank(group, 0), group.rank()
    neighbour = dist.get_global_rank(group, me ^ 1)

    def exchange() -> None:
        if me % 2 == 0:
            dist.send(full, neighbour, group=group)
        else:
            dist.recv(out, neighbour, group=group)

    yield "all_reduce", lambda: dist.all_reduce(full, group=group)
    yield "all_gather", lambda: dist.all_gather_single(full, part, group=group)
    yield "reduce_scatter", lambda: dist.reduce_scatter_single(part, full, group=group)
    yield "broadcast", lambda: dist.broadcast(full, first, group=group)
    yield "all_to_all", lambda: dist.all_to_all_single(out, full, group=group)
    yield "send", exchange
