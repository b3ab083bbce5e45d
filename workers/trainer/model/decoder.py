"""A decoder chunk, its initial weights, and its parameters by planner unit."""

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
from planner.facts.model_shapes import Parameter, ParameterUnit, get_chunk_units, is_moe_layer
from planner.facts.placements import get_padded_vocab_size, get_unsharded_box
from planner.facts.spec import JobSpec, ModelSpec
from workers.torch_private.kernels import look_up
from workers.trainer.compile import compile_function
from workers.trainer.model.layers import (
    Attention,
    Mlp,
    Norm,
    RotaryAngles,
    Strategy,
    Table,
    column_linear,
    compute_frequencies,
    compute_rotary,
    recompute_saved,
)
from workers.trainer.model.moe import MixtureOfExperts
from workers.trainer.parallel.matmul import UNQUANTIZED
from workers.trainer.parallel.tensor_parallel import ParallelInput

INIT_STD = 0.02
RESIDUAL_OUTPUTS = ("attention.out.weight", "mlp.down.weight", "moe.experts.down.weight", "moe.shared.down.weight")
MAX_UNIT_VALUES = 2**30  # values per unit (4 GiB of host memory), larger units are initialized tensor by tensor


class Block(nn.Module):
    """Pre-norm transformer layer. Each half enters and leaves the tp region once."""

    def __init__(self, model: ModelSpec, strategy: Strategy, *, moe: bool = False) -> None:
        super().__init__()
        h, bias = model.hidden_size, model.arch == "gpt"
        self.strategy = strategy
        self.attention_norm = Norm(h, bias, strategy)
        self.attention = Attention(model, strategy)
        self.mlp_norm = Norm(h, bias, strategy)
        self.moe = MixtureOfExperts(model, model.moe, strategy) if moe and model.moe else None
        self.mlp = None if self.moe else Mlp(model, model.ffn_hidden_size, strategy)

    def forward(
        self, x: torch.Tensor, rotary: RotaryAngles | None = None, documents: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Map hidden states (batch, seq, hidden) to hidden states of the same shape."""
        if self.strategy.recompute == "full" and torch.is_grad_enabled():
            again: torch.Tensor = checkpoint(self._layer, x, rotary, documents, use_reentrant=False)
            return again
        return self._layer(x, rotary, documents)

    def compile_layer(self) -> None:
        """Compile the layer with torch.compile."""
        self._layer = compile_function(self._layer)  # type: ignore[method-assign]

    def _layer(self, x: torch.Tensor, rotary: RotaryAngles | None, documents: torch.Tensor | None) -> torch.Tensor:
        attended = self._half(x, self.attention_norm, partial(self.attention, rotary=rotary, documents=documents))
        x = x + self.attention.out.add_bias(attended)
        if self.mlp is None:
            assert self.moe is not None
            return x + self._half(x, self.mlp_norm, self.moe)
        return x + self.mlp.down.add_bias(self._half(x, self.mlp_norm, self.mlp))

    def _half(self, x: torch.Tensor, norm: Norm, inside: Callable[[ParallelInput], torch.Tensor]) -> torch.Tensor:
        normed = norm(x)
        entered = self.strategy.tp.enter(normed)
        make = self._make_recompute(x, norm, normed.detach())
        if make is None:
            return self.strategy.tp.leave(inside(entered))
        with recompute_saved(entered.whole, make):
            return self.strategy.tp.leave(inside(entered))

    def _make_recompute(self, x: torch.Tensor, norm: Norm, normed: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """Return a function that recomputes the input of a half in backward, or None if the input is kept."""
        strategy, tp = self.strategy, self.strategy.tp
        if strategy.recompute == "full":
            return None
        if strategy.drops_cheap_outputs and (strategy.regather or not tp.sequence_parallel):
            return lambda: tp.gathered(norm(x))
        return (lambda: tp.gathered(normed)) if strategy.regather else None


class Decoder(nn.Module):
    """Decoder chunk: embedding if `first`, `layers`, final norm and head if `last`. Missing parts are None.

    The keys of `layers` are layer numbers of the whole model.
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
        self._rotary: RotaryAngles | None = None

    def blocks(self) -> list[Block]:
        """Return the layers in order."""
        return [layer for layer in self.layers.values() if isinstance(layer, Block)]

    def forward(self, x: torch.Tensor, documents: torch.Tensor | None = None) -> torch.Tensor:
        """Map tokens (batch, seq) or hidden states to hidden states, or to logits on the last chunk.

        Attention stays within each document of `documents` (batch, whole seq).
        """
        if self.embedding is not None:
            x = self._embed(x)
        rotary = self._get_rotary(x)
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
        with recompute_saved(entered.whole, lambda: self.strategy.tp.gathered(part)):
            return self._logits(entered, table)

    def _get_rotary(self, x: torch.Tensor) -> RotaryAngles | None:
        """Return the rotary angles for hidden states (batch, seq[/tp], hidden). The last result is cached."""
        if self.model.arch == "gpt":
            return None
        tp, cp = self.strategy.tp, self.strategy.cp
        seq = x.shape[1] * (tp.degree if tp.sequence_parallel else 1)
        if self._rotary is None or len(self._rotary.cos) != seq:
            self._rotary = compute_rotary(
                cp.positions(seq, x.device), compute_frequencies(self.model, x.device), x.dtype
            )
        return self._rotary

    def _logits(self, entered: ParallelInput, table: Table) -> torch.Tensor:
        (logits,) = column_linear(entered, [(table.weight, None)], self.strategy, UNQUANTIZED)
        return logits

    def loss_sum(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the sum of the cross-entropy over all tokens of the last chunk's output."""
        return self.strategy.tp.loss_sum(logits, targets, self.model.vocab_size)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        assert self.embedding is not None
        x = self.strategy.tp.embed(tokens, self.embedding.rows().to(self.dtype))
        if self.positions is None:
            return x
        chosen = self.strategy.cp.positions(tokens.shape[1], tokens.device)
        rows = look_up(self.strategy.tp.sequence_part(chosen, 0), self.positions.rows())
        return x + rows.to(self.dtype)


def list_unit_modules(decoder: Decoder, unit: ParameterUnit) -> list[nn.Module]:
    """Return the modules of a planner unit: one layer, or everything outside the layers."""
    if unit.name != "root":
        return [decoder.layers[unit.name.removeprefix("layers.")]]
    return [m for name, m in decoder.named_children() if name != "layers"]


def get_full_name(unit: ParameterUnit, parameter: Parameter) -> str:
    """Return the name of a parameter in the whole model."""
    return parameter.name if unit.name == "root" else f"{unit.name}.{parameter.name}"


def iter_model_parameters(model: ModelSpec) -> Iterator[tuple[str, Parameter]]:
    """Yield (full name, parameter) of the whole model, in the same order on all ranks."""
    for unit in get_chunk_units(model, range(model.num_layers), first=True, last=True):
        for parameter in unit.parameters:
            yield get_full_name(unit, parameter), parameter


def get_unit_parameter(decoder: Decoder, unit: ParameterUnit, parameter: Parameter) -> nn.Parameter:
    """Return the tensor that a planner parameter describes."""
    return decoder.get_parameter(get_full_name(unit, parameter))


@torch.no_grad()
def init_weights(
    decoder: Decoder, unit: ParameterUnit, spec: JobSpec, place: Coordinates, num_threads: int = 1
) -> None:
    """Fill the parameters of a unit with their shards of the initial values.

    Values depend only on the seed and the name, so all layouts start from the same model without communication. Padding
    is zero. Weights are normal with std 0.02. Weights that end a residual branch are divided by sqrt(2 * layers)
    (GPT-2, section 2.3).
    """
    for parameter, whole in zip(unit.parameters, _draw_unit(unit, spec, num_threads), strict=True):
        box = get_unsharded_box(spec, place, parameter)
        get_unit_parameter(decoder, unit, parameter).zero_()[box.local_slices] = whole[box.slices]


def get_num_init_threads(device: torch.device) -> int:
    """Return this rank's share of the host cores for initialization on a GPU, and 1 on a CPU.

    The host draws the values for a GPU, because a GPU's generator gives different values.
    """
    if device.type == "cpu":
        return 1
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


def _draw_unit(unit: ParameterUnit, spec: JobSpec, num_threads: int) -> Iterator[torch.Tensor]:
    """Yield the whole tensors of a unit in order."""

    def draw(parameter: Parameter) -> torch.Tensor:
        return _draw_tensor(parameter, get_full_name(unit, parameter), spec.model, spec.train.seed)

    if num_threads == 1 or sum(parameter.numel for parameter in unit.parameters) > MAX_UNIT_VALUES:
        yield from map(draw, unit.parameters)
        return
    with ThreadPoolExecutor(min(num_threads, len(unit.parameters))) as threads:
        yield from threads.map(draw, unit.parameters)


def _draw_tensor(parameter: Parameter, name: str, model: ModelSpec, seed: int) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(parameter.shape)
    if name.endswith("bias"):
        return torch.zeros(parameter.shape)
    if name == "head.weight" and model.tied_embeddings:
        name = "embedding.weight"
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    std = INIT_STD / (2 * model.num_layers) ** 0.5 if name.endswith(RESIDUAL_OUTPUTS) else INIT_STD
    return torch.empty(parameter.shape).normal_(0.0, std, generator=generator)
