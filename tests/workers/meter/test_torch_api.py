"""The meter overrides every collective of this torch version."""

from __future__ import annotations

import torch
import torch.distributed as dist

from workers.meter.process_group import BARRIERS, COLLECTIVES, MeteredProcessGroup
from workers.meter.work import FORWARDED, MeteredNcclWork, MeteredWork
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
