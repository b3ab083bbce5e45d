"""Attention, MLP, and other layers of the decoder blocks, and the strategy that a layout selects for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from planner.facts.spec import AttentionKernel, ModelSpec, Recompute
from workers.torch_private.compiler import storage_key
from workers.torch_private.kernels import layer_norm, rms_norm, swiglu
from workers.trainer.parallel.context_parallel import ContextParallel, TokenPositions, get_hidden_mask
from workers.trainer.parallel.expert_parallel import ExpertParallel
from workers.trainer.parallel.matmul import UNQUANTIZED, LinearFunction, Matmuls, WeightGradients
from workers.trainer.parallel.tensor_parallel import ParallelInput, TensorParallel

NORM_EPS = 1e-5


@dataclass(frozen=True)
class Strategy:
    """Select how the blocks of a chunk are computed. The default is one rank without options.

    `weight_gradients` is set for schedules that split backward. `balance_scale` scales the gradient of the
    load-balancing loss of one sequence. `matmuls` applies to layers, not to the head.
    """

    tp: TensorParallel = field(default_factory=lambda: TensorParallel(None))
    cp: ContextParallel = field(default_factory=lambda: ContextParallel(None))
    ep: ExpertParallel = field(default_factory=lambda: ExpertParallel(None))
    recompute: Recompute = "none"
    attention: AttentionKernel = "fused"
    regather: bool = False
    weight_gradients: WeightGradients | None = None
    balance_scale: float = 0.0
    matmuls: Matmuls = UNQUANTIZED

    @property
    def drops_cheap_outputs(self) -> bool:
        """Return whether backward recomputes norms and activations (selective recompute, fused attention)."""
        return self.recompute == "selective" and self.attention == "fused"


class Linear(nn.Module):
    """Compute y = x W^T [+ b] in the dtype of x. The weight is (out, in)."""

    def __init__(self, out_size: int, in_size: int, bias: bool, strategy: Strategy) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size))
        self.bias = nn.Parameter(torch.empty(out_size)) if bias else None
        self.strategy = strategy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias, self.strategy)

    @property
    def pair(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.weight, self.bias

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the matmul without the bias, which a row-parallel layer adds after the sum."""
        return linear(x, self.weight, None, self.strategy)

    def add_bias(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.bias is None else x + read_parameter(self.bias, self.strategy).to(x.dtype)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, strategy: Strategy) -> torch.Tensor:
    """Compute F.linear in the dtype of x. The weight gradient can be deferred."""
    (out,) = _linears(x, [(weight, bias)], strategy, strategy.matmuls)
    return out


def _linears(
    x: torch.Tensor, layers: Sequence[tuple[torch.Tensor, torch.Tensor | None]], strategy: Strategy, matmuls: Matmuls
) -> list[torch.Tensor]:
    if strategy.weight_gradients is not None and torch.is_grad_enabled():
        return [strategy.weight_gradients.linear(x, weight, bias, matmuls) for weight, bias in layers]
    weights = [weight.to(x.dtype) for weight, _ in layers]
    biases = [None if bias is None else bias.to(x.dtype) for _, bias in layers]
    if matmuls is UNQUANTIZED:
        return list(matmuls.outputs(x, weights, biases))
    return list(LinearFunction.apply(x, matmuls, *weights, *biases))


def column_linear(
    x: ParallelInput,
    layers: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    strategy: Strategy,
    matmuls: Matmuls | None = None,
) -> list[torch.Tensor]:
    """Compute one linear layer of the input for each (weight, bias)."""
    matmuls = matmuls or strategy.matmuls
    deferred = strategy.weight_gradients is not None and torch.is_grad_enabled()
    if strategy.tp.group is None or deferred:
        return _linears(strategy.tp.entered(x), layers, strategy, matmuls)
    dtype = x.whole.dtype
    biases = [None if bias is None else bias.to(dtype) for _, bias in layers]
    return strategy.tp.columns(x, [weight.to(dtype) for weight, _ in layers], biases, matmuls)


def read_parameter(parameter: torch.Tensor, strategy: Strategy) -> torch.Tensor:
    """Return a parameter for use outside a matmul. Its gradient can be deferred."""
    if strategy.weight_gradients is not None and torch.is_grad_enabled():
        return strategy.weight_gradients.defer(parameter)
    return parameter


