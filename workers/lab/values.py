"""Inputs and expected outputs of each primitive, computed from (rank, index) without communication."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch

from planner.facts.collectives import LARGEST_EXACT
from planner.facts.spec import LabDtype, LabPrimitive

Fill = Callable[[int, torch.Tensor], torch.Tensor]  # global rank, element indices -> integers
MAX_MODULUS = 65521
BLOCK_ELEMENTS = (
    2**20
)  # elements computed at once, because int64 indices of a whole buffer need several times its memory
RANK_STRIDE, INDEX_STRIDE = 7919, 104_729  # primes, so that neither vanishes modulo a smaller prime


class RankContext(NamedTuple):
    """Rank, group and data type of a benchmark. `group_rank` and `root` are group ranks, `ranks` global ranks."""

    ranks: tuple[int, ...]
    group_rank: int
    root: int
    device: torch.device
    dtype: torch.dtype
    reduce_op: Literal["sum", "max"]
    fill: Fill

    @property
    def size(self) -> int:
        return len(self.ranks)


def build_pattern(dtype: LabDtype, group_size: int) -> Fill:
    """Return values that differ by rank and index, and whose sum over all ranks is exact in `dtype`."""
    modulus = _find_prime(min(MAX_MODULUS, LARGEST_EXACT[dtype] // group_size + 1))

    def fill(rank: int, index: torch.Tensor) -> torch.Tensor:
        return (rank * RANK_STRIDE + index * INDEX_STRIDE) % modulus

    return fill


def fill_readable(rank: int, index: torch.Tensor) -> torch.Tensor:
    """Return readable values: hundreds are the rank from 1, the rest is the index.

    A sum over ranks never equals the value of one rank.
    """
    return 100 * (rank + 1) + index


def build_input(primitive: LabPrimitive, context: RankContext, full: int) -> torch.Tensor | None:
    """Return the input of this rank, or None if it has no input.

    Args:
        full: Elements of the full (gathered) buffer.
    """
    if primitive == "barrier" or (primitive == "scatter" and context.group_rank != context.root):
        return None
    count = full // context.size if primitive in ("gather", "all_gather") else full
    return _build_values(context, context.group_rank, 0, count)


def build_expected(primitive: LabPrimitive, context: RankContext, full: int) -> torch.Tensor | None:
    """Return the expected output of this rank, or None if it is undefined."""
    group_rank, root, shard = context.group_rank, context.root, full // context.size
    if primitive == "barrier" or (primitive in ("gather", "reduce") and group_rank != root):
        return None
    if primitive == "broadcast":
        return _build_values(context, root, 0, full)
    if primitive == "scatter":
        return _build_values(context, root, group_rank * shard, shard)
    if primitive in ("gather", "all_gather", "all_to_all"):
        return _build_gathered(context, group_rank * shard if primitive == "all_to_all" else 0, shard)
    if primitive in ("send_recv", "isend_irecv"):
        return _build_values(context, (group_rank - 1) % context.size, 0, full)
    first, count = (group_rank * shard, shard) if primitive == "reduce_scatter" else (0, full)
    return _build_reduced(context, first, count)


def count_mismatches(output: torch.Tensor | None, expected: torch.Tensor | None) -> int:
    """Return the number of wrong elements, or 0 if the output is undefined. NaN is always wrong."""
    if expected is None:
        return 0
    if output is None or output.shape != expected.shape:
        return expected.numel()
    starts = range(0, expected.numel(), BLOCK_ELEMENTS)
    return int(sum((output[at : at + BLOCK_ELEMENTS] != expected[at : at + BLOCK_ELEMENTS]).sum() for at in starts))


def _build_values(context: RankContext, rank: int, first: int, count: int) -> torch.Tensor:
    return _fill_blocks(_empty(context, count), partial(_compute_block, context, rank, first))


def _build_gathered(context: RankContext, first: int, shard_elements: int) -> torch.Tensor:
    gathered = _empty(context, context.size * shard_elements)
    for rank, shard in enumerate(gathered.chunk(context.size)):
        _fill_blocks(shard, partial(_compute_block, context, rank, first))
    return gathered


def _build_reduced(context: RankContext, first: int, count: int) -> torch.Tensor:
    return _fill_blocks(_empty(context, count), lambda offset, count: _reduce_values(context, first + offset, count))


def _reduce_values(context: RankContext, first: int, count: int) -> torch.Tensor:
    total = _compute_values(context, 0, first, count)
    for rank in range(1, context.size):
        values = _compute_values(context, rank, first, count)
        total = total + values if context.reduce_op == "sum" else torch.maximum(total, values)
    return total


def _compute_block(context: RankContext, rank: int, first: int, offset: int, count: int) -> torch.Tensor:
    return _compute_values(context, rank, first + offset, count)


def _compute_values(context: RankContext, rank: int, first: int, count: int) -> torch.Tensor:
    return context.fill(context.ranks[rank], torch.arange(first, first + count, device=context.device))


def _empty(context: RankContext, count: int) -> torch.Tensor:
    return torch.empty(count, dtype=context.dtype, device=context.device)


def _fill_blocks(buffer: torch.Tensor, compute: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
    """Fill a buffer block by block with `compute(first index, count)`."""
    for first in range(0, buffer.numel(), BLOCK_ELEMENTS):
        count = min(BLOCK_ELEMENTS, buffer.numel() - first)
        buffer[first : first + count] = compute(first, count)
    return buffer


def _find_prime(limit: int) -> int:
    return next(n for n in range(limit, 1, -1) if all(n % d for d in range(2, int(n**0.5) + 1)))
