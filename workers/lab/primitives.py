"""The calls themselves, each on buffers of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from planner.facts.spec import LabPrimitive
from workers.device import barrier
from workers.lab.values import RankContext, build_input

UNSET_VALUE = -1  # no value of a pattern: an element that never arrived is seen


class PrimitiveCall(NamedTuple):
    """A primitive ready to run. `held` is what this rank looks at afterwards; `give` itself for calls in place."""

    run: Callable[[], object]
    give: torch.Tensor | None
    held: torch.Tensor | None
    fresh: torch.Tensor | None

    def reset(self) -> None:
        """Buffers as before the first run."""
        if self.held is not None:
            self.held.fill_(UNSET_VALUE)
        if self.give is not None and self.fresh is not None:
            self.give.copy_(self.fresh)


def build_call(primitive: LabPrimitive, group: dist.ProcessGroup, setting: RankContext, full: int) -> PrimitiveCall:
    """A call over `group`, whose full (gathered) buffer has `full` elements."""
    fresh = build_input(primitive, setting, full)
    give = None if fresh is None else fresh.clone()
    run, held = _MAKERS[primitive](group, setting, give, full)
    call = PrimitiveCall(run, give, held, fresh)
    call.reset()
    return call


Made = tuple[Callable[[], object], torch.Tensor | None]
Maker = Callable[[dist.ProcessGroup, RankContext, "torch.Tensor | None", int], Made]


def _empty(setting: RankContext, count: int) -> torch.Tensor:
    return torch.empty(count, dtype=setting.dtype, device=setting.device)


def _op(setting: RankContext) -> dist.ReduceOp.RedOpType:
    return dist.ReduceOp.SUM if setting.reduce_op == "sum" else dist.ReduceOp.MAX


def _broadcast(group: dist.ProcessGroup, setting: RankContext, give: torch.Tensor | None, full: int) -> Made:
    assert give is not None
    return lambda: dist.broadcast(give, setting.ranks[setting.root], group=group), give


def _scatter(group: dist.ProcessGroup, setting: RankContext, give: torch.Tensor | None, full: int) -> Made:
    part = _empty(setting, full // setting.size)
    parts = None if give is None else list(give.chunk(setting.size))
    return lambda: dist.scatter(part, parts, setting.ranks[setting.root], group=group), part


def _gather(group: dist.ProcessGroup, setting: RankContext, give: torch.Tensor | None, full: int) -> Made:
    assert give is not None
    whole = _empty(setting, full) if setting.me == setting.root else None
    parts = None if whole is None else list(whole.chunk(setting.size))
    return lambda: dist.gather(give, parts, setting.ranks[setting.root], group=group), whole


def _all_gather(group: dist.ProcessGroup, setting: RankContext, give: torch.Tensor | None, full: int) -> Made:
    whole = _empty(setting, full)
    return lambda: dist.all_gather_single(whole, give, group=group), whole


def _reduce(group: dist.ProcessGroup, setting: RankContext, give: torch.Tensor | None, full: int) -> Made:
    assert give is not None
    return lambda: dist.reduce(give, setting.ranks[setting.root], op=_op(setting), group=group), give


def _all_reduce(group: dist.ProcessGroup, setting: RankContext, give: torch.Tensor | None, full: int) -> Made:
    return lambda: dist.all_reduce(give, op=_op(setting), group=group), give


def _reduce_scatter(group: dist.ProcessGroup, setting: RankContext, give: torch.Tensor | None, full: int) -> Made:
    part = _empty(setting, full // setting.size)
    return lambda: dist.reduce_scatter_single(part, give, op=_op(setting), group=group), part


def _all_to_all(group: dist.ProcessGroup, setting: RankContext, give: torch.Tensor | None, full: int) -> Made:
    taken = _empty(setting, full)
    return lambda: dist.all_to_all_single(taken, give, group=group), taken


def _ring(setting: RankContext) -> tuple[int, int]:
    """The job's ranks after and before this one in the group."""
    return setting.ranks[(setting.me + 1) % setting.size], setting.ranks[setting.me - 1]


def _send_recv(group: dist.ProcessGroup, setting: RankContext, give: torch.Tensor | None, full: int) -> Made:
    assert give is not None
    taken, (after, before) = _empty(setting, full), _ring(setting)

    def run() -> None:
        # Both block: were all to send first, nobody would receive.
        if setting.me % 2 == 0:
            dist.send(give, after, group=group)
            dist.recv(taken, before, group=group)
        else:
            dist.recv(taken, before, group=group)
            dist.send(give, after, group=group)

    return run, taken


def _isend_irecv(group: dist.ProcessGroup, setting: RankContext, give: torch.Tensor | None, full: int) -> Made:
    assert give is not None
    taken, (after, before) = _empty(setting, full), _ring(setting)

    def run() -> None:
        # One batch: NCCL starts both together, where two calls on one stream could wait for each other.
        operations = [dist.P2POp(dist.isend, give, after, group), dist.P2POp(dist.irecv, taken, before, group)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return run, taken


def _barrier(group: dist.ProcessGroup, setting: RankContext, give: torch.Tensor | None, full: int) -> Made:
    return lambda: barrier(setting.device, group), None


_MAKERS: dict[LabPrimitive, Maker] = {
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
