"""The exact collectives one rank issues, from the layout and the parameter shapes alone.

This mirrors `workers/trainer`, module by module; `make parity` holds the two against each other and against
what the meter counts, to the byte. What the trainer does not run yet (`planner.facts.reading.runnable`) follows the
papers named in each module. Bytes are payload bytes: what is handed to the library.

Who sends to whom: bytes from each rank to each other in one step.
"""

from __future__ import annotations

from planner.cost.axis_traffic import (
    Collective,
    Tally,
    balance,
    boundary_bytes,
    context_backward,
    context_forward,
    data_gather,
    data_step,
    depends_on_router,
    experts,
    gradient_buckets,
    held_numel,
    pipeline,
    routed_bytes,
    tensor_backward,
    tensor_forward,
)
from planner.cost.resolved_plan import ResolvedPlan, resolve
from planner.facts.collectives import compute_algorithmic_bytes
from planner.facts.layout import (
    Coordinates,
    RankGroup,
    get_axis_ranks,
    get_chunk_indices,
    get_coordinates,
    get_num_chunks,
)
from planner.facts.model_shapes import Parameter, is_key_or_value, is_router
from planner.facts.placements import count_kv_replicas
from planner.facts.spec import JobSpec, Layout

__all__ = [
    "Collective",
    "depends_on_router",
    "eval_traffic",
    "gradient_buckets",
    "micro_batch_traffic",
    "num_evals",
    "routed_bytes",
    "setup_traffic",
    "step_end_traffic",
    "step_traffic",
]

STATISTIC_BYTES = 8  # loss and gradient norm travel as float64


def setup_traffic(spec: JobSpec | ResolvedPlan, rank: int) -> list[Collective]:
    """Return the collectives before the first step: one barrier. Equal seeds replace a broadcast of parameters."""
    tally = Tally()
    get_coordinates(rank, spec.layout)
    tally.add("barrier", "world", resolve(spec).get_group("world"), 0)
    return tally.rows()


def step_traffic(spec: JobSpec | ResolvedPlan, rank: int) -> list[Collective]:
    """Return the collectives of one optimizer step, with gradient clipping and the reported loss."""
    return _step(resolve(spec), get_coordinates(rank, spec.layout))


def micro_batch_traffic(spec: JobSpec | ResolvedPlan, stage: int) -> list[Collective]:
    """Return the collectives of a stage for all micro-batches of a step, without dp."""
    tally = Tally()
    _micro_batches(tally, resolve(spec), stage)
    return tally.rows()


def step_end_traffic(spec: JobSpec | ResolvedPlan, stage: int) -> list[Collective]:
    """Return the parameter collectives of the first rank of a stage, with clipping and the loss."""
    tally = Tally()
    _parameters(tally, resolve(spec), Coordinates(pp=stage))
    return tally.rows()


def _step(plan: ResolvedPlan, place: Coordinates) -> list[Collective]:
    tally = Tally()
    _micro_batches(tally, plan, place.pp)
    _parameters(tally, plan, place)
    return tally.rows()


def _micro_batches(tally: Tally, plan: ResolvedPlan, stage: int) -> None:
    own = plan.partition.stages[stage]
    tensor_forward(tally, plan, own)
    tensor_backward(tally, plan, own)
    pipeline(tally, plan, stage, backward=False)
    pipeline(tally, plan, stage, backward=True)
    if plan.layout.cp > 1:
        context_forward(tally, plan, own)
        context_backward(tally, plan, own)
    experts(tally, plan, own, backward=False)
    experts(tally, plan, own, backward=True)
    balance(tally, plan, own)


def _parameters(tally: Tally, plan: ResolvedPlan, place: Coordinates) -> None:
    data_step(tally, plan, place.pp)
    _shared_gradients(tally, plan, place)
    _tied_gradients(tally, plan, place)
    tally.add("all_reduce", "world", plan.get_group("world"), 2 * STATISTIC_BYTES)


def eval_traffic(spec: JobSpec | ResolvedPlan, rank: int) -> list[Collective]:
    """Return the collectives of one validation: the forwards of a step, and the loss."""
    plan, tally = resolve(spec), Tally()
    place = get_coordinates(rank, plan.layout)
    own = plan.partition.stages[place.pp]
    tensor_forward(tally, plan, own)
    pipeline(tally, plan, place.pp, backward=False)
    if plan.layout.cp > 1:
        context_forward(tally, plan, own)
    experts(tally, plan, own, backward=False)
    if plan.layout.zero:
        again = plan.layout.zero == 3 and not plan.layout.keep_gathered
        data_gather(tally, plan, place.pp, plan.train.micro_batches if again else 1)
    tally.add("all_reduce", "world", plan.get_group("world"), STATISTIC_BYTES)
    return tally.rows()