class Norm(nn.Module):
    """LayerNorm with bias, or RMSNorm without bias. Both are computed in fp32."""

    def __init__(self, size: int, bias: bool, strategy: Strategy) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if bias else None
        self.strategy = strategy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = read_parameter(self.weight, self.strategy)
        if self.bias is None:
            return rms_norm(x, weight, NORM_EPS)
        return layer_norm(x, weight, read_parameter(self.bias, self.strategy), NORM_EPS)


class Table(nn.Module):
    """Look up rows by index."""

    def __init__(self, rows: int, size: int, strategy: Strategy) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size))
        self.strategy = strategy

    def rows(self) -> torch.Tensor:
        """Return the table, (rows, size)."""
        return read_parameter(self.weight, self.strategy)


class Mlp(nn.Module):
    """MLP over this rank's columns, with GELU for gpt and SwiGLU for llama."""

    def __init__(self, model: ModelSpec, inner: int, strategy: Strategy) -> None:
        super().__init__()
        h, f, bias = model.hidden_size, inner // strategy.tp.degree, model.arch == "gpt"
        self.gate = Linear(f, h, bias, strategy) if model.arch == "llama" else None
        self.up = Linear(f, h, bias, strategy)
        self.down = Linear(h, f, bias, strategy)
        self.strategy = strategy

    def forward(self, x: ParallelInput) -> torch.Tensor:
        """Return partial sums of the output, (batch, seq, hidden)."""
        layers = [self.up] if self.gate is None else [self.up, self.gate]
        up, *gates = column_linear(x, [part.pair for part in layers], self.strategy)
        return self._down(gates[0] if gates else None, up)

    def forward_within_tp(self, x: torch.Tensor) -> torch.Tensor:
        """Return partial sums of the output for an input that is already gathered."""
        return self._down(None if self.gate is None else self.gate(x), self.up(x))

    def _down(self, gate: torch.Tensor | None, up: torch.Tensor) -> torch.Tensor:
        inner = activate(gate, up)
        if not self.strategy.drops_cheap_outputs:
            return self.down.partial(inner)
        with recompute_saved(inner, lambda: activate(gate, up)):
            return self.down.partial(inner)


def activate(gate: torch.Tensor | None, up: torch.Tensor) -> torch.Tensor:
    """Apply GELU, or SwiGLU if there is a gate. Backward keeps only the inputs."""
    return F.gelu(up) if gate is None else swiglu(gate, up)


@contextmanager
def recompute_saved(tensor: torch.Tensor, make: Callable[[], torch.Tensor]) -> Iterator[None]:
    """Save `make` in place of `tensor` for backward. Backward calls `make` once.

    `make` runs without autograd and returns the same values. Source: 2205.05198, sections 4.2.2 and 5.
    """
    uses = _RecomputedValue(make)
    # Autograd keeps both hooks with the saved tensors, so the hooks must not reference the tensor.
    storage, numel = storage_key(tensor.untyped_storage()), tensor.numel()

    def pack(saved: torch.Tensor) -> torch.Tensor | _SavedView:
        if storage_key(saved.untyped_storage()) != storage or saved.numel() != numel:
            return saved
        uses.count += 1
        return _SavedView(uses, saved.shape, saved.stride())

    def unpack(saved: torch.Tensor | _SavedView) -> torch.Tensor:
        return saved if isinstance(saved, torch.Tensor) else saved.make()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class _RecomputedValue:
    """Share one recomputed value between saved tensors, and free it after the last use."""

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self._make = make
        self._value: torch.Tensor | None = None
        self.count = 0

    def take(self) -> torch.Tensor:
        if self._value is None:
            with torch.no_grad():
                self._value = self._make().contiguous()
        value = self._value
        self.count -= 1
        if self.count == 0:
            self._value = None
        return value


class _SavedView:
    """View a recomputed value with the shape of a saved tensor."""

    def __init__(self, uses: _RecomputedValue, shape: torch.Size, stride: tuple[int, ...]) -> None:
        self._uses, self._shape, self._stride = uses, shape, stride

    def make(self) -> torch.Tensor:
        return self._uses.take().as_strided(self._shape, self._stride)


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
    smooth = ((rounds - low) / (high - low)).clamp(0, 1)
    return smooth * plain + (1 - smooth) * plain / scaling.factor


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
