"""What blocks are made of, and how a layout wants them computed.

What backward needs of a tensor, kept as a way to make it again (2205.05198 sections 4.2.2 and 5).
"""

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
from workers.trainer.parallel.matmul import WIDE, Linears, Products, WeightGradients
from workers.trainer.parallel.tensor_parallel import Entered, TensorParallel

NORM_EPS = 1e-5


@dataclass(frozen=True)
class Strategy:
    """How the blocks of a chunk are computed; the default is one rank with nothing special.

    `weight_gradients` is there for schedules that compute them apart. `balance_scale` is what the gradient of one
    sequence's load-balancing loss is multiplied by. `products` are those of layers, not the head's.
    """

    tp: TensorParallel = field(default_factory=lambda: TensorParallel(None))
    cp: ContextParallel = field(default_factory=lambda: ContextParallel(None))
    ep: ExpertParallel = field(default_factory=lambda: ExpertParallel(None))
    recompute: Recompute = "none"
    attention: AttentionKernel = "fused"
    regather: bool = False
    weight_gradients: WeightGradients | None = None
    balance_scale: float = 0.0
    products: Products = WIDE

    @property
    def drops_cheap_outputs(self) -> bool:
        """Selective recompute where attention is fused: norms and activations, which cost no product."""
        return self.recompute == "selective" and self.attention == "fused"


class Linear(nn.Module):
    """y = x W^T [+ b], computed in the type of x. weight (out, in)."""

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
        """Without the bias, which a row-parallel product adds only after the sum."""
        return linear(x, self.weight, None, self.strategy)

    def add_bias(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.bias is None else x + use(self.bias, self.strategy).to(x.dtype)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, strategy: Strategy) -> torch.Tensor:
    """F.linear in the type of x, its weight gradient computed when the schedule says so."""
    (out,) = _linears(x, [(weight, bias)], strategy, strategy.products)
    return out


def _linears(
    x: torch.Tensor, parts: Sequence[tuple[torch.Tensor, torch.Tensor | None]], strategy: Strategy, products: Products
) -> list[torch.Tensor]:
    if strategy.weight_gradients is not None and torch.is_grad_enabled():
        return [strategy.weight_gradients.linear(x, weight, bias, products) for weight, bias in parts]
    weights = [weight.to(x.dtype) for weight, _ in parts]
    biases = [None if bias is None else bias.to(x.dtype) for _, bias in parts]
    if products is WIDE:
        return list(products.outputs(x, weights, biases))
    return list(Linears.apply(x, products, *weights, *biases))


def columns(
    x: Entered,
    parts: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    strategy: Strategy,
    products: Products | None = None,
) -> list[torch.Tensor]:
    """Products of what enters a half of a layer, one for each (weight, bias); the strategy's if no others are given."""
    products = products or strategy.products
    apart = strategy.weight_gradients is not None and torch.is_grad_enabled()
    if strategy.tp.group is None or apart:
        return _linears(strategy.tp.entered(x), parts, strategy, products)
    kind = x.whole.dtype
    biases = [None if bias is None else bias.to(kind) for _, bias in parts]
    return strategy.tp.columns(x, [weight.to(kind) for weight, _ in parts], biases, products)


def use(parameter: torch.Tensor, strategy: Strategy) -> torch.Tensor:
    """A parameter for another use than a product."""
    if strategy.weight_gradients is not None and torch.is_grad_enabled():
        return strategy.weight_gradients.held(parameter)
    return parameter


class Norm(nn.Module):
    """LayerNorm with bias, or RMSNorm without; both are computed in fp32 inside."""

    def __init__(self, size: int, bias: bool, strategy: Strategy) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if bias else None
        self.strategy = strategy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = use(self.weight, self.strategy)
        if self.bias is None:
            return rms_norm(x, weight, NORM_EPS)
        return layer_norm(x, weight, use(self.bias, self.strategy), NORM_EPS)


class Table(nn.Module):
    """Rows looked up by index."""

    def __init__(self, rows: int, size: int, strategy: Strategy) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size))
        self.strategy = strategy

    def rows(self) -> torch.Tensor:
        """The table, (rows, size)."""
        return use(self.weight, self.strategy)


class Mlp(nn.Module):
    """GELU for gpt, SwiGLU for llama, over this rank's columns."""

    def __init__(self, model: ModelSpec, inner: int, strategy: Strategy) -> None:
        super().__init__()
        h, f, bias = model.hidden_size, inner // strategy.tp.degree, model.arch == "gpt"
        self.gate = Linear(f, h, bias, strategy) if model.arch == "llama" else None
        self.up = Linear(f, h, bias, strategy)
        self.down = Linear(h, f, bias, strategy)
        self.strategy = strategy

    def forward(self, x: Entered) -> torch.Tensor:
        """Partial sums of the output, (batch, seq, hidden)"""
        parts = [self.up] if self.gate is None else [self.up, self.gate]
        up, *gates = columns(x, [part.pair for part in parts], self.strategy)
        return self._down(gates[0] if gates else None, up)

    def within(self, x: torch.Tensor) -> torch.Tensor:
        """The same of an input that has entered with others'."""
        return self._down(None if self.gate is None else self.gate(x), self.up(x))

    def _down(self, gate: torch.Tensor | None, up: torch.Tensor) -> torch.Tensor:
        inner = activate(gate, up)
        if not self.strategy.drops_cheap_outputs:
            return self.down.partial(inner)
        with remade(inner, lambda: activate(gate, up)):
            return self.down.partial(inner)


def activate(gate: torch.Tensor | None, up: torch.Tensor) -> torch.Tensor:
    """GELU, or SwiGLU where there is a gate; both keep their input alone."""
    return F.gelu(up) if gate is None else swiglu(gate, up)


@contextmanager
def remade(tensor: torch.Tensor, make: Callable[[], torch.Tensor]) -> Iterator[None]:
    """Products inside keep `make` in place of `tensor`, and backward calls it once, when the first asks for it.

    `make` runs without autograd and must give the same values.
    """
    uses = _Uses(make)
    # torch keeps both hooks as long as what was saved: they must not hold the tensor.
    storage, numel = storage_key(tensor.untyped_storage()), tensor.numel()

    def pack(saved: torch.Tensor) -> torch.Tensor | _View:
        if storage_key(saved.untyped_storage()) != storage or saved.numel() != numel:
            return saved
        uses.count += 1
        return _View(uses, saved.shape, saved.stride())

    def unpack(saved: torch.Tensor | _View) -> torch.Tensor:
        return saved if isinstance(saved, torch.Tensor) else saved.make()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class _Uses:
    """How many saved tensors share one remade value, which is let go after the last."""

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


class _View:
    """A saved tensor's shape over the remade values."""

    def __init__(self, uses: _Uses, shape: torch.Size, stride: tuple[int, ...]) -> None:
        self._uses, self._shape, self._stride = uses, shape, stride

    def make(self) -> torch.Tensor:
        return self._uses.take().as_strided(self._shape, self._stride)
