"""Causal self-attention with rotary position embedding, over the heads and the sequence part of one rank."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from planner.facts.spec import ModelSpec
from workers.trainer.model.layers import Linear, Strategy, column_linear
from workers.trainer.parallel.document_mask import TokenPositions, get_hidden_mask
from workers.trainer.parallel.tensor_parallel import ParallelInput


class Attention(nn.Module):
    """Compute attention. Each key/value head serves num_heads / num_kv_heads query heads.

    If tp is larger than the number of key/value heads, ranks share heads.
    """

    def __init__(self, model: ModelSpec, strategy: Strategy) -> None:
        super().__init__()
        self.head_dim = model.head_size
        self.strategy = strategy
        h, bias, tp = model.hidden_size, model.arch == "gpt", strategy.tp.degree
        kv = max(1, model.num_kv_heads // tp) * self.head_dim
        self.q = Linear(h // tp, h, bias, strategy)
        self.k = Linear(kv, h, bias, strategy)
        self.v = Linear(kv, h, bias, strategy)
        self.out = Linear(h, h // tp, bias, strategy)

    def forward(
        self, x: ParallelInput, rotary: RotaryAngles | None = None, documents: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return partial sums of the output, (batch, seq, hidden).

        Args:
            x: input of the layer.
            rotary: angles of the positions, or None.
            documents: document id of each token, (batch, whole seq), or None.
        """
        parts = column_linear(x, [part.pair for part in (self.q, self.k, self.v)], self.strategy)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        if rotary is not None:
            q, k = apply_rotary(q, rotary), apply_rotary(k, rotary)
        heads = self._attend(q, k, v, documents)
        return self.out.partial(heads.transpose(1, 2).flatten(2))

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor | None
    ) -> torch.Tensor:
        fused = self.strategy.attention == "fused"
        if self.strategy.cp.group is not None or (fused and documents is not None):
            return self.strategy.cp.attend(q, k, v, documents)
        if fused:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])
        if self.strategy.recompute == "selective" and torch.is_grad_enabled():
            heads: torch.Tensor = checkpoint(attend_unfused, q, k, v, documents, use_reentrant=False)
            return heads
        return attend_unfused(q, k, v, documents)


def attend_unfused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute attention with all scores in memory. Each tensor is (batch, heads, seq, head size)."""
    served = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(served, 1), v.repeat_interleave(served, 1)
    if documents is None:
        unseen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    else:
        places = TokenPositions(documents, torch.arange(q.shape[2], device=q.device))
        unseen = get_hidden_mask(places, places)
    # Intermediate results have no name, otherwise three tensors of the size of the scores exist at once.
    scale = q.shape[-1] ** -0.5
    heads: torch.Tensor = ((q @ k.transpose(-1, -2)) * scale).masked_fill(unseen, -math.inf).softmax(-1) @ v
    return heads


class RotaryAngles(NamedTuple):
    """Store cosines and sines of positions, (seq, head size / 2) each."""

    cos: torch.Tensor
    sin: torch.Tensor


def compute_frequencies(model: ModelSpec, device: torch.device) -> torch.Tensor:
    """Return the rotation per position in radians, (head size / 2,) fp32."""
    half = model.head_size // 2
    plain = model.rope_base ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
    scaling = model.rope_scaling
    if scaling is None:
        return plain
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    rounds = scaling.original_max_seq_len * plain / (2 * math.pi)  # rotations within the original context length
    kept = ((rounds - low) / (high - low)).clamp(0, 1)
    return kept * plain + (1 - kept) * plain / scaling.factor


def compute_rotary(positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype) -> RotaryAngles:
    """Return the rotary angles of positions (seq,). Angles are computed in fp32."""
    angle = torch.outer(positions.float(), frequencies)
    return RotaryAngles(angle.cos().to(dtype), angle.sin().to(dtype))


def apply_rotary(x: torch.Tensor, angles: RotaryAngles) -> torch.Tensor:
    """Rotate each pair of features by the angle of its position, x (batch, heads, seq, head size).

    Source: RoFormer (2104.09864), equation 34, with the halves convention.
    """
    if torch.compiler.is_compiling():  # The compiler fuses these operations.
        a, b = x.chunk(2, -1)
        return torch.cat((a * angles.cos - b * angles.sin, b * angles.cos + a * angles.sin), -1)
    return _Rotate.apply(x, *angles)  # type: ignore[no-any-return]


class _Rotate(torch.autograd.Function):
    """Rotate, and rotate the gradient in the opposite direction. Autograd would split and add the halves."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate_halves(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate_halves(grad, cos, sin, -1), None, None


def _rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    (a, b), (turned_a, turned_b) = x.chunk(2, -1), out.chunk(2, -1)
    torch.mul(a, cos, out=turned_a).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=turned_b).addcmul_(a, sin, value=sign)
    return out
