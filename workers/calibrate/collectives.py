"""Collectives over sizes, in neighbouring groups, with as many ranks at work as one of the counts says."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from contracts.telemetry.vocabulary import Op
from planner.hardware.profile import CollectivePoint
from workers.calibrate.compute import build_layers
from workers.calibrate.timing import ActiveRanks, measure_added_seconds

PAYLOAD_BYTES = {"cpu": [2**10, 2**16, 2**20, 2**22], "cuda": [2**14, 2**20, 2**24, 2**27]}
ROUNDS = 10
Call = Callable[[], object]


def measure_collectives(crew: ActiveRanks, say: Callable[[str], None]) -> Iterator[CollectivePoint]:
    """Points of every op; on rank 0 alone."""
    for size in crew.sizes:
        say(f"collectives over groups of {size}, {crew.ranks} ranks active")
        if dist.get_rank() < crew.ranks:
            yield from _points(crew.neighbours[size], crew)
        dist.barrier()


def _points(group: dist.ProcessGroup, crew: ActiveRanks) -> Iterator[CollectivePoint]:
    between = build_layers(crew)
    for payload in PAYLOAD_BYTES[crew.device.type]:
        for op, call in _operations(payload, group, crew.device):
            seconds = measure_added_seconds(call, between, ROUNDS, crew)
            if dist.get_rank() == 0:
                yield CollectivePoint(
                    ranks=crew.ranks, op=op, group_size=group.size(), payload_bytes=payload, seconds=seconds
                )


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
