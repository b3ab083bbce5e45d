"""Kernels that a GPU has and a CPU has not, for tensors that hold nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from workers.trainer.model.layers import Norm, use


def as_on_a_gpu(decoder: nn.Module) -> None:
    """RMSNorm is one kernel there; on a CPU a dozen, which keep its input and the normalised values in fp32."""
    for module in decoder.modules():
        if isinstance(module, Norm) and module.bias is None:
            module.forward = partial(_rms_norm, module)  # type: ignore[method-assign]


def _rms_norm(norm: Norm, x: torch.Tensor) -> torch.Tensor:
    return _RmsNorm.apply(x, use(norm.weight, norm.strategy))  # type: ignore[no-any-return, no-untyped-call]


class _RmsNorm(torch.autograd.Function):
    """What torch's `_fused_rms_norm` makes and keeps: its input, its weight, and a number in fp32 a row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight)
