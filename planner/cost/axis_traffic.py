"""Sums of the collectives of a step.

Tensor and sequence parallelism: sums around each half of a layer (Megatron 2104.04473 section 3.2).

Context parallelism: each rank's queries need every key and value before them.

Ring attention (2310.01889) passes keys and values on cp - 1 times; the all-gather variant (2407.21783 section 3.3.2)
collects them at once. Backward moves them again, and their gradients home: three times the forward's bytes in all.

Pipeline parallelism: hidden states over stage boundaries, gradients back (2104.04473 section 3.2).

Expert parallelism: tokens to their experts and back (GShard 2006.16668 section 3.2).

Data parallelism: gradients summed over the ranks that hold the same parameters, and what ZeRO gathers.

ZeRO 1910.02054 section 7; HSDP 2304.11277 section 3.2.2. Ranks of cp hold the same parameters too, so the group is
dp x cp.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from contracts.telemetry.vocabulary import Axis, Op
from planner.cost.resolved_plan import ResolvedPlan, resolve
from planner.facts.layout import Coordinates, RankGroup, get_chunk_indices, get_num_chunks, get_shard_group
from planner.facts.model_shapes import Parameter, ParameterUnit, count_expert_rows
from planner.facts.placements import (
    compute_gathered_numel,
    compute_shard_numel,
    count_local_kv_heads,
    get_shard_indices,
)
from planner.facts.precision import FP32_BYTES
from planner.facts.spec import JobSpec
from planner.facts.stages import BUCKET_BYTES, StageLayers, is_expert_unit, split_units
from planner.hardware.stacks import STACKS


class Collective(NamedTuple):
    """All calls of one op on one group.

    `payload_bytes` is the total of all `count` calls. Consecutive ranks of the group differ by `stride`.
    """

    op: Op
    axis: Axis
    group_size: int
    stride: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    payload_bytes: int


class Tally:
    """Sums calls by op, axis and group."""

    def __init__(self) -> None:
        self._sums: dict[tuple[Op, Axis, int, int], tuple[int, int]] = {}  # (calls, bytes) by (op, axis, size, stride)

    def add(self, op: Op, axis: Axis, group: RankGroup, each_bytes: int, count: int = 1) -> None:
        """Add `count` calls of `each_bytes`."""
        self.add_all(op, axis, group, count, count * each_bytes)

    def add_all(self, op: Op, axis: Axis, group: RankGroup, count: int, payload_bytes: int) -> None:
        """Add `count` calls with `payload_bytes` in total. A group of one rank sends nothing."""
        if count == 0 or group.size == 1:
            return
        key = op, axis, group.size, group.stride
        calls, num_bytes = self._sums.get(key, (0, 0))
        self._sums[key] = calls + count, num_bytes + payload_bytes

    def rows(self) -> list[Collective]:
        return [Collective(*key, *self._sums[key]) for key in sorted(self._sums)]


def tensor_forward(tally: Tally, plan: ResolvedPlan, held: StageLayers) -> None:
    """Two sums a layer (attention out, MLP down) and one for the vocabulary-parallel embedding.

    With sequence parallelism each sum is a reduce-scatter, and an all-gather stands before each column-parallel
    product: two a layer and one for the head. The loss needs three sums of (batch, seq) in fp32.
    """
    layout, m = plan.layout, plan.train.micro_batches
    if layout.tp == 1:
        return
    _sums(tally, plan, m * (2 * held.num_layers + held.stage.first), m * (2 * held.num_layers + held.stage.last))
    if held.stage.last:
        tally.add("all_reduce", "tp", plan.get_group("tp"), plan.micro_batch.tokens * FP32_BYTES, 3 * m)


def tensor_backward(tally: Tally, plan: ResolvedPlan, held: StageLayers) -> None:
    """The conjugate of the forward: an input gradient is summed before each column-parallel product.

    Full recompute repeats the layers' forward first, up to its last product: 5 sums a layer instead of 4; 6 by stacks
    that repeat it to its end, with the sum that ends the layer (2104.04473 section 3.5). Inputs kept divided are
    gathered again (2205.05198 section 4.2.2), but for layers that are computed again anyway, and mixtures that do not
    need theirs.
    """
    layout, m, layers = plan.layout, plan.train.micro_batches, held.num_layers
    if layout.tp == 1:
        return
    _sums(tally, plan, m * (2 * layers + held.stage.last), m * (2 * layers + held.stage.first))
    again = layout.recompute == "full"
    if again:
        whole = STACKS[plan.resources.stack].repeats_whole
        _sums(tally, plan, m * layers * (2 if whole else 1), m * 2 * layers)
    if layout.regather:
        gathers = held.stage.last + (0 if again else 2 * layers - _mixtures_without(plan, held))
        tally.add("all_gather", "tp", plan.get_group("tp"), plan.micro_batch.hidden_bytes, m * gathers)


def _mixtures_without(plan: ResolvedPlan, held: StageLayers) -> int:
    """Layers whose experts' input backward has no use for: experts keep the rows that came to them, our router its fp32
    copy where the input is narrower, and only shared experts the input itself."""
    moe, ours = plan.model.moe, plan.resources.stack == "ours"
    wide = plan.mix.compute_bytes == FP32_BYTES
    return held.num_moe_layers if moe and ours and not (moe.shared_experts or wide) else 0


def _sums(tally: Tally, plan: ResolvedPlan, sums: int, gathers: int) -> None:
    """`sums` of the hidden states; `gathers` are their all-gathers, which only sequence parallelism needs."""
    layout, size = plan.layout, plan.micro_batch.hidden_bytes
    if not layout.sequence_parallel:
        tally.add("all_reduce", "tp", plan.get_group("tp"), size, sums)
        return
    tally.add("reduce_scatter", "tp", plan.get_group("tp"), size, sums)
    tally.add("all_gather", "tp", plan.get_group("tp"), size, gathers)


def key_value_bytes(plan: ResolvedPlan) -> int:
    """Return the bytes of keys and values of a rank's part of one micro-batch, in one layer."""
    model, tp = plan.model, plan.layout.tp
    if model.mla:
        width = model.num_heads // tp * (model.mla.nope_head_dim + model.mla.rope_head_dim + model.mla.value_head_dim)
    else:
        width = 2 * count_local_kv_heads(model.num_kv_heads, tp) * model.head_size
    return plan.micro_batch.tokens * width * plan.mix.compute_bytes


