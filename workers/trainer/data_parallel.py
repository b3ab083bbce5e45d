"""Data parallelism: plain (ZeRO 0), and ZeRO 1-3 as three settings of FSDP2.

Plain is a bucketed all-reduce overlapped with backward, as torch's DDP does, written here because DDP regroups its
buckets after the first step (extra broadcasts, and a bucket count that depends on timing) and knows nothing of
pipeline micro-batches; here the buckets are those `planner.traffic` lists.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from planner.traffic import BUCKET_BYTES


class DataParallel(Protocol):
    """How gradients of the replicas become one."""

    def before_backward(self, *, last: bool) -> None:
        """Called before each micro-batch's backward; `last` for the last of the step."""

    def after_backward(self) -> None:
        """Called once a step, when every backward has been issued: gradients are final afterwards."""

    def after_eval(self) -> None:
        """Called after forwards without a backward."""


class NoDataParallel:
    """One replica: nothing to do."""

    def before_backward(self, *, last: bool) -> None: ...

    def after_backward(self) -> None: ...

    def after_eval(self) -> None: ...


class BucketedAllReduce:
    """Sums gradients in buckets, each as soon as its last gradient is final, always in the same order.

    `parameters` come in the order in which backward finishes them. Gradients are summed, not averaged: the loss is
    already divided by the global token count.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._group = group
        self._buckets: list[list[nn.Parameter]] = [[]]
        filled = 0
        for parameter in parameters:
            self._buckets[-1].append(parameter)
            filled += parameter.numel() * parameter.element_size()
            if filled >= BUCKET_BYTES:
                self._buckets.append([])
                filled = 0
        if not self._buckets[-1]:
            self._buckets.pop()
        self._bucket_of = {p: i for i, bucket in enumerate(self._buckets) for p in bucket}
        self._is_last = False
        self._waiting: list[int] = []
        self._launched: list[tuple[torch.Tensor, dist.Work, list[nn.Parameter]]] = []
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._gradient_ready)

    def before_backward(self, *, last: bool) -> None:
        self._is_last = last
        if last:
            self._waiting = [len(bucket) for bucket in self._buckets]

    def _gradient_ready(self, parameter: torch.Tensor) -> None:
        if not self._is_last:
            return
        assert isinstance(parameter, nn.Parameter)
        self._waiting[self._bucket_of[parameter]] -= 1
        # All ranks must issue buckets in one order, so a bucket waits for those before it.
        while len(self._launched) < len(self._buckets) and self._waiting[len(self._launched)] == 0:
            self._launch(self._buckets[len(self._launched)])

    def _launch(self, bucket: list[nn.Parameter]) -> None:
        flat = torch.cat([_gradient(p).flatten() for p in bucket])
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        assert work is not None
        self._launched.append((flat, work, bucket))

    def after_backward(self) -> None:
        for flat, work, bucket in self._launched:
            work.wait()
            parts = flat.split([p.numel() for p in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                _gradient(parameter).copy_(part.view_as(parameter))
        assert len(self._launched) == len(self._buckets)
        self._launched.clear()

    def after_eval(self) -> None: ...


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


class Zero:
    """FSDP2 as ZeRO stage 1, 2 or 3 (1910.02054 section 5).

    1: gradients stay whole until the last micro-batch, one reduce-scatter and one all-gather a step.
    2: a reduce-scatter each micro-batch, so only shards of gradients stay; one all-gather a step.
    3: parameters are freed after use too: two all-gathers and one reduce-scatter each micro-batch.
    """

    def __init__(self, root: FSDPModule, stage: int) -> None:
        self._root = root
        self._stage = stage
        _say_what_backward_gathers_next(root, stage)

    def before_backward(self, *, last: bool) -> None:
        self._root.set_is_last_backward(last)
        self._root.set_requires_gradient_sync(last or self._stage >= 2)
        self._root.set_reshard_after_backward(last or self._stage == 3)

    def after_backward(self) -> None: ...

    def after_eval(self) -> None:
        # Nothing freed the gathered parameters of stages 1 and 2, and the next step must not find old ones.
        assert isinstance(self._root, nn.Module)
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _say_what_backward_gathers_next(root: FSDPModule, stage: int) -> None:
    """FSDP2 guesses the next unit of backward from the forwards it saw, those of a validation too, and may gather one
    that is done. Stages 1 and 2 need nothing gathered ahead, 3 the layer before."""
    assert isinstance(root, nn.Module)
    inside: list[FSDPModule] = [m for m in root.modules() if isinstance(m, FSDPModule)]
    units = [*inside[1:], inside[0]]  # the root comes first among its modules, and last in forward
    for before, unit in zip([units[0], *units], units, strict=False):
        unit.set_modules_to_backward_prefetch([before if stage == 3 else unit])


def shard(
    module: nn.Module, group: dist.ProcessGroup, device: torch.device, stage: int, dtype: torch.dtype
) -> FSDPModule:
    """Let FSDP2 shard one unit over dp. Sums gradients in fp32, undivided."""
    mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=("dp",))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if dtype == torch.float32:
        policy = MixedPrecisionPolicy()
    fully_shard(module, mesh=mesh, reshard_after_forward=stage == 3, mp_policy=policy)
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    # gloo lacks the pre-multiplied sum that FSDP2 would use for a factor.
    module.set_force_sum_reduction_for_comms(True)
    return module
