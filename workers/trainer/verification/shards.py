"""64 bits of a tensor's every bit.

Which part of which whole tensor a rank holds, by a name and a number that all ranks agree on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch

from planner.facts.layout import Coordinates
from planner.facts.placements import TensorBox, get_local_box
from planner.facts.spec import JobSpec, ModelSpec
from planner.facts.stages import get_stage_chunks, get_stage_units
from workers.trainer.model.decoder import full_name
from workers.trainer.parallel.parallelize import Held, Part, local

BLOCK = 2**18  # elements at once: their words take 2 MiB as int64
FACTOR = 6364136223846793005  # odd, so that what differs before it differs after it (Knuth's MMIX)
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """(), int64: words times odd weights, modulo 2**64.

    A change of any one element always shows, of several but for one in 2**64. NaNs are bits like others.
    """
    words = tensor.detach().contiguous().flatten().view(WORDS[tensor.element_size()])
    weights = _weights(words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for block in words.split(BLOCK):
        total = total * FACTOR + (block.long() * weights[: len(block)]).sum()
    return total


@cache
def _weights(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randint(-(2**62), 2**62, (BLOCK,), generator=generator) | 1).to(device)


class Piece(NamedTuple):
    """A rank's part of a tensor. Both tables that are tied have the embedding's name."""

    name: str
    box: TensorBox
    held: Held

    @property
    def number(self) -> int:
        """The same on every rank that holds this part."""
        return part_number(self.name, self.box)

    @property
    def gradient(self) -> torch.Tensor:
        """Without padding, as are all."""
        return self.held.gradient[self.box.local_slices]

    @property
    def weight(self) -> torch.Tensor:
        """What the optimiser updates."""
        return local(self.held.master.detach())[self.box.local_slices]

    @property
    def computed_with(self) -> torch.Tensor | None:
        """What the model computes with, where that follows the weight and is not the weight itself."""
        held = self.held
        return None if held.tensor is held.master else local(held.tensor.detach())[self.box.local_slices]


def pieces_of(spec: JobSpec, place: Coordinates, part: Part) -> list[Piece]:
    """All that a rank holds; shards of no element are left out."""
    found = [Piece(whole_name(h.name, spec.model), get_local_box(spec, place, h.spec), h) for h in part.tensors]
    return [piece for piece in found if piece.box.numel]


def names_by_number(spec: JobSpec, place: Coordinates) -> Iterator[tuple[int, str]]:
    """What a rank at `place` holds, as any rank can tell."""
    for unit in get_stage_units(spec.model, get_stage_chunks(spec.model, spec.layout, place.pp)):
        for parameter in unit.parameters:
            name = whole_name(full_name(unit, parameter), spec.model)
            yield part_number(name, get_local_box(spec, place, parameter)), name


def part_number(name: str, box: TensorBox) -> int:
    digest = hashlib.sha256(f"{name}/{box.offsets}/{box.sizes}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def whole_name(name: str, model: ModelSpec) -> str:
    return "embedding.weight" if name == "head.weight" and model.tied_embeddings else name
