"""fp32 master weights beside those computed with (1710.03740 section 3.1), where FSDP2 does not hold them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from workers.trainer.parallel.data_parallel import NoDataParallel


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
