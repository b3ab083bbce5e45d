"""The collectives of each parallel axis: tensor, pipeline, context, expert, and data.

Each function adds to a tally. Sources: Megatron 2104.04473 section 3.2 (tensor, pipeline), ring attention 2310.01889
and Llama 3 2407.21783 section 3.3.2 (context), GShard 2006.16668 section 3.2 (expert), ZeRO 1910.02054 section 7 and
HSDP 2304.11277 section 3.2.2 (data).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from contracts.telemetry.items import Axis, Op
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

COUNT_BYTES = 8  # tokens per expert, as int64


class GroupTraffic(NamedTuple):
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

    def get_rows(self) -> list[GroupTraffic]:
        return [GroupTraffic(*key, *self._sums[key]) for key in sorted(self._sums)]


def add_tensor_forward(tally: Tally, plan: ResolvedPlan, own: StageLayers) -> None:
    """Add two sums per layer (attention output, MLP down), and one for the vocabulary-parallel embedding.

    With sequence parallelism each sum is a reduce-scatter, and an all-gather precedes each column-parallel matmul: two
    per layer and one for the head. The loss needs three sums of (batch, seq) in fp32.
    """
    layout, m = plan.layout, plan.train.micro_batches
    if layout.tp == 1:
        return
    _add_sums(tally, plan, m * (2 * own.num_layers + own.stage.first), m * (2 * own.num_layers + own.stage.last))
    if own.stage.last:
        tally.add("all_reduce", "tp", plan.get_group("tp"), plan.micro_batch.tokens * FP32_BYTES, 3 * m)


def add_tensor_backward(tally: Tally, plan: ResolvedPlan, own: StageLayers) -> None:
    """Add a sum of the input gradient for each column-parallel matmul, the conjugate of the forward.

    Full recompute repeats the forward of layers up to its last matmul: 5 sums per layer instead of 4. Stacks that
    repeat it to its end have 6 (2104.04473 section 3.5). Sharded inputs are gathered again (2205.05198 section 4.2.2),
    except in layers that are recomputed anyway, and in mixtures of experts that do not need them.
    """
    layout, m, layers = plan.layout, plan.train.micro_batches, own.num_layers
    if layout.tp == 1:
        return
    _add_sums(tally, plan, m * (2 * layers + own.stage.last), m * (2 * layers + own.stage.first))
    recomputes = layout.recompute == "full"
    if recomputes:
        whole = STACKS[plan.resources.stack].recomputes_at_once
        _add_sums(tally, plan, m * layers * (2 if whole else 1), m * 2 * layers)
    if layout.regather:
        gathers = own.stage.last + (0 if recomputes else 2 * layers - _count_unused_inputs(plan, own))
        tally.add("all_gather", "tp", plan.get_group("tp"), plan.micro_batch.hidden_bytes, m * gathers)


def _count_unused_inputs(plan: ResolvedPlan, own: StageLayers) -> int:
    """Return the layers of experts whose backward does not need their input.

    Experts save the rows that they receive, and Meshboard's router saves its fp32 copy of a narrower input. Only shared
    experts need the input itself.
    """
    moe, is_fp32 = plan.model.moe, plan.mix.compute_bytes == FP32_BYTES
    unused = moe and plan.resources.stack == "ours" and not (moe.shared_experts or is_fp32)
    return own.num_moe_layers if unused else 0


def _add_sums(tally: Tally, plan: ResolvedPlan, sums: int, gathers: int) -> None:
    """Add sums of the hidden states, and the `gathers` that only sequence parallelism needs."""
    size, group = plan.micro_batch.hidden_bytes, plan.get_group("tp")
    if not plan.layout.sequence_parallel:
        tally.add("all_reduce", "tp", group, size, sums)
        return
    tally.add("reduce_scatter", "tp", group, size, sums)
    tally.add("all_gather", "tp", group, size, gathers)


def compute_kv_bytes(plan: ResolvedPlan) -> int:
    """Return the bytes of keys and values of a rank's part of one micro-batch, in one layer."""
    model, tp = plan.model, plan.layout.tp
    if model.mla:
        width = model.num_heads // tp * (model.mla.nope_head_dim + model.mla.rope_head_dim + model.mla.value_head_dim)
    else:
        width = 2 * count_local_kv_heads(model.num_kv_heads, tp) * model.head_size
    return plan.micro_batch.tokens * width * plan.mix.compute_bytes


