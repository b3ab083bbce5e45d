"""Kernels' backwards under functions of our own, which keep for backward what a fused kernel keeps: inputs alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

aten: Any = torch.ops.aten


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (1910.07467 equation 4).

    A GPU has a kernel of it. On a CPU torch's is a dozen passes, which keep two tensors in fp32: LayerNorm's backward,
    told that the mean is 0, does all of them but one.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.rms_norm(x, weight.shape, weight, eps)
    return _RmsNorm.apply(x, weight, eps)  # type: ignore[no-any-return]


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up (2002.05202 section 2); backward computes silu(gate) again."""
    if torch.compiler.is_compiling():
        return F.silu(gate) * up
    return _SwiGlu.apply(gate, up)  # type: ignore[no-any-return]


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return torch.mul(x, scale, out=torch.empty_like(x)).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        size, wide = x.shape[-1], weight.float()  # the kernel wants it in the scale's type
        x_grad, weight_grad, _ = aten.native_layer_norm_backward(
            grad, x, [size], torch.zeros_like(scale), scale, wide, None, [True, True, False]
        )
        mean = (grad @ weight.to(grad.dtype)).unsqueeze(-1).mul_(scale).div_(size)
        return x_grad.add_(mean), weight_grad.to(weight.dtype), None  # LayerNorm took the mean off


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        return aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)
