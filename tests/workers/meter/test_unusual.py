"""Rare calls are counted correctly: refused ones not at all, abandoned ones as not completed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from contracts.telemetry.items import Cell
from workers.meter import Recorder, register_metered_backend
from workers.meter.monitors import get_stall
from workers.meter.work import NcclPoller


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder(0)
    dist.init_process_group(register_metered_backend(recorder, "cpu"), store=dist.HashStore(), rank=0, world_size=1)
    yield recorder
    dist.destroy_process_group()


def counted(recorder: Recorder) -> dict[str, tuple[int, int, int]]:
    def numbers(cell: Cell) -> tuple[int, int, int]:
        return cell["count"], cell["completed"], cell["payload_bytes"]

    return {cell["op"]: numbers(cell) for cell in recorder.get_cells()}


def test_does_not_count_refused_calls(recorder: Recorder) -> None:
    dist.all_reduce(torch.ones(4))
    with pytest.raises((RuntimeError, ValueError)):
        dist.all_to_all([torch.empty(2)], [torch.ones(3)])
    assert counted(recorder) == {"all_reduce": (1, 1, 16)}
    (group,) = get_stall(recorder, 0.0)["groups"]
    assert (group["issued"], group["ended"]) == (1, 1)


def test_failed_or_freed_work_is_not_in_flight(recorder: Recorder) -> None:
    with pytest.raises(RuntimeError, match="Invalid scalar type"):
        dist.all_reduce(torch.ones(4, dtype=torch.int16))
    dist.reduce_scatter(torch.empty(2), [torch.ones(2)], async_op=True)  # gloo reports no end of it
    assert counted(recorder) == {"all_reduce": (1, 0, 8), "reduce_scatter": (1, 0, 8)}
    (group,) = get_stall(recorder, 0.0)["groups"]
    assert "op" not in group


def test_batch_that_gloo_refuses_does_not_start(recorder: Recorder) -> None:
    with pytest.raises(RuntimeError, match="startCoalescing"):
        dist.group.WORLD._start_coalescing(torch.device("cpu"))
    dist.broadcast(torch.ones(4), 0)
    assert counted(recorder) == {"broadcast": (1, 1, 16)}


def test_accepts_buffers_as_keyword_arguments(recorder: Recorder) -> None:
    dist.group.WORLD.allreduce(tensors=[torch.ones(4)]).wait()
    assert counted(recorder) == {"all_reduce": (1, 1, 16)}


def test_times_gloo_operations_in_a_group_with_nccl(recorder: Recorder) -> None:
    group: Any = dist.group.WORLD
    group._poller = poller = NcclPoller()
    recorder.add_poller(poller.poll)
    dist.all_reduce(torch.ones(4), async_op=True).wait()
    dist.all_reduce(torch.ones(4))
    assert counted(recorder) == {"all_reduce": (2, 2, 32)}, "no NCCL event exists for gloo operations"