def context_forward(tally: Tally, plan: ResolvedPlan, held: StageLayers, *, times: int = 1) -> None:
    """Add the collectives that bring keys and values to every rank, in each layer."""
    cp, count = plan.layout.cp, times * plan.train.micro_batches * held.num_layers
    size, group = key_value_bytes(plan), plan.get_group("cp")
    if plan.layout.cp_method == "all_gather":
        tally.add("all_gather", "cp", group, cp * size, count)
        return
    tally.add("send", "cp", group, size, count * (cp - 1))
    tally.add("recv", "cp", group, size, count * (cp - 1))


def context_backward(tally: Tally, plan: ResolvedPlan, held: StageLayers) -> None:
    """Add the collectives of keys and values, and of their gradients back to their ranks."""
    cp, count = plan.layout.cp, plan.train.micro_batches * held.num_layers
    size, group = key_value_bytes(plan), plan.get_group("cp")
    context_forward(tally, plan, held, times=2 if plan.layout.recompute == "full" else 1)
    if plan.layout.cp_method == "all_gather":
        tally.add("reduce_scatter", "cp", group, cp * size, count)
        return
    tally.add("send", "cp", group, size, count * (cp - 1))
    tally.add("recv", "cp", group, size, count * (cp - 1))


def boundary_bytes(plan: ResolvedPlan) -> int:
    """Return the bytes of one message. With SP or scatter-gather each tp rank sends its shard."""
    layout = plan.layout
    return plan.micro_batch.hidden_bytes // (layout.tp if layout.sequence_parallel or layout.scatter_gather else 1)


def pipeline(tally: Tally, plan: ResolvedPlan, pp: int, *, backward: bool) -> None:
    """Add one message per micro-batch for each boundary between two ranks. The turn of a V needs none."""
    sends, receives = _crossings(plan, pp)
    if backward:
        sends, receives = receives, sends
    m, group = plan.train.micro_batches, plan.get_group("pp")
    tally.add("send", "pp", group, boundary_bytes(plan), m * sends)
    tally.add("recv", "pp", group, boundary_bytes(plan), m * receives)
    if plan.layout.scatter_gather:  # 2104.04473 section 4.1
        tally.add("all_gather", "tp", plan.get_group("tp"), plan.micro_batch.hidden_bytes, m * receives)


