"""Plain data parallelism reduces gradients while backward is still running."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from planner.facts.shards import BUCKET_BYTES
from workers.meter import Recorder, metered_backend
from workers.trainer.data_parallel import BucketedAllReduce

WIDTH = 1600  # one square fp32 matrix is 9.8 MiB, three close a bucket


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder(0)
    backend = metered_backend(recorder, "cpu")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=30))
    try:
        yield recorder
    finally:
        dist.destroy_process_group()


def calls(recorder: Recorder) -> int:
    return sum(cell["count"] for cell in recorder.cells())


def test_a_bucket_leaves_as_soon_as_its_last_gradient_is_there(recorder: Recorder) -> None:
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

    (cell,) = recorder.cells()
    assert cell["payload_bytes"] == 6 * WIDTH * WIDTH * 4 > 2 * BUCKET_BYTES