def num_evals(spec: JobSpec, done: int = 0) -> int:
    """Return the number of validations after `done` steps: every `eval_every` steps, and after the last one."""
    train = spec.train
    if not train.eval_every or done >= train.steps:
        return 0
    return -(-train.steps // train.eval_every) - done // train.eval_every


def _partial_over_tp(parameter: Parameter, layout: Layout) -> bool:
    """Return whether each tp rank has a partial gradient of a replicated tensor.

    With sequence parallelism each rank processes its part of the sequence. The gradient of a router comes from the
    rank's part of the experts' outputs.
    """
    return parameter.tp_dim is None and (layout.sequence_parallel or is_router(parameter))


def _shared_gradients(tally: Tally, plan: ResolvedPlan, place: Coordinates) -> None:
    """Add the all-reduces over tp of replicated tensors, and of key/value heads that several ranks share."""
    element = summed_bytes(plan)
    parameters = plan.partition.count_parameters(place.pp)
    sharing = RankGroup(count_kv_replicas(plan.model.num_kv_heads, plan.layout.tp), 1)
    for group, chosen in (
        (plan.get_group("tp"), [(p, n) for p, n in parameters if _partial_over_tp(p, plan.layout)]),
        (sharing, [(p, n) for p, n in parameters if is_key_or_value(p)]),
    ):
        size = sum(number * held_numel(plan, place, p) for p, number in chosen) * element
        tally.add("all_reduce", "tp", group, size, 1 if chosen else 0)


def _tied_gradients(tally: Tally, plan: ResolvedPlan, place: Coordinates) -> None:
    """Add the all-reduce of a tied table's gradient between first and last stage (Megatron's embedding group)."""
    stage = plan.partition.stages[place.pp].stage
    if not plan.model.tied_embeddings or stage.first == stage.last:
        return
    table = next(p for u in plan.partition.get_units(place.pp) for p in u.parameters if p.name in _TIED)
    pipe = plan.get_group("pp")
    ends = RankGroup(2, (pipe.size - 1) * pipe.stride)
    tally.add("all_reduce", "pp", ends, held_numel(plan, place, table) * summed_bytes(plan))


def summed_bytes(plan: ResolvedPlan) -> int:
    """Return the bytes per element of reduced gradients. FSDP2 keeps them in the type of its shards."""
    mix = plan.mix
    return mix.sharded_bytes if plan.layout.zero else mix.gradient_bytes


_TIED = ("embedding.weight", "head.weight")

MOST_RANKS = 64


def traffic_matrix(spec: JobSpec) -> list[list[int]] | None:
    """[sender][receiver] algorithmic bytes of a step, None for more ranks than a picture can show.

    A ring passes all its bytes to the next rank of the group, an all-to-all as many to each; the pipeline's messages go
    to the neighbouring stages.
    """
    layout = spec.layout
    world = layout.world_size
    if world > MOST_RANKS:
        return None
    plan = resolve(spec)
    matrix = [[0] * world for _ in range(world)]
    for rank in range(world):
        for row in step_traffic(plan, rank):
            if row.op in ("recv", "barrier"):
                continue
            for receiver, num_bytes in _receivers(plan, row, rank):
                matrix[rank][receiver] += num_bytes
    return matrix


def _receivers(plan: ResolvedPlan, row: Collective, rank: int) -> list[tuple[int, int]]:
    if row.op == "send" and row.axis == "pp":
        return _stages(plan, rank)
    group = _group(row, rank, plan.layout)
    here = group.index(rank)
    sent = compute_algorithmic_bytes(row.op, row.payload_bytes, row.group_size)
    if row.op == "all_to_all":
        others = [r for r in group if r != rank]
        return [(r, sent // len(others)) for r in others]
    return [(group[(here + 1) % len(group)], sent)]


def _group(row: Collective, rank: int, layout: Layout) -> list[int]:
    """The ranks of the collective that `rank` takes part in: `group_size` of them, `stride` apart."""
    if row.axis == "pp":  # the tied table's: the ends of the pipe
        pipe = get_axis_ranks(rank, "pp", layout)
        return [pipe[0], pipe[-1]]
    span = row.group_size * row.stride
    first = rank // span * span + rank % row.stride
    return [first + i * row.stride for i in range(row.group_size)]


def _stages(plan: ResolvedPlan, rank: int) -> list[tuple[int, int]]:
    """Hidden states to the stage after each chunk, gradients to the one before."""
    layout, place = plan.layout, get_coordinates(rank, plan.layout)
    pipe = get_axis_ranks(rank, "pp", layout)
    owner = {c: stage for stage in range(layout.pp) for c in get_chunk_indices(layout, stage)}
    size = plan.train.micro_batches * boundary_bytes(plan)
    near = [n for chunk in get_chunk_indices(layout, place.pp) for n in (chunk + 1, chunk - 1)]
    return [(pipe[owner[n]], size) for n in near if 0 <= n < get_num_chunks(layout) and owner[n] != place.pp]
