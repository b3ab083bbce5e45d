"""Kernels' backwards under functions of our own, which keep for backward what a fused kernel keeps: inputs alone.

In 16 bits on a CPU (torch 2.13) `native_layer_norm_backward` and `embedding_dense_backward` add up over tokens in 16
bits: of 2,048 tokens the gradients of norms were 21% off, of a table 14%. A GPU's add up in fp32, and so do these.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

aten: Any = torch.ops.aten
AT_ONCE = 2**18  # elements that are fp32 meanwhile: 1 MiB


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (1910.07467 equation 4).

    A GPU has a kernel of it. On a CPU torch's is a dozen passes, which keep two tensors in fp32: LayerNorm's backward,
    told that the mean is 0, does all of them but one.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.rms_norm(x, weight.shape, weight, eps)
    return _RmsNorm.apply(x, weight, eps)  # type: ignore[no-any-return]


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension (1607.06450 equation 4)."""
    if _adds_up_wide(x):
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    return _LayerNorm.apply(x, weight, bias, eps)  # type: ignore[no-any-return]


def look_up(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The table's row of each token, (*tokens, size)."""
    if _adds_up_wide(table):
        return F.embedding(tokens, table)
    return _Rows.apply(tokens, table)  # type: ignore[no-any-return]


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up (2002.05202 section 2); backward computes silu(gate) again."""
    if torch.compiler.is_compiling():
        return F.silu(gate) * up
    return _SwiGlu.apply(gate, up)  # type: ignore[no-any-return]


def _adds_up_wide(x: torch.Tensor) -> bool:
    """Whether torch's own backward adds up in fp32."""
    return x.dtype == torch.float32 or x.device.type != "cpu" or torch.compiler.is_compiling()


def _summed(grad: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, mean: torch.Tensor | None) -> torch.Tensor:
    """Sum of grad * (x - mean) * scale over all rows, (size,) in fp32."""
    size = x.shape[-1]
    step, total = max(1, AT_ONCE // size), torch.zeros(size, device=x.device)
    grads, rows, scales = grad.reshape(-1, size), x.reshape(-1, size), scale.reshape(-1, 1)
    means = None if mean is None else mean.reshape(-1, 1)
    for first in range(0, rows.shape[0], step):
        part = slice(first, first + step)
        wide = rows[part].float() if means is None else rows[part].float().sub_(means[part])
        total += wide.mul_(scales[part]).mul_(grads[part]).sum(0)
    return total


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
        size, wide, adds_up = x.shape[-1], weight.float(), _adds_up_wide(x)  # the kernel wants it in the scale's type
        x_grad, weight_grad, _ = aten.native_layer_norm_backward(
            grad, x, [size], torch.zeros_like(scale), scale, wide, None, [True, adds_up, False]
        )
        if not adds_up:
            weight_grad = _summed(grad, x, scale, None)
        mean = (grad @ weight.to(grad.dtype)).unsqueeze(-1).mul_(scale).div_(size)
        return x_grad.add_(mean), weight_grad.to(weight.dtype), None  # LayerNorm took the mean off


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        out, mean, scale = aten.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, scale)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        x, weight, bias, mean, scale = ctx.saved_tensors
        x_grad, _, _ = aten.native_layer_norm_backward(
            grad, x, weight.shape, mean, scale, weight, bias, [True, False, False]
        )
        weight_grad = _summed(grad, x, scale, mean)
        bias_grad = grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32)
        return x_grad, weight_grad.to(weight.dtype), bias_grad.to(bias.dtype), None


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.shape = table.shape
        return F.embedding(tokens, table)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        """Some columns after the others, so that no table is there in fp32."""
        (tokens,), (rows, size) = ctx.saved_tensors, ctx.shape
        flat, grads, table = tokens.reshape(-1), grad.reshape(-1, size), grad.new_empty(ctx.shape)
        step = max(1, AT_ONCE // max(rows, len(flat)))
        for first in range(0, size, step):
            part = slice(first, first + step)
            wide = torch.zeros(rows, min(step, size - first), device=grad.device)
            table[:, part] = wide.index_add_(0, flat, grads[:, part].float())
        return None, table


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        return aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)
