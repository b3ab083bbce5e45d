"""The exact collectives of one rank, from the layout and the parameter shapes.

The order follows `workers/trainer`. `make parity` compares both with the meter to the byte. Layouts that the trainer
does not support (`planner.facts.spec_rules.find_unsupported_fields`) follow the papers of `axis_traffic`. Bytes are
payload bytes.
"""

from __future__ import annotations

from planner.cost import axis_traffic as axes
from planner.cost.axis_traffic import GroupTraffic, Tally, compute_bucket_bytes, compute_routed_bytes, depends_on_router
from planner.cost.resolved_plan import ResolvedPlan, resolve
from planner.facts.collectives import compute_algorithmic_bytes
from planner.facts.layout import (
    Coordinates,
    RankGroup,
    get_axis_ranks,
    get_chunk_indices,
    get_coordinates,
    get_group_ranks,
    get_num_chunks,
)
from planner.facts.model_shapes import Parameter, is_key_or_value, is_router, is_vocabulary
from planner.facts.placements import count_kv_replicas
from planner.facts.spec import JobSpec, Layout

__all__ = ["GroupTraffic", "compute_bucket_bytes", "compute_routed_bytes", "depends_on_router"]

STATISTIC_BYTES = 8  # loss and gradient norm are float64
MAX_MATRIX_RANKS = 64  # of a matrix that a page can show


def get_setup_traffic(spec: JobSpec | ResolvedPlan, rank: int) -> list[GroupTraffic]:
    """Return the collectives before the first step: one barrier. Equal seeds replace a broadcast of parameters."""
    tally = Tally()
    get_coordinates(rank, spec.layout)
    tally.add("barrier", "world", resolve(spec).get_group("world"), 0)
    return tally.get_rows()


def get_step_traffic(spec: JobSpec | ResolvedPlan, rank: int) -> list[GroupTraffic]:
    """Return the collectives of one optimizer step, with gradient clipping and the reported loss."""
    plan, tally, place = resolve(spec), Tally(), get_coordinates(rank, spec.layout)
    _add_micro_batches(tally, plan, place.pp)
    _add_parameters(tally, plan, place)
    return tally.get_rows()


def get_micro_batch_traffic(spec: JobSpec | ResolvedPlan, stage: int) -> list[GroupTraffic]:
    """Return the collectives of a stage for all micro-batches of a step, without dp."""
    tally = Tally()
    _add_micro_batches(tally, resolve(spec), stage)
    return tally.get_rows()


def get_step_end_traffic(spec: JobSpec | ResolvedPlan, stage: int) -> list[GroupTraffic]:
    """Return the parameter collectives of the first rank of a stage, with clipping and the loss."""
    tally = Tally()
    _add_parameters(tally, resolve(spec), Coordinates(pp=stage))
    return tally.get_rows()


def get_eval_traffic(spec: JobSpec | ResolvedPlan, rank: int) -> list[GroupTraffic]:
    """Return the collectives of one validation: the forwards of a step, and the loss."""
    plan, tally = resolve(spec), Tally()
    place = get_coordinates(rank, plan.layout)
    own = plan.partition.stages[place.pp]
    axes.add_tensor_forward(tally, plan, own)
    axes.add_pipeline(tally, plan, place.pp, backward=False)
    if plan.layout.cp > 1:
        axes.add_context_forward(tally, plan, own)
    axes.add_experts(tally, plan, own, backward=False)
    if plan.layout.zero:
        repeats = plan.layout.zero == 3 and not plan.layout.keep_gathered
        times = plan.train.micro_batches if repeats else 1
        axes.add_data_gather(tally, plan, plan.partition.get_units(place.pp), times)
    tally.add("all_reduce", "world", plan.get_group("world"), STATISTIC_BYTES)
    return tally.get_rows()


