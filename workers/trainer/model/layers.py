"""Layers of the decoder blocks, and the strategy that a layout selects for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from planner.facts.spec import AttentionKernel, ModelSpec, Recompute
from workers.torch_private.kernels import layer_norm, rms_norm, swiglu
from workers.torch_private.tensors import storage_key
from workers.trainer.parallel.context_parallel import ContextParallel
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
