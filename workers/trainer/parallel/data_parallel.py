"""Data parallelism: bucketed all-reduce, fp32 gradient accumulation, and the interface for ZeRO.

The all-reduce overlaps with backward like in DDP. DDP itself regroups its buckets after the first step, which adds
broadcasts and a bucket count that depends on timing. It also does not support pipeline micro-batches.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from planner.facts.stages import BUCKET_BYTES


class DataParallel:
    """Reduce gradients across replicas. This base class does nothing, for one replica.

    Chunks are counted from 0 on this rank.
    """

    def before_step(self) -> None:
        """Prepare a step, before its first backward."""

    def before_backward(self, chunk: int, *, last: bool, split: bool) -> None:
        """Prepare a backward of a chunk. `last` marks its last backward of the step.

        With `split`, weight gradients follow later.
        """

    def after_weight_gradients(self, chunk: int, parameters: list[torch.Tensor], *, last: bool) -> None:
        """Handle the weight gradients that a split backward added to `parameters`."""

    def after_chunk(self, chunk: int) -> None:
        """Handle the switch from a chunk to another chunk."""

    def after_backward(self) -> None:
        """Finish the gradients, after the last backward of a step."""

    def after_eval(self) -> None:
        """Clean up after forwards without backward."""


class BucketedAllReduce(DataParallel):
    """Sum gradients in buckets. A bucket starts when its last gradient is final, always in the same order.

    Gradients are summed, because the loss is already divided by the global number of tokens.

    Args:
        parameters: parameters in backward order, each with the tensor that holds its gradient.
        backwards: gradients per parameter and step.
        overlap: start buckets during backward.
        splits_backward: the schedule splits backward, so gradients come through `after_weight_gradients`.
    """

    def __init__(
        self,
        parameters: dict[nn.Parameter, nn.Parameter],
        group: dist.ProcessGroup,
        backwards: int,
        element_bytes: int,
        *,
        overlap: bool = True,
        splits_backward: bool = False,
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
        self._missing: list[int] = []
        self._launched: list[tuple[torch.Tensor, dist.Work, list[nn.Parameter]]] = []
        for parameter in {} if splits_backward else parameters:
            parameter.register_post_accumulate_grad_hook(self._gradient_added)

    def before_step(self) -> None:
        self._missing = [len(bucket) * self._backwards for bucket in self._buckets]

    def after_weight_gradients(self, chunk: int, parameters: list[torch.Tensor], *, last: bool) -> None:
        for parameter in parameters:
            self._gradient_added(parameter)

    def _gradient_added(self, parameter: torch.Tensor) -> None:
        bucket = self._bucket_of.get(parameter)  # type: ignore[call-overload]  # Hooks receive the parameter that they are registered on.
        if bucket is None:
            return
        self._missing[bucket] -= 1
        if self._overlap:
            self._launch_ready()

    def _launch_ready(self) -> None:
        # All ranks must start buckets in the same order, so a bucket waits for earlier buckets.
        while len(self._launched) < len(self._buckets) and self._missing[len(self._launched)] == 0:
            self._launch(self._buckets[len(self._launched)])

    def _launch(self, bucket: list[nn.Parameter]) -> None:
        flat = torch.cat([p.grad.flatten() for p in bucket if p.grad is not None])
        assert flat.numel() == sum(p.numel() for p in bucket)
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


class CombinedDataParallel(DataParallel):
    """Combine groups of parameters with different replicas. Experts have fewer replicas."""

    def __init__(self, reducers: Sequence[DataParallel]) -> None:
        self._reducers = reducers

    def before_step(self) -> None:
        for reducer in self._reducers:
            reducer.before_step()

    def before_backward(self, chunk: int, *, last: bool, split: bool) -> None:
        for reducer in self._reducers:
            reducer.before_backward(chunk, last=last, split=split)

    def after_weight_gradients(self, chunk: int, parameters: list[torch.Tensor], *, last: bool) -> None:
        for reducer in self._reducers:
            reducer.after_weight_gradients(chunk, parameters, last=last)

    def after_chunk(self, chunk: int) -> None:
        for reducer in self._reducers:
            reducer.after_chunk(chunk)

    def after_backward(self) -> None:
        for reducer in self._reducers:
            reducer.after_backward()

    def after_eval(self) -> None:
        for reducer in self._reducers:
            reducer.after_eval()


def make_master(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """Move the fp32 values of a parameter to a new parameter, and cast the parameter to `dtype`."""
    master = nn.Parameter(parameter.data)
    parameter.data = parameter.data.to(dtype)
    return master


class MasterGradients(DataParallel):
    """Accumulate micro-batch gradients in fp32, so that small gradients are not lost (1710.03740, section 3.1).

    `masters` maps each parameter of the model to its master. If the schedule `splits` backward, gradients come
    through `after_weight_gradients`.
    """

    def __init__(self, masters: dict[nn.Parameter, nn.Parameter], *, splits_backward: bool) -> None:
        self._masters = masters
        # The garbage collector does not see references in hooks, so a strong reference would leak all parameters.
        add = weakref.WeakMethod(self._add)
        for parameter in {} if splits_backward else masters:
            parameter.register_post_accumulate_grad_hook(partial(_call, add))

    def after_weight_gradients(self, chunk: int, parameters: list[torch.Tensor], *, last: bool) -> None:
        for parameter in parameters:
            self._add(parameter)

    @torch.no_grad()
    def _add(self, parameter: torch.Tensor) -> None:
        master = self._masters.get(parameter)  # type: ignore[call-overload]  # Hooks receive the parameter that they are registered on.
        if master is None:
            return
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad.add_(gradient)


def _call(add: Callable[[], Callable[[torch.Tensor], None] | None], parameter: torch.Tensor) -> None:
    if method := add():
        method(parameter)
