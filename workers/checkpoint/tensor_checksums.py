"""64 bits of each whole tensor of a state, the same in whatever layout it is held: what is loaded is what was saved."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from planner.facts.model_shapes import get_chunk_units
from planner.facts.spec import ModelSpec
from workers.checkpoint.state import MOMENTS, Boxed, State
from workers.trainer.model.decoder import full_name

BLOCK = 2**18  # elements at once
WORDS = {2: torch.int16, 4: torch.int32}
FACTORS = (6364136223846793005, 2862933555777941757)  # odd, and of one dimension unlike another's (Knuth, Steele)

Sums = dict[str, int]


def saved_names(model: ModelSpec) -> Iterator[str]:
    """Of all whole tensors of a state, in an order that all ranks share."""
    for unit in get_chunk_units(model, range(model.num_layers), first=True, last=True):
        for parameter in unit.parameters:
            yield from (f"{kept}.{full_name(unit, parameter)}" for kept in ("model", *MOMENTS))


def sums_of(state: State, model: ModelSpec, group: dist.ProcessGroup | None) -> Sums:
    """By name, of what all ranks hold together; all of them call this. What several hold counts once."""
    numbers = {name: number for number, name in enumerate(saved_names(model))}
    rows = [[numbers[name], _part(name, boxed), box_sum(boxed)] for name, boxed in state.items()]
    parts = {(number, part): found for number, part, found in _everybodys(rows, group)}
    sums = [0] * len(numbers)
    for (number, _), found in parts.items():
        sums[number] += found
    return {name: _wrapped(total) for name, total in zip(numbers, sums, strict=True)}


def box_sum(boxed: Boxed) -> int:
    """Each element's bits times an odd weight for each of its places in the whole tensor, modulo 2**64."""
    words = boxed.tensor.detach().contiguous().view(WORDS[boxed.tensor.element_size()])
    ways = [_weights(d, *span) for d, span in enumerate(zip(boxed.box.offsets, boxed.box.sizes, strict=True))]
    rows = max(1, BLOCK // max(1, words[0].numel()))
    total = 0
    for block, first in zip(torch.split(words, rows), torch.split(ways[0], rows), strict=True):
        found = block.to("cpu", torch.int64)
        for weights in reversed(ways[1:]):
            found = (found * weights).sum(-1)
        total += int((found * first).sum())
    return _wrapped(total)


def _weights(dim: int, offset: int, size: int) -> torch.Tensor:
    places = (torch.arange(offset, offset + size) * len(FACTORS) + dim) * FACTORS[dim % len(FACTORS)] + dim
    return ((places ^ (places >> 29)) * FACTORS[0]) | 1


def _part(name: str, boxed: Boxed) -> int:
    """The same on all ranks that hold it, and on no other."""
    digest = hashlib.sha256(f"{name}/{boxed.box.offsets}/{boxed.box.sizes}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def _everybodys(rows: list[list[int]], group: dist.ProcessGroup | None) -> list[list[int]]:
    if group is None:
        return rows
    count = torch.tensor([len(rows)])
    dist.all_reduce(count, dist.ReduceOp.MAX, group=group)
    own = torch.full((int(count), 3), -1, dtype=torch.int64)
    own[: len(rows)] = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
    tables = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(tables, own, group=group)
    told: list[list[int]] = torch.cat(tables).tolist()
    return [row for row in told if row[0] >= 0]


def _wrapped(total: int) -> int:
    """As 64 bits with a sign."""
    return (total + 2**63) % 2**64 - 2**63
