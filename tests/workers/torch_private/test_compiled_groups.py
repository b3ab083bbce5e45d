"""The compiler treats wrapped groups like native groups."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from workers.meter import Recorder, register_metered_backend


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder(0)
    dist.init_process_group(register_metered_backend(recorder, "cpu"), store=dist.HashStore(), rank=0, world_size=1)
    yield recorder
    dist.destroy_process_group()
    torch.compiler.reset()


@pytest.mark.slow
def test_a_compiled_script_has_the_same_traffic(recorder: Recorder) -> None:
    model = DistributedDataParallel(torch.nn.BatchNorm1d(4))  # whose buffers C++ sends in each forward

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        dist.all_reduce(y, async_op=True).wait()
        return y * 2

    before = {cell["op"]: cell["count"] for cell in recorder.get_cells()}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("error", message="Dynamo does not know how to trace the builtin `_thread")
        step(torch.ones(2, 4))
    format_count = {cell["op"]: cell["count"] - before.get(cell["op"], 0) for cell in recorder.get_cells()}
    assert format_count == {"all_gather": 0, "all_reduce": 1, "broadcast": 2}, "two: its buffers are of two types"
