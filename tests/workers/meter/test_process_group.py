"""The meter overrides every collective of this torch version, and counts rare calls correctly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from contracts.telemetry.items import Cell
from workers.meter import Recorder, register_metered_backend
from workers.meter.monitors import get_stall
from workers.meter.process_group import BARRIERS, COLLECTIVES, MeteredProcessGroup
from workers.meter.work import FORWARDED, MeteredNcclWork, MeteredWork, NcclPoller
from workers.torch_private import CHECKED_ON

# Move nothing between ranks: names, sizes, timeouts, stores, hooks, life cycle, making other groups.
NOT_COLLECTIVES = {
    "BackendType",
    "CUSTOM",
    "GLOO",
    "MPI",
    "NCCL",
    "UCC",
    "UNDEFINED",
    "XCCL",
    "_backend_id",
    "_device_types",
    "_enable_collectives_timing",
    "_end_coalescing",
    "_get_backend",
    "_get_backend_name",
    "_get_sequence_number_for_group",
    "_has_hooks",
    "_id",
    "_pybind11_conduit_v1_",
    "_register_backend",
    "_register_on_completion_hook",
    "_set_default_backend",
    "_set_group_desc",
    "_set_group_name",
    "_set_sequence_number_for_group",
    "_start_coalescing",
    "_wait_for_pending_works",
    "abort",
    "bound_device_id",
    "boxed",
    "get_group_store",
    "group_desc",
    "group_name",
    "merge_remote_group",
    "name",
    "rank",
    "set_timeout",
    "shutdown",
    "size",
    "split_group",
    "unbox",
    "use_pg_for_symm_mem_rendezvous",
}


def methods(cls: type) -> set[str]:
    return {name for name in dir(cls) if not (name.startswith("__") and name.endswith("__"))}


def test_counts_every_collective_of_this_torch_version():
    assert torch.__version__.split("+")[0] == CHECKED_ON
    assert methods(dist.ProcessGroup) == NOT_COLLECTIVES | set(COLLECTIVES) | set(BARRIERS)


def test_overrides_every_counted_method():
    for method in (*COLLECTIVES, *BARRIERS):
        assert getattr(MeteredProcessGroup, method) is not getattr(dist.ProcessGroup, method), method


def test_metered_work_forwards_all_methods():
    boxing = {"_pybind11_conduit_v1_", "boxed", "unbox"}
    assert methods(dist.Work) == {*FORWARDED, "wait", *boxing}
    for method in (*FORWARDED, "wait"):
        for wrapper in (MeteredWork, MeteredNcclWork):
            assert getattr(wrapper, method) is not getattr(dist.Work, method), method


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
