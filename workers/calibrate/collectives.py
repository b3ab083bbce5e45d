"""Measure collectives by payload size in groups of neighboring ranks."""

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


def measure_collectives(active: ActiveRanks, log: Callable[[str], None]) -> Iterator[CollectivePoint]:
    """Yield the points of all ops on rank 0, and none on the others."""
    for size in active.sizes:
        log(f"collectives over groups of {size}, {active.ranks} ranks active")
        if dist.get_rank() < active.ranks:
            yield from _measure_group(active.subgroups[size], active)
        dist.barrier()


def _measure_group(group: dist.ProcessGroup, active: ActiveRanks) -> Iterator[CollectivePoint]:
    between = build_layers(active)
    for payload in PAYLOAD_BYTES[active.device.type]:
        for op, call in _build_calls(payload, group, active.device):
            seconds = measure_added_seconds(call, between, ROUNDS, active)
            if dist.get_rank() == 0:
                yield CollectivePoint(
                    ranks=active.ranks, op=op, group_size=group.size(), payload_bytes=payload, seconds=seconds
                )


def _build_calls(payload: int, group: dist.ProcessGroup, device: torch.device) -> Iterator[tuple[Op, Call]]:
    """Yield a call of each op whose full buffer has `payload` bytes."""
    full = torch.ones(payload // 4, device=device)
    shard = torch.ones(payload // 4 // group.size(), device=device)
    out = torch.empty_like(full)
    first, group_rank = dist.get_global_rank(group, 0), group.rank()
    neighbor = dist.get_global_rank(group, group_rank ^ 1)

    def exchange() -> None:
        if group_rank % 2 == 0:
            dist.send(full, neighbor, group=group)
        else:
            dist.recv(out, neighbor, group=group)

    yield "all_reduce", lambda: dist.all_reduce(full, group=group)
    yield "all_gather", lambda: dist.all_gather_single(full, shard, group=group)
    yield "reduce_scatter", lambda: dist.reduce_scatter_single(shard, full, group=group)
    yield "broadcast", lambda: dist.broadcast(full, first, group=group)
    yield "all_to_all", lambda: dist.all_to_all_single(out, full, group=group)
    yield "send", exchange
