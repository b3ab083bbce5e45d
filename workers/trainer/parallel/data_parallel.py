"""Data parallelism: plain (ZeRO 0), and ZeRO 1-3 as three settings of FSDP2.

Plain is a bucketed all-reduce overlapped with backward, as torch's DDP does, written here because DDP regroups its
buckets after the first step (extra broadcasts, and a bucket count that depends on timing) and knows nothing of
pipeline micro-batches.

fp32 master weights beside those computed with (1710.03740 section 3.1), where FSDP2 does not hold them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from planner.facts.stages import BUCKET_BYTES


class DataParallel(Protocol):
    """How gradients of the replicas become one. Chunks are counted from 0 on this rank."""

    def before_step(self) -> None:
        """Called once a step, before its first backward."""

    def before_backward(self, chunk: int, *, last: bool, split: bool) -> None:
        """Called before each backward of a chunk; `last` for its last of the step. `split`: weights come later."""

    def weights_added(self, chunk: int, parameters: list[torch.Tensor], *, last: bool) -> None:
        """Called when the weight gradients of a split backward have been added to `parameters`."""

    def after_chunk(self, chunk: int) -> None:
        """Called when this rank turns from a chunk to another."""

    def after_backward(self) -> None:
        """Called once a step, when every backward has been issued: gradients are final afterwards."""

    def after_eval(self) -> None:
        """Called after forwards without a backward."""


class NoDataParallel:
    """One replica: nothing to do."""

    def before_step(self) -> None: ...

    def before_backward(self, chunk: int, *, last: bool, split: bool) -> None: ...

    def weights_added(self, chunk: int, parameters: list[torch.Tensor], *, last: bool) -> None: ...

    def after_chunk(self, chunk: int) -> None: ...

    def after_backward(self) -> None: ...

    def after_eval(self) -> None: ...


class BucketedAllReduce(NoDataParallel):
    """Sums gradients in buckets, each as soon as its last gradient is final, always in the same order.

    `parameters` come in the order in which backward finishes them, each with the one that holds its gradient; each gets
    `backwards` gradients a step. Gradients are summed, not averaged: the loss is already divided by the global token
    count. Without `overlap`, buckets leave when backward is done. Where the schedule `splits` backward, gradients come
    by `weights_added` alone.
    """

    def __init__(
        self,
        parameters: dict[nn.Parameter, nn.Parameter],
        group: dist.ProcessGroup,
        backwards: int,
        element_bytes: int,
        *,
        overlap: bool = True,
        splits: bool = False,
    ) -> None:
        self._group, self._backwards, self._overlap = group, backwards, overlap
        self._buckets: list[list[nn.Parameter]] = [[]]
        filled = 0
        self._bucket_of: dict[nn.Parameter, int] = {}
        for parameter, holder in parameters.items():
            self._buckets[-1].append(holder)
            self._bucket_of[parameter] = len(self._buckets) - 1
            filled += parameter.numel() * element_bytes
            if filled >= BUCKET_BYTES:
                self._buckets.append([])
                filled = 0
        if not self._buckets[-1]:
            self._buckets.pop()
        self._waiting: list[int] = []
        self._launched: list[tuple[torch.Tensor, dist.Work, list[nn.Parameter]]] = []
        for parameter in {} if splits else parameters:
            parameter.register_post_accumulate_grad_hook(self._gradient_added)

    def before_step(self) -> None:
        self._waiting = [len(bucket) * self._backwards for bucket in self._buckets]

    def weights_added(self, chunk: int, parameters: list[torch.Tensor], *, last: bool) -> None:
        for parameter in parameters:
            self._gradient_added(parameter)

    def _gradient_added(self, parameter: torch.Tensor) -> None:
        bucket = self._bucket_of.get(parameter)  # type: ignore[call-overload]  # a hook is given its own parameter
        if bucket is None:
            return
        self._waiting[bucket] -= 1
        if self._overlap:
            self._launch_ready()

    def _launch_ready(self) -> None:
        # All ranks must issue buckets in one order, so a bucket waits for those before it.
        while len(self._launched) < len(self._buckets) and self._waiting[len(self._launched)] == 0:
            self._launch(self._buckets[len(self._launched)])

    def _launch(self, bucket: list[nn.Parameter]) -> None:
        flat = torch.cat([_gradient(p).flatten() for p in bucket])
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        assert work is not None
        self._launched.append((flat, work, bucket))

    def after_backward(self) -> None:
        self._launch_ready()
        for flat, work, bucket in self._launched:
            work.wait()
            parts = flat.split([p.numel() for p in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                parameter.grad = part.view_as(parameter)
        assert len(self._launched) == len(self._buckets)
        self._launched.clear()


class Together:
    """Several kinds of parameters, each with its own replicas: experts are replicated over fewer ranks."""

    def __init__(self, kinds: Sequence[DataParallel]) -> None:
        self._kinds = kinds

    def before_step(self) -> None:
        for kind in self._kinds:
            kind.before_step()

    def before_backward(self, chunk: int, *, last: bool, split: bool) -> None:
        for kind in self._kinds:
            kind.before_backward(chunk, last=last, split=split)

    def weights_added(self, chunk: int, parameters: list[torch.Tensor], *, last: bool) -> None:
        for kind in self._kinds:
            kind.weights_added(chunk, parameters, last=last)

    def after_chunk(self, chunk: int) -> None:
        for kind in self._kinds:
            kind.after_chunk(chunk)

    def after_backward(self) -> None:
        for kind in self._kinds:
            kind.after_backward()

    def after_eval(self) -> None:
        for kind in self._kinds:
            kind.after_eval()


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def make_master(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """Give a parameter's fp32 values to a new one, and leave it with them in `dtype`."""
    master = nn.Parameter(parameter.data)
    parameter.data = parameter.data.to(dtype)
    return master


class MasterGradients(NoDataParallel):
    """Adds the gradients of each micro-batch up in fp32, so that small ones are not lost beside large sums.

    `masters` by the parameter that the model uses. Where the schedule `splits` backward, gradients come by
    `weights_added` alone.
    """

    def __init__(self, masters: dict[nn.Parameter, nn.Parameter], *, splits: bool) -> None:
        self._masters = masters
        # Through the hook, which no garbage collector looks into, a parameter would hold itself and all others.
        add = weakref.WeakMethod(self._add)
        for parameter in {} if splits else masters:
            parameter.register_post_accumulate_grad_hook(partial(_call, add))

    def weights_added(self, chunk: int, parameters: list[torch.Tensor], *, last: bool) -> None:
        for parameter in parameters:
            self._add(parameter)

    @torch.no_grad()
    def _add(self, parameter: torch.Tensor) -> None:
        master = self._masters.get(parameter)  # type: ignore[call-overload]  # a hook is given its own parameter
        if master is None:
            return
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad.add_(gradient)


def _call(add: Callable[[], Callable[[torch.Tensor], None] | None], parameter: torch.Tensor) -> None:
    if alive := add():
        alive(parameter)