def add_context_forward(tally: Tally, plan: ResolvedPlan, own: StageLayers, *, times: int = 1) -> None:
    """Add the collectives that bring keys and values to every rank, in each layer.

    Ring attention passes them on cp - 1 times. The all-gather variant collects them at once.
    """
    if plan.layout.cp_method == "all_gather":
        size = plan.layout.cp * compute_kv_bytes(plan)
        tally.add("all_gather", "cp", plan.get_group("cp"), size, times * plan.train.micro_batches * own.num_layers)
    else:
        _add_ring(tally, plan, own, times)


def add_context_backward(tally: Tally, plan: ResolvedPlan, own: StageLayers) -> None:
    """Add the collectives of keys and values, and of their gradients back to their ranks."""
    add_context_forward(tally, plan, own, times=2 if plan.layout.recompute == "full" else 1)
    if plan.layout.cp_method == "all_gather":
        size = plan.layout.cp * compute_kv_bytes(plan)
        tally.add("reduce_scatter", "cp", plan.get_group("cp"), size, plan.train.micro_batches * own.num_layers)
    else:
        _add_ring(tally, plan, own, 1)


def _add_ring(tally: Tally, plan: ResolvedPlan, own: StageLayers, times: int) -> None:
    count = times * plan.train.micro_batches * own.num_layers * (plan.layout.cp - 1)
    ops: tuple[Op, Op] = ("send", "recv")
    for op in ops:
        tally.add(op, "cp", plan.get_group("cp"), compute_kv_bytes(plan), count)


def compute_message_bytes(plan: ResolvedPlan) -> int:
    """Return the bytes of a message between stages. With SP or scatter-gather each tp rank sends its shard."""
    layout = plan.layout
    return plan.micro_batch.hidden_bytes // (layout.tp if layout.sequence_parallel or layout.scatter_gather else 1)


def add_pipeline(tally: Tally, plan: ResolvedPlan, pp: int, *, backward: bool) -> None:
    """Add one message per micro-batch for each boundary between two ranks. The turn of a V has no message."""
    own, last = get_chunk_indices(plan.layout, pp), get_num_chunks(plan.layout) - 1
    sends = sum(c < last and c + 1 not in own for c in own)
    receives = sum(c > 0 and c - 1 not in own for c in own)
    if backward:
        sends, receives = receives, sends
    m, group = plan.train.micro_batches, plan.get_group("pp")
    tally.add("send", "pp", group, compute_message_bytes(plan), m * sends)
    tally.add("recv", "pp", group, compute_message_bytes(plan), m * receives)
    if plan.layout.scatter_gather:  # 2104.04473 section 4.1
        tally.add("all_gather", "tp", plan.get_group("tp"), plan.micro_batch.hidden_bytes, m * receives)


def depends_on_router(plan: JobSpec | ResolvedPlan) -> bool:
    """Return whether the bytes of ep depend on the router, because no tokens are dropped to fit buffers."""
    return plan.layout.ep > 1 and plan.model.moe is not None and plan.model.moe.capacity_factor is None


def compute_row_bytes(plan: ResolvedPlan) -> int:
    """Return the bytes of the hidden state of one token on its way to an expert."""
    return plan.model.hidden_size * plan.mix.compute_bytes


def count_dispatched_rows(plan: ResolvedPlan) -> int:
    """Return the rows that one rank sends in an all-to-all, in one layer and micro-batch.

    Without a capacity, each token goes to each of its experts once, and the rows that a rank receives depend on the
    router. With a capacity, buffers are full.
    """
    moe = plan.model.moe
    assert moe is not None
    return count_expert_rows(moe, plan.micro_batch.tokens, plan.train.seq_len)


