"""Which tensors of a chunk the planner's units describe, and the values they start from."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from planner.facts.layout import Coordinates
from planner.facts.models.shapes import Parameter, Unit
from planner.facts.spec import JobSpec, ModelSpec
from planner.facts.tensors.boxes import divided_box
from workers.trainer.model.decoder import Decoder

INIT_STD = 0.02
ENDS_BRANCH = ("attention.out.weight", "mlp.down.weight", "moe.experts.down.weight", "moe.shared.down.weight")
MOST_AT_ONCE = 2**30  # values of a unit, 4 GiB of the host's memory on each rank: of a larger one a tensor at a time


def unit_modules(decoder: Decoder, unit: Unit) -> list[nn.Module]:
    """The modules whose parameters `unit` lists: one layer, or what lies outside the layers."""
    if unit.name != "root":
        return [decoder.layers[unit.name.removeprefix("layers.")]]
    return [m for name, m in decoder.named_children() if name != "layers"]


def full_name(unit: Unit, parameter: Parameter) -> str:
    """The parameter's name in the whole model."""
    return parameter.name if unit.name == "root" else f"{unit.name}.{parameter.name}"


def unit_parameter(decoder: Decoder, unit: Unit, parameter: Parameter) -> nn.Parameter:
    """The tensor of this decoder that `parameter` of `unit` describes."""
    return decoder.get_parameter(full_name(unit, parameter))


@torch.no_grad()
def initialise(decoder: Decoder, unit: Unit, spec: JobSpec, place: Coordinates, draws: int = 1) -> None:
    """Fill a unit's parameters with their part of the whole tensors, drawn from (seed, name) alone.

    So all layouts start from the same model with nothing sent, however many are drawn at once; padding is zero. `unit`
    has whole shapes. Weights: normal, std 0.02, products that end a residual branch divided by sqrt(2 layers) (GPT-2
    section 2.3).
    """
    for parameter, whole in zip(unit.parameters, _drawn(unit, spec, draws), strict=True):
        box = divided_box(spec, place, parameter)
        unit_parameter(decoder, unit, parameter).zero_()[box.filled] = whole[box.slices]


def draws_at_once(device: torch.device) -> int:
    """As many as this rank's share of the host's cores, while a GPU has none of them to compute with.

    The host draws for a GPU too, whose generator and logarithm give other values.
    """
    if device.type == "cpu":
        return 1
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


def _drawn(unit: Unit, spec: JobSpec, draws: int) -> Iterator[torch.Tensor]:
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
