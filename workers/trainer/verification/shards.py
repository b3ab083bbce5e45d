"""Shards of a rank, their ids on all ranks, and their checksums."""

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
from workers.trainer.model.decoder import get_full_name
from workers.trainer.parallel.parallelize import ModelShard, ShardedParameter, get_local

BLOCK = 2**18  # elements per block, 2 MiB as int64
CHECKSUM_FACTOR = 6364136223846793005  # odd, so that the multiplication is invertible (Knuth, MMIX)
INT_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit checksum, (), int64: the sum of integers times odd weights, modulo 2**64.

    It detects a change of any single element, and other changes with probability 1 - 2**-64. NaNs are compared by bits.
    """
    integers = tensor.detach().contiguous().flatten().view(INT_DTYPES[tensor.element_size()])
    weights = _make_weights(integers.device)
    total = torch.zeros((), dtype=torch.int64, device=integers.device)
    for block in integers.split(BLOCK):
        total = total * CHECKSUM_FACTOR + (block.long() * weights[: len(block)]).sum()
    return total


@cache
def _make_weights(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randint(-(2**62), 2**62, (BLOCK,), generator=generator) | 1).to(device)


class TensorShard(NamedTuple):
    """Store a rank's shard of a tensor. Tied tensors have the name of the embedding."""

    name: str
    box: TensorBox
    parameter: ShardedParameter

    @property
    def number(self) -> int:
        """Return the id of the shard, the same on every rank with this shard."""
        return compute_shard_id(self.name, self.box)

    @property
    def gradient(self) -> torch.Tensor:
        """Return the gradient without padding."""
        return self.parameter.gradient[self.box.local_slices]

    @property
    def weight(self) -> torch.Tensor:
        """Return the tensor that the optimizer updates, without padding."""
        return get_local(self.parameter.master.detach())[self.box.local_slices]

    @property
    def computed_with(self) -> torch.Tensor | None:
        """Return the tensor that the model computes with, or None if it is the master itself."""
        parameter = self.parameter
        return (
            None
            if parameter.weight is parameter.master
            else get_local(parameter.weight.detach())[self.box.local_slices]
        )


def list_shards(spec: JobSpec, place: Coordinates, part: ModelShard) -> list[TensorShard]:
    """Return all shards of a rank that have elements."""
    found = [
        TensorShard(get_model_tensor_name(h.name, spec.model), get_local_box(spec, place, h.spec), h)
        for h in part.parameters
    ]
    return [piece for piece in found if piece.box.numel]


def iter_shard_names(spec: JobSpec, place: Coordinates) -> Iterator[tuple[int, str]]:
    """Yield (shard id, name) of the rank at `place`. Any rank can compute them."""
    for unit in get_stage_units(spec.model, get_stage_chunks(spec.model, spec.layout, place.pp)):
        for parameter in unit.parameters:
            name = get_model_tensor_name(get_full_name(unit, parameter), spec.model)
            yield compute_shard_id(name, get_local_box(spec, place, parameter)), name


def compute_shard_id(name: str, box: TensorBox) -> int:
    digest = hashlib.sha256(f"{name}/{box.offsets}/{box.sizes}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def get_model_tensor_name(name: str, model: ModelSpec) -> str:
    return "embedding.weight" if name == "head.weight" and model.tied_embeddings else name
