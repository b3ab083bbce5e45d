"""Causal self-attention over one rank's heads and its part of the sequence.

Rotary position embedding (RoFormer 2104.09864), halves convention.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from planner.facts.spec import ModelSpec
from workers.trainer.model.layers import Linear, Strategy, columns
from workers.trainer.parallel.document_mask import Places, hidden
from workers.trainer.parallel.tensor_parallel import Entered


class Attention(nn.Module):
    """Each key/value head serves num_heads / num_kv_heads queries; where tp has more ranks than heads, ranks share."""

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

    def forward(self, x: Entered, rotary: Rotary | None = None, documents: torch.Tensor | None = None) -> torch.Tensor:
        """Partial sums of the output, (batch, seq, hidden). `rotary` of its positions, where heads are turned;
        `documents` (batch, whole seq) as `documents_of` says."""
        parts = columns(x, [part.pair for part in (self.q, self.k, self.v)], self.strategy)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
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
            heads: torch.Tensor = checkpoint(scores_and_all, q, k, v, documents, use_reentrant=False)
            return heads
        return scores_and_all(q, k, v, documents)


def scores_and_all(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention with every score in memory, as before FlashAttention. (batch, heads, seq, head size) each."""
    served = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(served, 1), v.repeat_interleave(served, 1)
    if documents is None:
        unseen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    else:
        places = Places(documents, torch.arange(q.shape[2], device=q.device))
        unseen = hidden(places, places)
    # What lies between has no name: with one there are three of the scores' size at once.
    scale = q.shape[-1] ** -0.5
    heads: torch.Tensor = ((q @ k.transpose(-1, -2)) * scale).masked_fill(unseen, -math.inf).softmax(-1) @ v
    return heads


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
