"""The private state of FSDP2 behaves as `workers.torch_private.fsdp` expects."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fsdp_state

from workers.torch_private import CHECKED_ON
from workers.trainer.parallel.zero import ZeroDataParallel, shard_module


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=30))
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()


class Remembers(nn.Module):
    """Remember the weight of the last forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.used = (self.weight,)
        return x @ self.used[0].detach().T


def sharded(group: dist.ProcessGroup, stage: int, compute: torch.dtype = torch.float32) -> FSDPModule:
    torch.manual_seed(0)
    options = {"frees": stage == 3, "compute": compute, "reduced": torch.float32}
    model = Remembers()
    return shard_module(model, group, None, torch.device("cpu"), ignored=set(), **options)  # type: ignore[arg-type]


def test_the_installed_torch_is_the_checked_version() -> None:
    assert torch.__version__.split("+")[0] == CHECKED_ON, "check workers.torch_private.fsdp against the new torch"
    assert "_state_ctx.all_states" in inspect.getsource(_fsdp_state.FSDPState._root_post_backward_final_callback)
    assert "reduce_grads" in inspect.getsource(_fsdp_param_group.FSDPParamGroup.post_backward)
    assert hasattr(fully_shard, "state")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_reduces_gradients_that_are_added_after_backward(alone: dist.ProcessGroup, stage: int) -> None:
    root = sharded(alone, stage)
    zero = ZeroDataParallel([root], stage)
    assert isinstance(root, Remembers)
    for micro_batch in range(2):
        last = micro_batch == 1
        x = torch.ones(2, 4, requires_grad=True)
        out = root(x)
        zero.before_backward(0, last=last, split=True)
        out.sum().backward()
        (parameter,) = root.used
        assert parameter.grad is None or micro_batch, "no gradient reaches the weight by itself"
        parameter.grad = torch.full((3, 4), 2.0) if parameter.grad is None else parameter.grad + 2.0
        zero.after_weight_gradients(0, [parameter], last=last)
    gradient = next(root.parameters()).grad
    assert gradient is not None
    assert torch.equal(gradient.full_tensor(), torch.full((3, 4), 4.0))  # type: ignore[attr-defined]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accumulates_weight_gradients_in_fp32(alone: dist.ProcessGroup, stage: int) -> None:
    """In bf16, 256 + 1 is 256."""
    root = sharded(alone, stage, torch.bfloat16)
    zero = ZeroDataParallel([root], stage)
    assert isinstance(root, Remembers)
    values, used = (256.0, 1.0, 1.0, 1.0), []
    for _ in values:
        out = root(torch.ones(2, 4, requires_grad=True, dtype=torch.bfloat16))
        zero.before_backward(0, last=False, split=True)
        out.sum().backward()
        used.append(root.used[0])
    for number, (value, parameter) in enumerate(zip(values, used, strict=True), 1):
        added = torch.full((3, 4), value, dtype=torch.bfloat16)
        parameter.grad = added if parameter.grad is None else parameter.grad + added
        zero.after_weight_gradients(0, [parameter], last=number == len(values))
    gradient = next(root.parameters()).grad
    assert gradient is not None
    assert torch.equal(gradient.full_tensor(), torch.full((3, 4), 259.0))  # type: ignore[attr-defined]
