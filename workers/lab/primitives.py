"""Calls of each primitive, with inputs and expected outputs that are computed without communication."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from planner.facts.collectives import LARGEST_EXACT
from planner.facts.spec import LabDtype, LabPrimitive
from workers.device import barrier

Fill = Callable[[int, torch.Tensor], torch.Tensor]  # global rank, element indices -> integers
MAX_MODULUS = 65521
# elements computed at once, because int64 indices of a whole buffer need several times its memory
BLOCK_ELEMENTS = 2**20
RANK_STRIDE, INDEX_STRIDE = 7919, 104_729  # primes, so that neither vanishes modulo a smaller prime
UNSET_VALUE = -1  # not a value of any pattern, so a missing element is detected


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


class PrimitiveCall(NamedTuple):
    """A primitive that is ready to run. For in-place primitives, `output` is `source`."""

    run: Callable[[], object]
    source: torch.Tensor | None
    output: torch.Tensor | None
    original: torch.Tensor | None

    def reset(self) -> None:
        """Restore the buffers as before the first run."""
        if self.output is not None:
            self.output.fill_(UNSET_VALUE)
        if self.source is not None and self.original is not None:
            self.source.copy_(self.original)


def build_call(primitive: LabPrimitive, group: dist.ProcessGroup, context: RankContext, full: int) -> PrimitiveCall:
    """Build a call over `group` whose full (gathered) buffer has `full` elements."""
    original = build_input(primitive, context, full)
    source = None if original is None else original.clone()
    run, output = _build_run(primitive, group, context, source, full)
    call = PrimitiveCall(run, source, output, original)
    call.reset()
    return call


def _build_run(
    primitive: LabPrimitive, group: dist.ProcessGroup, context: RankContext, source: Any, full: int
) -> tuple[Callable[[], object], torch.Tensor | None]:
    """Return a function that runs the primitive, and its output. `source` is None on ranks without input."""
    size, root = context.size, context.ranks[context.root]
    op = dist.ReduceOp.SUM if context.reduce_op == "sum" else dist.ReduceOp.MAX
    match primitive:
        case "broadcast":
            return lambda: dist.broadcast(source, root, group=group), source
        case "scatter":
            shard = _empty(context, full // size)
            shards = None if source is None else list(source.chunk(size))
            return lambda: dist.scatter(shard, shards, root, group=group), shard
        case "gather":
            gathered = _empty(context, full) if context.group_rank == context.root else None
            parts = None if gathered is None else list(gathered.chunk(size))
            return lambda: dist.gather(source, parts, root, group=group), gathered
        case "all_gather":
            whole = _empty(context, full)
            return lambda: dist.all_gather_single(whole, source, group=group), whole
        case "reduce":
            return lambda: dist.reduce(source, root, op=op, group=group), source
        case "all_reduce":
            return lambda: dist.all_reduce(source, op=op, group=group), source
        case "reduce_scatter":
            shard = _empty(context, full // size)
            return lambda: dist.reduce_scatter_single(shard, source, op=op, group=group), shard
        case "all_to_all":
            received = _empty(context, full)
            return lambda: dist.all_to_all_single(received, source, group=group), received
        case "send_recv" | "isend_irecv":
            received = _empty(context, full)
            exchange = _send_recv if primitive == "send_recv" else _batch_send_recv
            return partial(exchange, group, context, source, received), received
        case "barrier":
            return lambda: barrier(context.device, group), None


def _get_ring_neighbors(context: RankContext) -> tuple[int, int]:
    """Return the global ranks after and before this rank in the group."""
    return context.ranks[(context.group_rank + 1) % context.size], context.ranks[context.group_rank - 1]


def _send_recv(group: dist.ProcessGroup, context: RankContext, source: torch.Tensor, received: torch.Tensor) -> None:
    after, before = _get_ring_neighbors(context)
    # Both calls block, so half of the ranks receive first.
    if context.group_rank % 2 == 0:
        dist.send(source, after, group=group)
        dist.recv(received, before, group=group)
    else:
        dist.recv(received, before, group=group)
        dist.send(source, after, group=group)


def _batch_send_recv(
    group: dist.ProcessGroup, context: RankContext, source: torch.Tensor, received: torch.Tensor
) -> None:
    after, before = _get_ring_neighbors(context)
    # One batch, because NCCL could deadlock with two calls on one stream.
    operations = [dist.P2POp(dist.isend, source, after, group), dist.P2POp(dist.irecv, received, before, group)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