def add_experts(tally: Tally, plan: ResolvedPlan, own: StageLayers, *, backward: bool) -> None:
    """Add dispatch and combine in each layer with experts. Full recompute repeats both in backward.

    Without a capacity, ranks first exchange the numbers of tokens.
    """
    if plan.layout.ep == 1 or not own.num_moe_layers or plan.model.moe is None:
        return
    again = int(backward and plan.layout.recompute == "full")
    layers, group = plan.train.micro_batches * own.num_moe_layers, plan.get_group("ep")
    size = count_dispatched_rows(plan) * compute_row_bytes(plan)
    tally.add("all_to_all", "ep", group, size, layers * 2 * (1 + again))
    if plan.model.moe.capacity_factor is None:
        times = again if backward else 1
        tally.add("all_to_all", "ep", group, plan.model.moe.num_experts * COUNT_BYTES, layers * times)


def compute_routed_bytes(
    spec: JobSpec | ResolvedPlan, stage: int, received_rows: int, micro_batches: int, *, backward: bool
) -> int:
    """Return the bytes of a rank's all-to-alls in addition to `add_experts`, which spreads tokens evenly.

    Args:
        received_rows: tokens that the rank's experts received in all forwards of `micro_batches` micro-batches,
            including recomputed forwards.
    """
    plan = resolve(spec)
    own = plan.partition.stages[stage]
    if plan.layout.ep == 1 or not own.num_moe_layers:
        return 0
    again = int(backward and plan.layout.recompute == "full")
    even = micro_batches * own.num_moe_layers * count_dispatched_rows(plan)
    # Each forward returns its rows once, and each backward returns their gradients once.
    rows = received_rows * (1 + again + backward) // (1 + again) - even * (1 + again + backward)
    return rows * compute_row_bytes(plan)


def add_balance_loss(tally: Tally, plan: ResolvedPlan, own: StageLayers) -> None:
    """Add the sums of token counts over cp: the load-balancing loss needs those of whole sequences."""
    if plan.model.moe is None or not plan.model.moe.balance_loss:
        return
    size = plan.micro_batch_size * plan.model.moe.num_experts * FP32_BYTES
    times = plan.train.micro_batches * own.num_moe_layers * (1 + (plan.layout.recompute == "full"))
    tally.add("all_reduce", "cp", plan.get_group("cp"), size, times)


