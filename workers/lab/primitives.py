"""Calls of each primitive on prepared buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from planner.facts.spec import LabPrimitive
from workers.device import barrier
from workers.lab.values import RankContext, build_input

UNSET_VALUE = -1  # not a value of any pattern, so a missing element is detected


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
    run, output = _BUILDERS[primitive](group, context, source, full)
    call = PrimitiveCall(run, source, output, original)
    call.reset()
    return call


OptionalTensor = torch.Tensor | None
RunAndOutput = tuple[Callable[[], object], OptionalTensor]
CallBuilder = Callable[[dist.ProcessGroup, RankContext, OptionalTensor, int], RunAndOutput]


def _empty(context: RankContext, count: int) -> torch.Tensor:
    return torch.empty(count, dtype=context.dtype, device=context.device)


def _get_reduce_op(context: RankContext) -> dist.ReduceOp.RedOpType:
    return dist.ReduceOp.SUM if context.reduce_op == "sum" else dist.ReduceOp.MAX


def _broadcast(group: dist.ProcessGroup, context: RankContext, source: OptionalTensor, full: int) -> RunAndOutput:
    assert source is not None
    return lambda: dist.broadcast(source, context.ranks[context.root], group=group), source


def _scatter(group: dist.ProcessGroup, context: RankContext, source: OptionalTensor, full: int) -> RunAndOutput:
    shard = _empty(context, full // context.size)
    shards = None if source is None else list(source.chunk(context.size))
    return lambda: dist.scatter(shard, shards, context.ranks[context.root], group=group), shard


def _gather(group: dist.ProcessGroup, context: RankContext, source: OptionalTensor, full: int) -> RunAndOutput:
    assert source is not None
    gathered = _empty(context, full) if context.group_rank == context.root else None
    shards = None if gathered is None else list(gathered.chunk(context.size))
    return lambda: dist.gather(source, shards, context.ranks[context.root], group=group), gathered


def _all_gather(group: dist.ProcessGroup, context: RankContext, source: OptionalTensor, full: int) -> RunAndOutput:
    gathered = _empty(context, full)
    return lambda: dist.all_gather_single(gathered, source, group=group), gathered


def _reduce(group: dist.ProcessGroup, context: RankContext, source: OptionalTensor, full: int) -> RunAndOutput:
    assert source is not None
    return lambda: dist.reduce(source, context.ranks[context.root], op=_get_reduce_op(context), group=group), source


def _all_reduce(group: dist.ProcessGroup, context: RankContext, source: OptionalTensor, full: int) -> RunAndOutput:
    return lambda: dist.all_reduce(source, op=_get_reduce_op(context), group=group), source


def _reduce_scatter(group: dist.ProcessGroup, context: RankContext, source: OptionalTensor, full: int) -> RunAndOutput:
    shard = _empty(context, full // context.size)
    return lambda: dist.reduce_scatter_single(shard, source, op=_get_reduce_op(context), group=group), shard


def _all_to_all(group: dist.ProcessGroup, context: RankContext, source: OptionalTensor, full: int) -> RunAndOutput:
    received = _empty(context, full)
    return lambda: dist.all_to_all_single(received, source, group=group), received


def _get_ring_neighbors(context: RankContext) -> tuple[int, int]:
    """Return the global ranks after and before this rank in the group."""
    return context.ranks[(context.group_rank + 1) % context.size], context.ranks[context.group_rank - 1]


def _send_recv(group: dist.ProcessGroup, context: RankContext, source: OptionalTensor, full: int) -> RunAndOutput:
    assert source is not None
    received, (after, before) = _empty(context, full), _get_ring_neighbors(context)

    def run() -> None:
        # Both calls block, so half of the ranks receive first.
        if context.group_rank % 2 == 0:
            dist.send(source, after, group=group)
            dist.recv(received, before, group=group)
        else:
            dist.recv(received, before, group=group)
            dist.send(source, after, group=group)

    return run, received


def _isend_irecv(group: dist.ProcessGroup, context: RankContext, source: OptionalTensor, full: int) -> RunAndOutput:
    assert source is not None
    received, (after, before) = _empty(context, full), _get_ring_neighbors(context)

    def run() -> None:
        # One batch, because NCCL could deadlock with two calls on one stream.
        operations = [dist.P2POp(dist.isend, source, after, group), dist.P2POp(dist.irecv, received, before, group)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return run, received


def _barrier(group: dist.ProcessGroup, context: RankContext, source: OptionalTensor, full: int) -> RunAndOutput:
    return lambda: barrier(context.device, group), None


_BUILDERS: dict[LabPrimitive, CallBuilder] = {
    "broadcast": _broadcast,
    "scatter": _scatter,
    "gather": _gather,
    "all_gather": _all_gather,
    "reduce": _reduce,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send_recv": _send_recv,
    "isend_irecv": _isend_irecv,
    "barrier": _barrier,
}
