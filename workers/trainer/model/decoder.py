"""One chunk of a decoder: some layers, and the ends where it has them.

Which tensors of a chunk the planner's units describe, and the values they start from.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from planner.facts.layout import Coordinates
from planner.facts.model_shapes import Parameter, ParameterUnit, is_moe_layer
from planner.facts.placements import get_padded_vocab_size, get_unsharded_box
from planner.facts.spec import JobSpec, ModelSpec
from workers.torch_private.kernels import look_up
from workers.trainer.compile import compiled
from workers.trainer.model.attention import Attention, Rotary, rotary, turns
from workers.trainer.model.layers import Mlp, Norm, Strategy, Table, columns, remade
from workers.trainer.model.moe import Mixture
from workers.trainer.parallel.matmul import WIDE
from workers.trainer.parallel.tensor_parallel import Entered


class Block(nn.Module):
    """Pre-norm transformer layer. Each half enters tp once and leaves it once."""

    def __init__(self, model: ModelSpec, strategy: Strategy, *, moe: bool = False) -> None:
        super().__init__()
        h, bias = model.hidden_size, model.arch == "gpt"
        self.strategy = strategy
        self.attention_norm = Norm(h, bias, strategy)
        self.attention = Attention(model, strategy)
        self.mlp_norm = Norm(h, bias, strategy)
        self.moe = Mixture(model, model.moe, strategy) if moe and model.moe else None
        self.mlp = None if self.moe else Mlp(model, model.ffn_hidden_size, strategy)

    def forward(
        self, x: torch.Tensor, rotary: Rotary | None = None, documents: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(batch, seq, hidden) -> the same"""
        if self.strategy.recompute == "full" and torch.is_grad_enabled():
            again: torch.Tensor = checkpoint(self._layer, x, rotary, documents, use_reentrant=False)
            return again
        return self._layer(x, rotary, documents)

    def compile_layer(self) -> None:
        """Let torch.compile make kernels of what lies between collectives."""
        self._layer = compiled(self._layer)  # type: ignore[method-assign]

    def _layer(self, x: torch.Tensor, rotary: Rotary | None, documents: torch.Tensor | None) -> torch.Tensor:
        attended = self._half(x, self.attention_norm, partial(self.attention, rotary=rotary, documents=documents))
        x = x + self.attention.out.add_bias(attended)
        if self.mlp is None:
            assert self.moe is not None
            return x + self._half(x, self.mlp_norm, self.moe)
        return x + self.mlp.down.add_bias(self._half(x, self.mlp_norm, self.mlp))

    def _half(self, x: torch.Tensor, norm: Norm, inside: Callable[[Entered], torch.Tensor]) -> torch.Tensor:
        normed = norm(x)
        entered = self.strategy.tp.enter(normed)
        make = self._remake(x, norm, normed.detach())
        if make is None:
            return self.strategy.tp.leave(inside(entered))
        with remade(entered.whole, make):
            return self.strategy.tp.leave(inside(entered))

    def _remake(self, x: torch.Tensor, norm: Norm, normed: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """How backward gets a half's input again where it is not kept."""
        strategy, tp = self.strategy, self.strategy.tp
        if strategy.recompute == "full":
            return None
        if strategy.drops_cheap_outputs and (strategy.regather or not tp.sequence_parallel):
            return lambda: tp.gathered(norm(x))
        return (lambda: tp.gathered(normed)) if strategy.regather else None


class Decoder(nn.Module):
    """The layers in `layers`, the embedding when `first`, final norm and head when `last`. Absent parts are None.

    `layers` is keyed by the layer's number in the whole model.
    """

    def __init__(
        self, model: ModelSpec, layers: range, strategy: Strategy, dtype: torch.dtype, *, first: bool, last: bool
    ) -> None:
        super().__init__()
        gpt, h, tp = model.arch == "gpt", model.hidden_size, strategy.tp.degree
        rows = get_padded_vocab_size(model.vocab_size, tp) // tp
        own_head = last and not (model.tied_embeddings and first)
        self.model, self.strategy, self.dtype = model, strategy, dtype
        self.embedding = Table(rows, h, strategy) if first else None
        self.positions = Table(model.max_seq_len, h, strategy) if first and gpt else None
        self.layers = nn.ModuleDict({str(i): Block(model, strategy, moe=is_moe_layer(model, i)) for i in layers})
        self.final_norm = Norm(h, gpt, strategy) if last else None
        self.head = Table(rows, h, strategy) if own_head else None
        self._rotary: Rotary | None = None

    def blocks(self) -> list[Block]:
        """The layers in order."""
        return [layer for layer in self.layers.values() if isinstance(layer, Block)]

    def forward(self, x: torch.Tensor, documents: torch.Tensor | None = None) -> torch.Tensor:
        """Tokens (batch, seq) on the first chunk, hidden states otherwise -> hidden states, or logits on the last.

        `documents` (batch, whole seq): attention stays within each, as `documents_of` numbers them.
        """
        if self.embedding is not None:
            x = self._embed(x)
        rotary = self._rotary_of(x)
        for layer in self.layers.values():
            x = layer(x, rotary, documents)
        if self.final_norm is None:
            return x
        table = self.head if self.head is not None else self.embedding
        assert table is not None
        normed = self.final_norm(x)
        entered = self.strategy.tp.enter(normed)
        if not self.strategy.regather:
            return self._logits(entered, table)
        part = normed.detach()
        with remade(entered.whole, lambda: self.strategy.tp.gathered(part)):
            return self._logits(entered, table)

    def _rotary_of(self, x: torch.Tensor) -> Rotary | None:
        """Of the positions of hidden states (batch, seq[/tp], hidden), for all layers; kept for the next ones."""
        if self.model.arch == "gpt":
            return None
        tp, cp = self.strategy.tp, self.strategy.cp
        seq = x.shape[1] * (tp.degree if tp.sequence_parallel else 1)
        if self._rotary is None or len(self._rotary.cos) != seq:
            self._rotary = rotary(cp.positions(seq, x.device), turns(self.model, x.device), x.dtype)
        return self._rotary

    def _logits(self, entered: Entered, table: Table) -> torch.Tensor:
        (logits,) = columns(entered, [(table.weight, None)], self.strategy, WIDE)
        return logits

    def loss_sum(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Sum of cross-entropy of the last chunk's output, over the tokens that there are."""
        return self.strategy.tp.loss_sum(logits, targets, self.model.vocab_size)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        assert self.embedding is not None
        x = self.strategy.tp.embed(tokens, self.embedding.rows().to(self.dtype))
        if self.positions is None:
            return x
        chosen = self.strategy.cp.positions(tokens.shape[1], tokens.device)
        rows = look_up(self.strategy.tp.sequence_part(chosen, 0), self.positions.rows())
        return x + rows.to(self.dtype)


INIT_STD = 0.02
ENDS_BRANCH = ("attention.out.weight", "mlp.down.weight", "moe.experts.down.weight", "moe.shared.down.weight")
MOST_AT_ONCE = 2**30  # values of a unit, 4 GiB of the host's memory on each rank: of a larger one a tensor at a time


def unit_modules(decoder: Decoder, unit: ParameterUnit) -> list[nn.Module]:
    """The modules whose parameters `unit` lists: one layer, or what lies outside the layers."""
    if unit.name != "root":
        return [decoder.layers[unit.name.removeprefix("layers.")]]
    return [m for name, m in decoder.named_children() if name != "layers"]


def full_name(unit: ParameterUnit, parameter: Parameter) -> str:
    """The parameter's name in the whole model."""
    return parameter.name if unit.name == "root" else f"{unit.name}.{parameter.name}"


def unit_parameter(decoder: Decoder, unit: ParameterUnit, parameter: Parameter) -> nn.Parameter:
    """The tensor of this decoder that `parameter` of `unit` describes."""
    return decoder.get_parameter(full_name(unit, parameter))


@torch.no_grad()
def initialise(decoder: Decoder, unit: ParameterUnit, spec: JobSpec, place: Coordinates, draws: int = 1) -> None:
    """Fill a unit's parameters with their part of the whole tensors, drawn from (seed, name) alone.

    So all layouts start from the same model with nothing sent, however many are drawn at once; padding is zero. `unit`
    has whole shapes. Weights: normal, std 0.02, products that end a residual branch divided by sqrt(2 layers) (GPT-2
    section 2.3).
    """
    for parameter, whole in zip(unit.parameters, _drawn(unit, spec, draws), strict=True):
        box = get_unsharded_box(spec, place, parameter)
        unit_parameter(decoder, unit, parameter).zero_()[box.local_slices] = whole[box.slices]


def draws_at_once(device: torch.device) -> int:
    """As many as this rank's share of the host's cores, while a GPU has none of them to compute with.

    The host draws for a GPU too, whose generator and logarithm give other values.
    """
    if device.type == "cpu":
        return 1
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


def _drawn(unit: ParameterUnit, spec: JobSpec, draws: int) -> Iterator[torch.Tensor]:
    """The unit's whole tensors in order. One of hundreds of millions takes a core seconds."""

    def draw(parameter: Parameter) -> torch.Tensor:
        return _whole(parameter, full_name(unit, parameter), spec.model, spec.train.seed)

    if draws == 1 or sum(parameter.numel for parameter in unit.parameters) > MOST_AT_ONCE:
        yield from map(draw, unit.parameters)
        return
    with ThreadPoolExecutor(min(draws, len(unit.parameters))) as threads:
        yield from threads.map(draw, unit.parameters)


def _whole(parameter: Parameter, name: str, model: ModelSpec, seed: int) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(parameter.shape)
    if name.endswith("bias"):
        return torch.zeros(parameter.shape)
    if name == "head.weight" and model.tied_embeddings:
        name = "embedding.weight"
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    std = INIT_STD / (2 * model.num_layers) ** 0.5 if name.endswith(ENDS_BRANCH) else INIT_STD
    return torch.empty(parameter.shape).normal_(0.0, std, generator=generator)
