"""Checksums of whole tensors, independent of the layout that holds them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from planner.facts.model_shapes import get_chunk_units
from planner.facts.spec import ModelSpec
from workers.checkpoint.state import MOMENTS, BoxedState, BoxedTensor
from workers.trainer.model.decoder import get_full_name

BLOCK = 2**18  # elements per block
INT_DTYPES = {2: torch.int16, 4: torch.int32}
CHECKSUM_FACTORS = (
    6364136223846793005,
    2862933555777941757,
)  # odd, and different per dimension (Knuth, Steele)

Sums = dict[str, int]


def iter_saved_names(model: ModelSpec) -> Iterator[str]:
    """Yield the names of all whole tensors of a state, in the same order on all ranks."""
    for unit in get_chunk_units(model, range(model.num_layers), first=True, last=True):
        for parameter in unit.parameters:
            yield from (f"{kind}.{get_full_name(unit, parameter)}" for kind in ("model", *MOMENTS))


def compute_tensor_checksums(state: BoxedState, model: ModelSpec, group: dist.ProcessGroup | None) -> Sums:
    """Return the checksum of each tensor over all ranks. All ranks call this, and replicas count once."""
    numbers = {name: number for number, name in enumerate(iter_saved_names(model))}
    rows = [
        [numbers[name], _compute_shard_id(name, boxed), compute_box_checksum(boxed)] for name, boxed in state.items()
    ]
    parts = {(number, part): found for number, part, found in _gather_rows(rows, group)}
    sums = [0] * len(numbers)
    for (number, _), found in parts.items():
        sums[number] += found
    return {name: _wrap_int64(total) for name, total in zip(numbers, sums, strict=True)}


def compute_box_checksum(boxed: BoxedTensor) -> int:
    """Return the sum of element bits times odd weights per position, modulo 2**64."""
    integers = boxed.tensor.detach().contiguous().view(INT_DTYPES[boxed.tensor.element_size()])
    weights_by_dim = [
        _make_weights(d, *span) for d, span in enumerate(zip(boxed.box.offsets, boxed.box.sizes, strict=True))
    ]
    rows = max(1, BLOCK // max(1, integers[0].numel()))
    total = 0
    for block, first in zip(torch.split(integers, rows), torch.split(weights_by_dim[0], rows), strict=True):
        found = block.to("cpu", torch.int64)
        for weights in reversed(weights_by_dim[1:]):
            found = (found * weights).sum(-1)
        total += int((found * first).sum())
    return _wrap_int64(total)


def _make_weights(dim: int, offset: int, size: int) -> torch.Tensor:
    factors = (torch.arange(offset, offset + size) * len(CHECKSUM_FACTORS) + dim) * CHECKSUM_FACTORS[
        dim % len(CHECKSUM_FACTORS)
    ] + dim
    return ((factors ^ (factors >> 29)) * CHECKSUM_FACTORS[0]) | 1


def _compute_shard_id(name: str, boxed: BoxedTensor) -> int:
    """Return an id that only replicas of this shard share."""
    digest = hashlib.sha256(f"{name}/{boxed.box.offsets}/{boxed.box.sizes}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def _gather_rows(rows: list[list[int]], group: dist.ProcessGroup | None) -> list[list[int]]:
    if group is None:
        return rows
    count = torch.tensor([len(rows)])
    dist.all_reduce(count, dist.ReduceOp.MAX, group=group)
    own = torch.full((int(count), 3), -1, dtype=torch.int64)
    own[: len(rows)] = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
    tables = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(tables, own, group=group)
    all_rows: list[list[int]] = torch.cat(tables).tolist()
    return [row for row in all_rows if row[0] >= 0]


def _wrap_int64(total: int) -> int:
    """Return a number as signed 64-bit integer."""
    return (total + 2**63) % 2**64 - 2**63
