"""Tests of the NCCL path that need no GPU: polling, batches and exposed time.

The device's own timing needs NCCL and is not covered here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from workers.meter import process_group
from workers.meter import work as metered_work
from workers.meter.monitors import ResourceMonitor, build_timeline
from workers.meter.process_group import MeteredProcessGroup, patch_batch_isend_irecv, register_metered_backend
from workers.meter.recorder import Recorder
from workers.meter.work import NcclPoller


class DeviceWork:
    """Work that ends like a CUDA event. A wait for it fails the test."""

    done = False

    def is_completed(self) -> bool:
        return self.done

    def _get_duration(self) -> float:
        assert self.done, "asked for a duration before the end"
        return 250.0


def test_device_work_completes_at_first_poll_after_its_end():
    recorder, poller = Recorder(rank=0), NcclPoller()
    recorder.add_poller(poller.poll)
    early, late = DeviceWork(), DeviceWork()
    poller.watch_work(late, [recorder.issue("all_reduce", "0", 2, 8)])
    poller.watch_work(early, [recorder.issue("broadcast", "0", 2, 8)])
    early.done = True
    assert {c["op"]: c["completed"] for c in recorder.get_cells()} == {"all_reduce": 0, "broadcast": 1}
    late.done = True
    assert {c["op"]: (c["completed"], c["busy_s"]) for c in recorder.get_cells()} == {
        "all_reduce": (1, 0.25),
        "broadcast": (1, 0.25),
    }


@pytest.fixture
def poller(monkeypatch: pytest.MonkeyPatch) -> Iterator[NcclPoller]:
    """Return the poller of a metered group over torch's fake backend, which coalesces but sends no data."""
    poller = NcclPoller()

    def create(options: Any, _backend_options: object) -> MeteredProcessGroup:
        native = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
        kind = dist.ProcessGroup.BackendType.GLOO
        native._set_default_backend(kind)
        plain = FakeProcessGroup._create_internal(options.group_rank, options.group_size)
        native._register_backend(torch.device("cpu"), kind, plain)
        metered = MeteredProcessGroup(native, options.group_id, Recorder(rank=0), [torch.device("cpu")], range(2))
        metered._poller = poller
        monkeypatch.setattr(MeteredProcessGroup, "batches", lambda _group, device: device.type == "cpu")  # as NCCL's
        return metered

    original = c10d.batch_isend_irecv
    dist.Backend.register_backend("metered_fake", create, extended_api=True, devices=["cpu"])
    dist.init_process_group("metered_fake", store=FakeStore(), rank=0, world_size=2)
    patch_batch_isend_irecv()
    yield poller
    dist.destroy_process_group()
    c10d.batch_isend_irecv = dist.batch_isend_irecv = original


def test_batch_of_sends_and_receives_is_one_work(poller):
    operations = [dist.P2POp(dist.isend, torch.ones(4), 1), dist.P2POp(dist.irecv, torch.ones(8), 1)]
    works = dist.batch_isend_irecv(operations)
    ((watched, carried),) = poller._works
    assert [work.work for work in works] == [watched]  # type: ignore[attr-defined]
    assert [(pending.key[1], pending.payload_bytes) for pending in carried] == [("send", 16), ("recv", 32)]


def test_gloo_operations_are_not_batched_in_a_group_with_nccl(poller, monkeypatch):
    """Gloo refuses to start a batch, which ended scripts."""
    monkeypatch.undo()
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(4), 1), dist.P2POp(dist.irecv, torch.ones(8), 1)])
    assert len(works) == 2


class Moment:
    """CUDA event with a recorded time in ms."""

    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Moment) -> float:
        return end.at_ms - self.at_ms


def test_wait_for_a_batch_counts_once_as_exposed(poller, monkeypatch):
    moments = iter([Moment(100.0), Moment(130.0)])
    monkeypatch.setattr(metered_work, "create_timing_event", lambda: next(moments))
    monkeypatch.setattr(metered_work, "on_side_stream", lambda: False)
    recorder: Recorder = dist.group.WORLD._recorder
    recorder.set_phase("step")
    recorder.begin_step(1)
    (work,) = dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, torch.ones(8), 1), dist.P2POp(dist.isend, torch.ones(4), 1)]
    )
    poller._works.clear()  # the fake backend times nothing
    work.wait()
    poller.poll()
    assert recorder.end_step(1)["exposed"] == {"world": pytest.approx(0.03)}


def test_synchronous_batch_ends(poller, monkeypatch):
    """NCCL returns no work for it, so events must end its collectives."""
    moments = iter([Moment(100.0), Moment(130.0)])
    monkeypatch.setattr(process_group, "create_timing_event", lambda: next(moments))
    monkeypatch.setattr(process_group, "on_side_stream", lambda: False)
    metered: Any = dist.group.WORLD
    recorder: Recorder = metered._recorder
    recorder.set_phase("step")
    recorder.begin_step(1)
    metered.begin_batch()
    for _ in range(2):
        dist.all_reduce(torch.ones(4))
    assert metered.end_batch(None) is None
    poller.poll()
    (cell,) = recorder.get_cells()
    assert (cell["count"], cell["completed"]) == (2, 2)
    assert recorder.end_step(1)["exposed"] == {"world": pytest.approx(0.03)}


def test_end_of_device_collective_follows_from_its_duration():
    recorder = Recorder(rank=0)
    recorder.add_group("0", range(2), on_device=True)
    recorder.enable_tracing()
    recorder.begin_step(1)
    pending = recorder.issue("all_reduce", "0", 2, 8)
    pending.started_s -= 60.0
    pending.complete(0.25)
    recorder.end_step(1)
    recorder.close_trace()
    (log,) = recorder.take_traces()
    calls = build_timeline(recorder, log)["calls"]
    assert calls["ended_us"][0] - calls["issued_us"][0] == 250_000


def test_resource_monitor_sums_memory_of_all_gpus(monkeypatch):
    """The thread of the exporter has the first GPU as its current device."""
    held = {0: 0, 1: 7 * 2**30}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(held))
    for result in ("memory_allocated", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, result, lambda device=0: held[device])
    item = ResourceMonitor(rank=1).poll()
    assert item is not None
    assert (item["allocated_bytes"], item["reserved_bytes"]) == (7 * 2**30, 7 * 2**30)


def test_refuses_torch_without_nccl(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"NCCL, but torch 2\..* is a build without NCCL"):
        register_metered_backend(Recorder(rank=0), "cuda")