def add_data_step(tally: Tally, plan: ResolvedPlan, pp: int) -> None:
    """Add the gathers and gradient sums over dp x cp.

    ZeRO-1 and 2 gather once per step, and 3 gathers twice per micro-batch, or once per visit of a chunk if gathered
    weights stay. ZeRO-1 reduces once, and 2 and 3 per micro-batch. HSDP then sums shards over replicas once per step.
    """
    layout, m, mix, units = plan.layout, plan.train.micro_batches, plan.mix, plan.partition.get_units(pp)
    if layout.replica_ranks == 1:
        return
    if layout.zero == 0:
        _add_buckets(tally, plan, units)
        return
    add_data_gather(tally, plan, units, 2 * m if layout.zero == 3 and not layout.keep_gathered else 1)
    if layout.keep_gathered:  # the rank leaves all chunks but the last between their forwards and backwards
        stage = plan.partition.stages[pp].stage
        left = stage._replace(chunks=stage.chunks[:-1], last=False)
        add_data_gather(tally, plan, split_units(plan.model, left, layout.tp, layout.ep), 1)
    reduces = 1 if layout.zero == 1 else m
    replicas = RankGroup(layout.dp_replicas, layout.tp * layout.shard_ranks)
    for group, numel, number in _get_sharded(plan, units):
        tally.add_all("reduce_scatter", "dp", group, reduces * number, reduces * numel * mix.gradient_bytes)
        tally.add_all("all_reduce", "dp", replicas, number, numel // group.size * mix.gradient_bytes)


def add_data_gather(tally: Tally, plan: ResolvedPlan, units: tuple[ParameterUnit, ...], times: int) -> None:
    """Add `times` all-gathers of each unit in the compute type."""
    for group, numel, number in _get_sharded(plan, units):
        tally.add_all("all_gather", "dp", group, times * number, times * numel * plan.mix.compute_bytes)


def compute_padding_share(plan: ResolvedPlan, pp: int) -> float:
    """Return the padding of short shards in ZeRO's collectives as a fraction of the parameters."""
    if not plan.layout.zero:
        return 0.0
    units = plan.partition.get_units(pp)
    gathered = sum(numel for _, numel, _ in _get_sharded(plan, units))
    return gathered / sum(p.numel for unit in units for p in unit.parameters) - 1


def _get_sharded(plan: ResolvedPlan, units: tuple[ParameterUnit, ...]) -> list[tuple[RankGroup, int, int]]:
    """Return (shard group, elements of gathered buffers, units). Experts that ep divides have their own group."""
    found = []
    for experts in (False, True) if plan.layout.ep > 1 else (False,):
        group = get_shard_group(plan.layout, experts=experts)
        found.append((group, *_count_gathered(units, group.size, experts)))
    return found


@cache
def _count_gathered(units: tuple[ParameterUnit, ...], degree: int, experts: bool) -> tuple[int, int]:
    """Return (padded elements of the units' buffers, number of units)."""
    chosen = [u for u in units if is_expert_unit(u) == experts]
    return sum(_compute_padded_numel(u.parameters, degree) for u in chosen), len(chosen)


@cache
def _compute_padded_numel(parameters: tuple[Parameter, ...], degree: int) -> int:
    return sum(compute_gathered_numel(p, degree) for p in parameters)


def _add_buckets(tally: Tally, plan: ResolvedPlan, units: tuple[ParameterUnit, ...]) -> None:
    """Add the all-reduces of data parallelism without ZeRO."""
    element = plan.mix.gradient_bytes
    for experts in (False, True):
        ep = plan.layout.ep if experts else 1
        group = RankGroup(plan.layout.replica_ranks // ep, plan.layout.tp * ep)
        count, total = _count_buckets(units, experts, element)
        tally.add_all("all_reduce", "dp", group, count, total)


@cache
def _count_buckets(units: tuple[ParameterUnit, ...], experts: bool, element_bytes: int) -> tuple[int, int]:
    """Return (buckets, their bytes)."""
    chosen = [u for u in units if is_expert_unit(u) == experts]
    buckets = compute_bucket_bytes([p.numel * element_bytes for p in _order_by_backward(chosen)])
    return len(buckets), sum(buckets)


def _order_by_backward(units: Sequence[ParameterUnit]) -> list[Parameter]:
    """Return the parameters in the order of backward: head, final norm, layers from the last, embedding."""
    root = [p for u in reversed(units) if u.name == "root" for p in reversed(u.parameters)]
    layers = [p for u in reversed(units) if u.name != "root" for p in reversed(u.parameters)]
    head = [p for p in root if p.name.startswith(("final_norm", "head"))]
    return [*head, *layers, *(p for p in root if p not in head)]


def compute_bucket_bytes(sizes: list[int]) -> list[int]:
    """Return the bytes of each bucket of consecutive gradients. A bucket ends at BUCKET_BYTES or more."""
    buckets: list[int] = []
    filled = 0
    for size in sizes:
        filled += size
        if filled >= BUCKET_BYTES:
            buckets.append(filled)
            filled = 0
    return [*buckets, filled] if filled else buckets


def count_gradient_elements(plan: ResolvedPlan, place: Coordinates, local: Parameter) -> int:
    """Return the elements of a parameter's gradient that a rank has after the reduction over dp."""
    if plan.layout.zero == 0:
        return local.numel
    *_, index = get_shard_indices(plan.layout, place, local)
    return compute_shard_numel(local, get_shard_group(plan.layout, experts=local.is_expert).size, index)
