"""Data parallelism: gradients summed over the ranks that hold the same parameters, and what ZeRO gathers.

ZeRO 1910.02054 section 7; HSDP 2304.11277 section 3.2.2. Ranks of cp hold the same parameters too, so the group is
dp x cp.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from planner.cost.resolved_plan import ResolvedPlan
from planner.cost.traffic.tally import Tally
from planner.facts.layout import Coordinates, RankGroup, get_shard_group
from planner.facts.model_shapes import Parameter, ParameterUnit
from planner.facts.placements import compute_gathered_numel, compute_shard_numel, get_shard_indices
from planner.facts.stages import BUCKET_BYTES, is_expert_unit, split_units


def data_step(tally: Tally, plan: ResolvedPlan, pp: int) -> None:
    """Gradients over dp. ZeRO-1 and 2 gather once a step, 3 twice a micro-batch, or each time that a rank turns to a
    chunk where it keeps what is gathered; 1 reduces once, 2 and 3 each time.

    HSDP then sums the shards over its replicas, once a step.
    """
    layout, m, mix = plan.layout, plan.train.micro_batches, plan.mix
    if layout.replica_ranks == 1:
        return
    if layout.zero == 0:
        _plain(tally, plan, plan.partition.get_units(pp))
        return
    data_gather(tally, plan, pp, 2 * m if layout.zero == 3 and not layout.keep_gathered else 1)
    if layout.keep_gathered:
        _gather_again(tally, plan, pp)
    reduces = 1 if layout.zero == 1 else m
    replicas = RankGroup(layout.dp_replicas, layout.tp * layout.shard_ranks)
    for group, numel, units in _sharded(plan, plan.partition.get_units(pp)):
        tally.add_all("reduce_scatter", "dp", group, reduces * units, reduces * numel * mix.gradient_bytes)
        tally.add_all("all_reduce", "dp", replicas, units, numel // group.size * mix.gradient_bytes)


def data_gather(tally: Tally, plan: ResolvedPlan, pp: int, times: int) -> None:
    """All-gathers of every unit in the compute type, `times` over."""
    _gather(tally, plan, plan.partition.get_units(pp), times)


def _gather_again(tally: Tally, plan: ResolvedPlan, pp: int) -> None:
    """Chunks that a rank leaves after their forwards and comes back to: all but the last, whose backwards follow."""
    layout, stage = plan.layout, plan.partition.stages[pp].stage
    left = stage._replace(chunks=stage.chunks[:-1], last=False)
    _gather(tally, plan, split_units(plan.model, left, layout.tp, layout.ep), 1)


def _gather(tally: Tally, plan: ResolvedPlan, units: tuple[ParameterUnit, ...], times: int) -> None:
    compute = plan.mix.compute_bytes
    for group, numel, number in _sharded(plan, units):
        tally.add_all("all_gather", "dp", group, times * number, times * numel * compute)


def padded_share(plan: ResolvedPlan, pp: int) -> float:
    """What ZeRO sends more than the parameters need, over what they need: a short shard travels as a full one."""
    if not plan.layout.zero:
        return 0.0
    units = plan.partition.get_units(pp)
    gathered = sum(numel for _, numel, _ in _sharded(plan, units))
    return gathered / sum(p.numel for unit in units for p in unit.parameters) - 1


def _sharded(plan: ResolvedPlan, units: tuple[ParameterUnit, ...]) -> list[tuple[RankGroup, int, int]]:
    """(shard group, elements of all gathered buffers, units): the experts divided by ep apart from the rest."""
    found = []
    for experts in (False, True) if plan.layout.ep > 1 else (False,):
        group = get_shard_group(plan.layout, experts=experts)
        found.append((group, *_gathered(units, group.size, experts)))
    return found


@cache
def _gathered(units: tuple[ParameterUnit, ...], degree: int, experts: bool) -> tuple[int, int]:
    """(elements of the units' all-gather or reduce-scatter buffers, number of units).

    A shard that is short travels padded.
    """
    chosen = [u for u in units if is_expert_unit(u) == experts]
    return sum(_gathered_numel(u.parameters, degree) for u in chosen), len(chosen)


@cache
def _gathered_numel(parameters: tuple[Parameter, ...], degree: int) -> int:
    return sum(compute_gathered_numel(p, degree) for p in parameters)


def _plain(tally: Tally, plan: ResolvedPlan, units: tuple[ParameterUnit, ...]) -> None:
    element = plan.mix.gradient_bytes
    for experts in (False, True):
        ep = plan.layout.ep if experts else 1
        group = RankGroup(plan.layout.replica_ranks // ep, plan.layout.tp * ep)
        count, total = _buckets(units, experts, element)
        tally.add_all("all_reduce", "dp", group, count, total)


@cache
def _buckets(units: tuple[ParameterUnit, ...], experts: bool, element_bytes: int) -> tuple[int, int]:
    """(all-reduces, their bytes) of plain data parallelism."""
    chosen = [u for u in units if is_expert_unit(u) == experts]
    buckets = gradient_buckets([p.numel * element_bytes for p in _finished(chosen)])
    return len(buckets), sum(buckets)


def _finished(units: Sequence[ParameterUnit]) -> list[Parameter]:
    """About in the order in which backward finishes them: head, final norm, layers from the last, embedding."""
    root = [p for u in reversed(units) if u.name == "root" for p in reversed(u.parameters)]
    layers = [p for u in reversed(units) if u.name != "root" for p in reversed(u.parameters)]
    head = [p for p in root if p.name.startswith(("final_norm", "head"))]
    return [*head, *layers, *(p for p in root if p not in head)]


def gradient_buckets(sizes: list[int]) -> list[int]:
    """Bytes of each all-reduce of plain data parallelism: consecutive gradients, closed at BUCKET_BYTES."""
    buckets: list[int] = []
    filled = 0
    for size in sizes:
        filled += size
        if filled >= BUCKET_BYTES:
            buckets.append(filled)
            filled = 0
    return [*buckets, filled] if filled else buckets


def held_numel(plan: ResolvedPlan, place: Coordinates, local: Parameter) -> int:
    """Elements of one parameter's gradient that a rank holds, once dp has reduced it."""
    if plan.layout.zero == 0:
        return local.numel
    *_, index = get_shard_indices(plan.layout, place, local)
    return compute_shard_numel(local, get_shard_group(plan.layout, experts=local.is_expert).size, index)
