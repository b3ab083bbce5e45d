"""Stages free tensors after they are sent, and collectives overlap with backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from planner.facts.stages import BUCKET_BYTES
from tests.support.processes import scale_timeout, wait_until
from workers.meter import Recorder, register_metered_backend
from workers.trainer.parallel.data_parallel import BucketedAllReduce
from workers.trainer.parallel.pipeline_parallel import SendQueue
from workers.trainer.parallel.tensor_parallel import TensorParallel

TIMEOUT = timedelta(seconds=30)
WIDTH = 1600  # one square fp32 matrix is 9.8 MiB, three close a bucket


@pytest.fixture
def ranks() -> list[dist.ProcessGroupGloo]:
    """Create both ends of a pipeline in a single process."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, TIMEOUT), range(2)))


def test_frees_sent_tensors_and_keeps_the_others(ranks: list[dist.ProcessGroupGloo]) -> None:
    sender, receiver = ranks
    sends = SendQueue()
    storages = []
    for index in range(3):
        message = torch.full((1000,), float(index))
        storages.append(weakref.ref(message))
        sends.add(sender.send([message], 1, 0), message)  # type: ignore[attr-defined]
        del message
    here = torch.empty(1000)
    for index in range(2):
        receiver.recv([here], 0, 0).wait()  # type: ignore[attr-defined]
        assert here.eq(index).all()
    wait_until(lambda: storages[1]() is None, "received tensors are freed", 20)
    assert [storage() is None for storage in storages] == [True, True, False]
    receiver.recv([here], 0, 0).wait()  # type: ignore[attr-defined]
    sends.flush()
    assert storages[2]() is None


def test_flush_raises_a_failed_send(ranks: list[dist.ProcessGroupGloo]) -> None:
    sender, receiver = ranks
    sends = SendQueue()
    message = torch.ones(1000)
    sends.add(sender.send([message], 1, 0), message)  # type: ignore[attr-defined]
    ranks.clear()
    del receiver
    with pytest.raises(RuntimeError):
        sends.flush()


def test_the_thread_ends_with_its_queue(ranks: list[dist.ProcessGroupGloo]) -> None:
    sender, receiver = ranks
    sends, message = SendQueue(), torch.ones(10)
    sends.add(sender.send([message], 1, 0), message)  # type: ignore[attr-defined]
    receiver.recv([torch.empty(10)], 0, 0).wait()  # type: ignore[attr-defined]
    sends.flush()
    thread = sends._thread
    assert thread is not None
    del sends
    thread.join(scale_timeout(20))
    assert not thread.is_alive()


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder(0)
    backend = register_metered_backend(recorder, "cpu")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=30))
    try:
        yield recorder
    finally:
        dist.destroy_process_group()


def calls(recorder: Recorder) -> int:
    return sum(cell["count"] for cell in recorder.get_cells())


def test_a_bucket_starts_after_its_last_gradient(recorder: Recorder) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)))
    group = dist.group.WORLD
    assert group is not None
    reducer = BucketedAllReduce({p: p for p in reversed(list(model.parameters()))}, group, 2, 4)
    sent: list[int] = []
    for parameter in model.parameters():  # hooks run in order of registration: these see what the reducer just did
        parameter.register_post_accumulate_grad_hook(lambda _p: sent.append(calls(recorder)))

    reducer.before_step()
    model(torch.randn(2, WIDTH)).sum().backward()
    assert sent == [0] * 6, "nothing is sent before the last micro-batch"
    sent.clear()
    model(torch.randn(2, WIDTH)).sum().backward()
    assert sent == [0, 0, 1, 1, 1, 2]
    whole = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    reducer.after_backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), whole, strict=True) if p.grad is not None)

    (cell,) = recorder.get_cells()
    assert cell["payload_bytes"] == 6 * WIDTH * WIDTH * 4 > 2 * BUCKET_BYTES


class Products(TorchDispatchMode):
    """Record shapes of matmuls, and the number of collectives issued before each."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self.seen: list[tuple[tuple[int, ...], int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
            self.seen.append((tuple(out.shape), calls(self._recorder)))
        return out


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_input_gradient_sums_overlap_with_weight_gradients(recorder: Recorder, sequence_parallel: bool) -> None:
    tp = TensorParallel(dist.group.WORLD, sequence_parallel=sequence_parallel)
    x = torch.randn(2, 3, 8, requires_grad=True)
    weights = [torch.randn(rows, 8, requires_grad=True) for rows in (4, 6)]
    first, second = tp.columns(tp.enter(x), list(weights), [None, None])
    before = calls(recorder)
    with Products(recorder) as products:
        (first.sum() + 2 * second.sum()).backward()
    inputs, weight_grads = products.seen[:2], products.seen[2:]
    assert inputs == [((6, 8), before)] * 2
    assert weight_grads == [((4, 8), before + 1), ((6, 8), before + 1)]
    expected = torch.cat([weights[0], 2 * weights[1]]).sum(0).expand_as(x)
    torch.testing.assert_close(x.grad, expected.detach())
    for weight, scale in zip(weights, (1, 2), strict=True):
        torch.testing.assert_close(weight.grad, scale * x.detach().sum((0, 1)).expand_as(weight))