def count_evals(spec: JobSpec, done: int = 0) -> int:
    """Return the number of validations after `done` steps: every `eval_every` steps, and after the last one."""
    train = spec.train
    if not train.eval_every or done >= train.steps:
        return 0
    return -(-train.steps // train.eval_every) - done // train.eval_every


def _add_micro_batches(tally: Tally, plan: ResolvedPlan, stage: int) -> None:
    own = plan.partition.stages[stage]
    axes.add_tensor_forward(tally, plan, own)
    axes.add_tensor_backward(tally, plan, own)
    if plan.layout.cp > 1:
        axes.add_context_forward(tally, plan, own)
        axes.add_context_backward(tally, plan, own)
    for backward in (False, True):
        axes.add_pipeline(tally, plan, stage, backward=backward)
        axes.add_experts(tally, plan, own, backward=backward)
    axes.add_balance_loss(tally, plan, own)


def _add_parameters(tally: Tally, plan: ResolvedPlan, place: Coordinates) -> None:
    axes.add_data_step(tally, plan, place.pp)
    _add_shared_gradients(tally, plan, place)
    _add_tied_gradients(tally, plan, place)
    tally.add("all_reduce", "world", plan.get_group("world"), 2 * STATISTIC_BYTES)


def _is_partial_over_tp(parameter: Parameter, layout: Layout) -> bool:
    """Return whether each tp rank has a partial gradient of a replicated tensor.

    With sequence parallelism each rank processes its part of the sequence. The gradient of a router comes from the
    rank's part of the experts' outputs.
    """
    return parameter.tp_dim is None and (layout.sequence_parallel or is_router(parameter))


def _add_shared_gradients(tally: Tally, plan: ResolvedPlan, place: Coordinates) -> None:
    """Add the all-reduces over tp of replicated tensors, and of key/value heads that several ranks share."""
    element = _get_reduced_bytes(plan)
    parameters = plan.partition.count_parameters(place.pp)
    sharing = RankGroup(count_kv_replicas(plan.model.num_kv_heads, plan.layout.tp), 1)
    for group, chosen in (
        (plan.get_group("tp"), [(p, n) for p, n in parameters if _is_partial_over_tp(p, plan.layout)]),
        (sharing, [(p, n) for p, n in parameters if is_key_or_value(p)]),
    ):
        size = sum(number * axes.count_gradient_elements(plan, place, p) for p, number in chosen) * element
        tally.add("all_reduce", "tp", group, size, 1 if chosen else 0)


def _add_tied_gradients(tally: Tally, plan: ResolvedPlan, place: Coordinates) -> None:
    """Add the all-reduce of a tied table's gradient between first and last stage (Megatron's embedding group)."""
    stage = plan.partition.stages[place.pp].stage
    if not plan.model.tied_embeddings or stage.first == stage.last:
        return
    table = next(p for u in plan.partition.get_units(place.pp) for p in u.parameters if is_vocabulary(p))
    pipeline = plan.get_group("pp")
    ends = RankGroup(2, (pipeline.size - 1) * pipeline.stride)
    size = axes.count_gradient_elements(plan, place, table) * _get_reduced_bytes(plan)
    tally.add("all_reduce", "pp", ends, size)


def _get_reduced_bytes(plan: ResolvedPlan) -> int:
    """Return the bytes per element of reduced gradients. FSDP2 keeps them in the type of its shards."""
    return plan.mix.sharded_bytes if plan.layout.zero else plan.mix.gradient_bytes


def build_traffic_matrix(spec: JobSpec) -> list[list[int]] | None:
    """Return [sender][receiver] algorithmic bytes of a step, or None above MAX_MATRIX_RANKS ranks.

    In a ring, a rank sends all its bytes to the next rank of the group. In an all-to-all it sends equal shares.
    """
    world = spec.layout.world_size
    if world > MAX_MATRIX_RANKS:
        return None
    plan = resolve(spec)
    matrix = [[0] * world for _ in range(world)]
    for rank in range(world):
        for row in get_step_traffic(plan, rank):
            if row.op in ("recv", "barrier"):
                continue
            for receiver, num_bytes in _find_receivers(plan, row, rank):
                matrix[rank][receiver] += num_bytes
    return matrix


def _find_receivers(plan: ResolvedPlan, row: GroupTraffic, rank: int) -> list[tuple[int, int]]:
    if row.axis == "pp":
        pipeline = get_axis_ranks(rank, "pp", plan.layout)
        if row.op == "send":
            return _find_neighbor_stages(plan, rank, pipeline)
        group: tuple[int, ...] = (pipeline[0], pipeline[-1])  # of a tied table
    else:
        group = get_group_ranks(rank, RankGroup(row.group_size, row.stride))
    sent = compute_algorithmic_bytes(row.op, row.payload_bytes, row.group_size)
    if row.op == "all_to_all":
        others = [r for r in group if r != rank]
        return [(r, sent // len(others)) for r in others]
    return [(group[(group.index(rank) + 1) % len(group)], sent)]


def _find_neighbor_stages(plan: ResolvedPlan, rank: int, pipeline: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the receivers of hidden states after each chunk, and of gradients before it."""
    layout, place = plan.layout, get_coordinates(rank, plan.layout)
    owner = {c: stage for stage in range(layout.pp) for c in get_chunk_indices(layout, stage)}
    size = plan.train.micro_batches * axes.compute_message_bytes(plan)
    near = [n for chunk in get_chunk_indices(layout, place.pp) for n in (chunk + 1, chunk - 1)]
    return [(pipeline[owner[n]], size) for n in near if 0 <= n < get_num_chunks(layout) and owner[n] != place.pp]
