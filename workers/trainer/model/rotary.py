"""Rotary position embedding (RoFormer 2104.09864), halves convention."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from planner.facts.spec import ModelSpec


class Rotary(NamedTuple):
    """Of some positions, (seq, head size / 2) each."""

    cos: torch.Tensor
    sin: torch.Tensor


def turns(model: ModelSpec, device: torch.device) -> torch.Tensor:
    """Radians a position that each pair of a head's features turns, (head size / 2,) fp32."""
    half = model.head_size // 2
    plain = model.rope_base ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
    scaling = model.rope_scaling
    if scaling is None:
        return plain
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    rounds = scaling.original_max_seq_len * plain / (2 * math.pi)  # in a sequence as long as before
    kept = ((rounds - low) / (high - low)).clamp(0, 1)
    return kept * plain + (1 - kept) * plain / scaling.factor


def rotary(positions: torch.Tensor, turns: torch.Tensor, dtype: torch.dtype) -> Rotary:
    """positions (seq,), turns (head size / 2,); the angles are in fp32, whatever `dtype` is."""
    angle = torch.outer(positions.float(), turns)
    return Rotary(angle.cos().to(dtype), angle.sin().to(dtype))


def rotate(x: torch.Tensor, by: Rotary) -> torch.Tensor:
    """Each pair of features turned by its position's angle (equation 34). x (batch, heads, seq, head size)."""
    if torch.compiler.is_compiling():  # which makes one kernel of it anyway
        a, b = x.chunk(2, -1)
        return torch.cat((a * by.cos - b * by.sin, b * by.cos + a * by.sin), -1)
    return _Rotate.apply(x, *by)  # type: ignore[no-any-return]


class _Rotate(torch.autograd.Function):
    """Backward turns the other way. Autograd's own would fill, cut and add up halves."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, -1), None, None


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, way: int) -> torch.Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    (a, b), (turned_a, turned_b) = x.chunk(2, -1), out.chunk(2, -1)
    torch.mul(a, cos, out=turned_a).addcmul_(b, sin, value=-way)
    torch.mul(b, cos, out=turned_b).addcmul_(a, sin, value=way)
    return out