def _crossings(plan: ResolvedPlan, pp: int) -> tuple[int, int]:
    """Return the number of chunks that send their output, and that receive their input."""
    own, last = get_chunk_indices(plan.layout, pp), get_num_chunks(plan.layout) - 1
    sends = sum(c < last and c + 1 not in own for c in own)
    receives = sum(c > 0 and c - 1 not in own for c in own)
    return sends, receives


COUNT_BYTES = 8  # how many tokens go to an expert travels as int64


def row_bytes(plan: ResolvedPlan) -> int:
    """One token's hidden state as it travels to an expert."""
    return plan.model.hidden_size * plan.mix.compute_bytes


def depends_on_router(plan: JobSpec | ResolvedPlan) -> bool:
    """Whether the bytes of ep are known only when tokens have been routed: nothing is dropped to fit buffers."""
    return plan.layout.ep > 1 and plan.model.moe is not None and plan.model.moe.capacity_factor is None


def dispatched_rows(plan: ResolvedPlan) -> int:
    """Rows that one rank hands to an all-to-all, in one layer and micro-batch.

    Without a capacity each token goes once to each of its experts; what a rank gets, and hands to the way back, depends
    on the router then and equals this only when tokens spread evenly. With one, buffers are full whatever is routed.
    """
    moe = plan.model.moe
    assert moe is not None
    return count_expert_rows(moe, plan.micro_batch.tokens, plan.train.seq_len)


def forwards(plan: ResolvedPlan, *, backward: bool) -> int:
    """How often backward computes a layer's forward again."""
    return int(backward and plan.layout.recompute == "full")


def experts(tally: Tally, plan: ResolvedPlan, own: StageLayers, *, backward: bool) -> None:
    """Dispatch and combine in each layer with experts; full recompute repeats both in backward.

    Without a capacity the ranks first tell each other how many tokens come.
    """
    if plan.layout.ep == 1 or not own.num_moe_layers or plan.model.moe is None:
        return
    again = forwards(plan, backward=backward)
    layers, group = plan.train.micro_batches * own.num_moe_layers, plan.get_group("ep")
    tally.add("all_to_all", "ep", group, dispatched_rows(plan) * row_bytes(plan), layers * 2 * (1 + again))
    if plan.model.moe.capacity_factor is None:
        counted = again if backward else 1
        tally.add("all_to_all", "ep", group, plan.model.moe.num_experts * COUNT_BYTES, layers * counted)


def routed_bytes(
    spec: JobSpec | ResolvedPlan, stage: int, received_rows: int, micro_batches: int, *, backward: bool
) -> int:
    """What a rank's all-to-alls carry beyond `experts`, which spreads tokens evenly, once the router has spoken.

    `received_rows`: tokens that came to the rank's experts, in all forwards of `micro_batches` micro-batches, those
    that recompute repeated too. It hands them back, and the gradients of what came.
    """
    plan = resolve(spec)
    own = plan.partition.stages[stage]
    if plan.layout.ep == 1 or not own.num_moe_layers:
        return 0
    again = forwards(plan, backward=backward)
    even = micro_batches * own.num_moe_layers * dispatched_rows(plan)
    # Each forward hands its rows back once, each backward hands their gradients back once.
    return (received_rows * (1 + again + backward) // (1 + again) - even * (1 + again + backward)) * row_bytes(plan)


def balance(tally: Tally, plan: ResolvedPlan, own: StageLayers) -> None:
    """The load-balancing loss counts the tokens of whole sequences, whose parts cp ranks hold."""
    if plan.model.moe is None or not plan.model.moe.balance_loss:
        return
    size = plan.micro_batch_size * plan.model.moe.num_experts * FP32_BYTES
    times = plan.train.micro_batches * own.num_moe_layers * (1 + forwards(plan, backward=True))
    tally.add("all_reduce", "cp", plan.get_group("cp"), size, times)


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
