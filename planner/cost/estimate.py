"""Estimate a spec before it runs, and reject specs that are too large to plan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NotRequired

from typing_extensions import TypedDict

from contracts.telemetry.items import Axis, Op
from planner.cost.assumptions import Assumption, list_assumptions
from planner.cost.axis_traffic import compute_padding_share
from planner.cost.learning import (
    Interval,
    compute_memory_correction,
    compute_memory_interval,
    compute_time_interval,
    is_within_margin,
)
from planner.cost.memory import count_held_parameters, get_gradient_bytes, get_host_bytes, get_memory
from planner.cost.resolved_plan import ResolvedPlan, resolve
from planner.cost.timing import Timer
from planner.cost.traffic import GroupTraffic, depends_on_router, get_step_traffic
from planner.facts.collectives import compute_algorithmic_bytes
from planner.facts.kinds import KINDS
from planner.facts.layout import SCHEDULE_NAMES, Coordinates, get_rank
from planner.facts.model_shapes import count_active_parameters, count_parameters
from planner.facts.parse_spec import parse_spec
from planner.facts.placements import VOCABULARY_MULTIPLE, get_padded_vocab_size, get_zero_shard
from planner.facts.spec import JobSpec
from planner.facts.spec_rules import find_unsupported_fields
from planner.facts.validation import Problem, SpecError
from planner.hardware.catalog import CLUSTERS, DEFAULT_CLUSTER
from planner.hardware.cluster import Basis, Cluster, get_filled_per_node, get_node_span
from planner.hardware.stacks import STACKS

EXACT = "exact"


class TrafficRow(TypedDict):
    """All calls of one op on one group in one step of one rank.

    `between_nodes`: the group spans nodes, so at least a part of its bytes leaves the node.
    """

    op: Op
    axis: Axis
    group_size: int
    stride: int
    count: int
    payload_bytes: int
    algorithmic_bytes: int
    between_nodes: bool


class StageEstimate(TypedDict):
    """One rank of a pipeline stage; the ranks of a stage send alike. `layers`: first and last + 1 of each chunk.

    `padded_share`: what ZeRO's collectives carry more than the parameters need, over what they need. `gradients_bytes`:
    of a step's gradients, once complete; those in `memory` are of the moment at which a rank holds most.
    """

    stage: int
    layers: list[list[int]]
    parameters: int
    padded_share: float
    memory: dict[str, int]
    memory_bytes: int
    gradients_bytes: NotRequired[int]
    traffic: list[TrafficRow]
    step_bytes: dict[str, int]


class TimePart(TypedDict):
    """A part of the step: compute, recompute, an axis' exposed communication, launch, bubble, optimizer.

    Seconds are means of all ranks, as what is measured is. What stages wait for the slowest is pp's.
    """

    name: str
    seconds: float


class TimeEstimate(TypedDict):
    """Parts add up to `step_s`; `forward_s` and both backwards are of one micro-batch on the slowest stage. Utilisation
    is a share of the dense peak of all ranks. `assumptions` of unknown software, with the largest effect first."""

    step_s: float
    parts: list[TimePart]
    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    model_flops: float
    hardware_flops: float
    mfu: float
    hfu: float
    tokens_per_s: float
    basis: Basis
    interval: Interval
    assumptions: NotRequired[list[Assumption]]


class ClusterEstimate(TypedDict):
    """Hardware of the ranks. `crossing`: which axes use the network. `assumed_peak`: whether the peak FLOP/s of the
    accelerator is an assumption, as for CPUs and unknown GPUs."""

    name: str
    accelerator: str
    assumed_peak: bool
    per_node: int
    nodes: int
    memory_bytes: int
    reserved_bytes: int
    crossing: dict[str, bool]


class AlignedVocabulary(TypedDict):
    """A larger vocabulary, of which a step takes so many seconds less: rows of the head's products begin at multiples
    of 16 bytes then."""

    vocab_size: int
    spares_s: float


class Estimate(TypedDict):
    """Traffic is exact for what the trainer runs, memory and time are estimates. Sizes in bytes.

    `padded_vocab_size`: rows of the embedding and the head over all tp ranks, of which those from the vocabulary's size
    on are padding; `model_parameters` counts none. `tight`: the fullest rank fits, by less than its peak may be off.
    `host_memory_bytes`: state that memory options move to the CPU memory of the fullest rank.
    `may_fit`: it does not fit, but the interval of its peak contains the memory of the accelerator.
    """

    world_size: int
    axes: dict[str, int]
    model_parameters: int
    vocab_size: int
    padded_vocab_size: int
    aligned_vocabulary: NotRequired[AlignedVocabulary]
    active_parameters: int
    micro_batch_size: int
    micro_batches: int
    tokens_per_step: int
    stages: list[StageEstimate]
    peak_memory_bytes: int
    memory_interval: Interval
    host_memory_bytes: NotRequired[int]
    rank_bytes: dict[str, dict[str, int]]
    exact_traffic: bool
    cluster: ClusterEstimate
    fits: bool
    tight: NotRequired[bool]
    may_fit: NotRequired[bool]
    time: TimeEstimate


def estimate(spec: JobSpec, cluster: Cluster | None = None) -> Estimate:
    """Return the cost of a valid spec by stage, on `cluster` or the default cluster of its device.

    `rank_bytes` lists the ranks whose payload bytes differ from those of their stage's first rank: ZeRO with sequence
    parallelism, if the last shard of a tensor is short.
    """
    layout = spec.layout
    cluster = cluster or get_default_cluster(spec)
    plan = resolve(spec)
    twins = _get_twins(plan)
    stages = _estimate_stages(plan, twins, cluster)
    peak, room = max(stage["memory_bytes"] for stage in stages), cluster.accelerator.memory_bytes
    sure = compute_memory_interval(cluster, spec, compute_memory_correction(cluster.runs), peak)
    made = Estimate(
        world_size=layout.world_size,
        axes={axis: getattr(layout, axis) for axis in ("pp", "dp", "cp", "ep", "tp")},
        model_parameters=count_parameters(spec.model),
        vocab_size=spec.model.vocab_size,
        padded_vocab_size=get_padded_vocab_size(spec.model.vocab_size, layout.tp),
        active_parameters=count_active_parameters(spec.model),
        micro_batch_size=spec.micro_batch_size,
        micro_batches=spec.train.micro_batches,
        tokens_per_step=spec.train.global_batch * spec.train.seq_len,
        stages=stages,
        peak_memory_bytes=peak,
        memory_interval=sure,
        rank_bytes=_find_exceptions(plan, twins, stages, cluster),
        exact_traffic=get_traffic_kind(spec) == EXACT,
        cluster=_estimate_cluster(plan, cluster),
        fits=peak <= room,
        tight=peak <= room < peak * (1 + sure["share"]),
        may_fit=peak > room and is_within_margin(sure["share"], room, peak),
        time=_estimate_time(plan, cluster),
    )
    if spec.memory is not None:
        made["host_memory_bytes"] = max(get_host_bytes(plan, stage) for stage in range(layout.pp))
    if assumptions := list_assumptions(spec, cluster):
        made["time"]["assumptions"] = assumptions
    if aligned := find_aligned_vocabulary(spec, cluster, made["time"]["step_s"]):
        made["aligned_vocabulary"] = aligned
    return made


def find_aligned_vocabulary(spec: JobSpec, cluster: Cluster, step_s: float) -> AlignedVocabulary | None:
    """Return the next multiple of 128 x tp if it saves 1% or more of the step time on a GPU."""
    size, multiple = spec.model.vocab_size, VOCABULARY_MULTIPLE * spec.layout.tp
    larger = -(-size // multiple) * multiple
    if cluster.device == "cpu" or larger == get_padded_vocab_size(size, spec.layout.tp):
        return None
    model = spec.model.model_copy(update={"vocab_size": larger})
    own, aligned = (Timer(cluster).predict(one).step_s for one in (spec, spec.model_copy(update={"model": model})))
    share = 1 - aligned / own
    return AlignedVocabulary(vocab_size=larger, spares_s=share * step_s) if share >= 0.01 else None


def get_traffic_kind(spec: JobSpec) -> str:
    """Return the confidence of predicted bytes and calls, in words."""
    if find_unsupported_fields(spec):
        return "estimated: the trainer does not support this layout"
    if depends_on_router(spec):
        return "exact except ep, which assumes evenly spread tokens"
    return EXACT


def estimate_stages(spec: JobSpec) -> list[StageEstimate]:
    """Return the estimate of each stage on the default cluster of the device."""
    plan = resolve(spec)
    return _estimate_stages(plan, _get_twins(plan), get_default_cluster(spec))


def get_default_cluster(spec: JobSpec) -> Cluster:
    """Return the named cluster for the device of a spec."""
    return CLUSTERS[DEFAULT_CLUSTER[spec.resources.device]]


def get_rank_memory(spec: JobSpec | ResolvedPlan, stage: int, cluster: Cluster) -> dict[str, int]:
    """Return the bytes by part of a rank, with the allowance for device, libraries, and fragmentation."""
    return _estimate_memory(_plan_on(resolve(spec), cluster), stage, cluster)


def _plan_on(plan: ResolvedPlan, cluster: Cluster) -> ResolvedPlan:
    """Return the plan with the device of the cluster."""
    spec = use_cluster_device(cluster, plan.spec)
    return plan if spec is plan.spec else resolve(spec)


def _estimate_memory(plan: ResolvedPlan, stage: int, cluster: Cluster) -> dict[str, int]:
    parts = get_memory(plan, stage)
    parts["allowance"] = compute_allowance(plan, cluster, sum(parts.values()))
    return parts


def _estimate_stages(plan: ResolvedPlan, twins: Sequence[int], cluster: Cluster) -> list[StageEstimate]:
    traffic = {twin: _get_traffic(plan, Coordinates(pp=twin), cluster) for twin in set(twins)}
    placed = _plan_on(plan, cluster)
    return [
        StageEstimate(
            stage=stage,
            layers=[[chunk.start, chunk.stop] for chunk in plan.partition.stages[stage].stage.chunks],
            parameters=count_held_parameters(plan, stage),
            padded_share=compute_padding_share(plan, stage),
            memory=(components := _estimate_memory(placed, stage, cluster)),
            memory_bytes=sum(components.values()),
            gradients_bytes=get_gradient_bytes(plan, stage),
            traffic=traffic[twin],
            step_bytes=_sum_by_axis(traffic[twin]),
        )
        for stage, twin in enumerate(twins)
    ]


def _get_twins(plan: ResolvedPlan) -> list[int]:
    """Return for each stage the first one that holds an equal part of the model and so sends equal bytes."""
    twins = [0] * plan.layout.pp
    for stages in plan.partition.equal_stages:
        for stage in stages:
            twins[stage] = stages[0]
    return twins


def _get_traffic(plan: ResolvedPlan, place: Coordinates, cluster: Cluster) -> list[TrafficRow]:
    return [_get_row(plan, c, cluster) for c in get_step_traffic(plan, get_rank(place, plan.layout))]


def _get_row(plan: ResolvedPlan, c: GroupTraffic, cluster: Cluster) -> TrafficRow:
    return TrafficRow(
        op=c.op,
        axis=c.axis,
        group_size=c.group_size,
        stride=c.stride,
        count=c.count,
        payload_bytes=c.payload_bytes,
        algorithmic_bytes=compute_algorithmic_bytes(c.op, c.payload_bytes, c.group_size),
        between_nodes=get_node_span(c.group_size, c.stride, cluster.per_node, plan.layout.world_size).nodes > 1,
    )


def _sum_by_axis(traffic: list[TrafficRow]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for row in traffic:
        totals[row["axis"]] = totals.get(row["axis"], 0) + row["payload_bytes"]
    return totals


def _estimate_cluster(plan: ResolvedPlan, cluster: Cluster) -> ClusterEstimate:
    layout = plan.layout
    crossing: dict[str, bool] = {}
    axes: tuple[Axis, ...] = ("tp", "cp", "ep", "dp", "pp")
    for axis in axes:
        group = plan.get_group(axis)
        if group.size > 1:
            crossing[axis] = get_node_span(group.size, group.stride, cluster.per_node, layout.world_size).nodes > 1
    return ClusterEstimate(
        name=cluster.name,
        accelerator=cluster.accelerator.name,
        assumed_peak=cluster.has_assumed_peak,
        per_node=cluster.per_node,
        nodes=-(-layout.world_size // get_filled_per_node(layout.world_size, cluster.per_node)),
        memory_bytes=cluster.accelerator.memory_bytes,
        reserved_bytes=cluster.accelerator.reserved_bytes,
        crossing=crossing,
    )


def _estimate_time(plan: ResolvedPlan, cluster: Cluster) -> TimeEstimate:
    timer = Timer(cluster)
    timing, mean = timer.get_step(plan), timer.get_rank_mean(plan)
    parts = [TimePart(name="compute", seconds=mean.compute_s)]
    if mean.recompute_s:
        parts.append(TimePart(name="recompute", seconds=mean.recompute_s))
    parts += [TimePart(name=axis, seconds=s) for axis, s in mean.exposed_s.items() if s > 0]
    if mean.launch_s:
        parts.append(TimePart(name="launch", seconds=mean.launch_s))
    parts += [TimePart(name="bubble", seconds=mean.bubble_s), TimePart(name="optimizer", seconds=mean.optimizer_s)]
    return TimeEstimate(
        step_s=timing.step_s,
        parts=parts,
        forward_s=timing.forward_s,
        backward_input_s=timing.backward_input_s,
        backward_weight_s=timing.backward_weight_s,
        model_flops=float(timing.model_flops),
        hardware_flops=float(timing.hardware_flops),
        mfu=timing.mfu,
        hfu=timing.hfu,
        tokens_per_s=timing.tokens_per_s,
        basis=cluster.basis,
        interval=compute_time_interval(cluster, plan.spec, timer.get_correction(plan), timing.host_share),
    )


def _find_exceptions(
    plan: ResolvedPlan, twins: list[int], stages: list[StageEstimate], cluster: Cluster
) -> dict[str, dict[str, int]]:
    layout = plan.layout
    if not layout.zero:
        return {}
    found = {}
    for twin in sorted(set(twins)):
        usual = stages[twin]["step_bytes"]
        alike = [stage for stage in range(layout.pp) if twins[stage] == twin]
        for shards in _find_equal_shards(plan, twin):
            by_axis = _sum_by_axis(_get_traffic(plan, _shard_place(plan, twin, shards.start), cluster))
            if by_axis == usual:
                continue
            for replica in range(layout.dp_replicas):
                for index in shards:
                    place = _shard_place(plan, twin, replica * layout.shard_ranks + index)
                    ranks = (place._replace(pp=stage, tp=tp) for stage in alike for tp in range(layout.tp))
                    found.update({str(get_rank(rank, layout)): by_axis for rank in ranks})
    return found


def _shard_place(plan: ResolvedPlan, stage: int, index: int) -> Coordinates:
    dp, cp = divmod(index, plan.layout.cp)
    return Coordinates(pp=stage, dp=dp, cp=cp)


def _find_equal_shards(plan: ResolvedPlan, stage: int) -> list[range]:
    """Return ranges of shard indices with equal numbers of rows of every tensor, which send equal bytes.

    A dim has full shards, then at most one short shard, then empty ones: only their ends can differ.
    """
    degree = plan.layout.shard_ranks
    edges = {0, degree}
    for shape in {p.shape for unit in plan.partition.get_units(stage) for p in unit.parameters}:
        shard = get_zero_shard(shape, degree)
        if shard:
            full, rest = divmod(shape[shard.dim], shard.rows)
            edges |= {full, full + (rest > 0)}
    return [range(start, stop) for start, stop in pairwise(sorted(edge for edge in edges if edge <= degree))]


MAX_ACTIONS = 2**21  # whose times a schedule is made of: seconds of work at most, hundreds of times the published ones
# Of schedules that run all forwards first and never repeat themselves: each moment is walked for memory, 7 s of a core.
RISING, MAX_RISING_ACTIONS = ("gpipe", "looped_bfs"), 2**17
MAX_MESSAGE_BYTES = 2**63 - 1  # what msgpack and a database integer hold


def parse_plannable(data: object, *, slots: int | None = None) -> JobSpec:
    """Parse a spec as `parse_spec`, and reject a spec that is too large to plan.

    Raises:
        SpecError: with every problem, each with its field and the arithmetic.
    """
    spec = parse_spec(data, slots=slots)
    if found := find_size_problems(spec):
        raise SpecError(found)
    return spec


def find_size_problems(spec: JobSpec) -> list[Problem]:
    """Return problems of a spec whose plan takes too long or whose messages are too large.

    Kinds without a planned step, such as scripts, have no such problem: their batch is not read.
    """
    if not KINDS[spec.kind].trains:
        return []
    pp, m, v = spec.layout.pp, spec.train.micro_batches, spec.layout.virtual_stages
    rises = pp > 1 and spec.layout.schedule in RISING
    most, of = (MAX_RISING_ACTIONS, f" of {SCHEDULE_NAMES[spec.layout.schedule]}") if rises else (MAX_ACTIONS, "")
    if pp * m * v > most:
        product = f"pp {pp} x micro_batches {m} x virtual_stages {v} = {pp * m * v:,}"
        return [
            Problem(
                "train.micro_batches",
                f"`train.micro_batches` is {m}, so {product} actions per step. Use at most {most:,} actions{of}.",
            )
        ]
    stages = estimate_stages(spec)
    needed = max(stage["memory_bytes"] for stage in stages)
    sent = max((row["payload_bytes"] for stage in stages for row in stage["traffic"]), default=0)
    if max(needed, sent) <= MAX_MESSAGE_BYTES:
        return []
    text = f"`model` needs {needed:.1e} bytes of memory and {sent:.1e} bytes of traffic per rank and step"
    return [Problem("model", f"{text}. Use at most {MAX_MESSAGE_BYTES:.1e} bytes.")]


def use_cluster_device(cluster: Cluster, spec: JobSpec) -> JobSpec:
    """Return the spec with the device of the cluster, which decides what norms keep."""
    if spec.resources.device == cluster.device:
        return spec
    resources = spec.resources.model_copy(update={"device": cluster.device})
    return spec.model_copy(update={"resources": resources})


def compute_allowance(spec: JobSpec | ResolvedPlan, cluster: Cluster, tensor_bytes: int) -> int:
    """Return the bytes of the device and its allocator, and of the stack's communicators and buckets.

    A profile already includes the communicators and buckets.
    """
    own = cluster.accelerator.compute_overhead_bytes(tensor_bytes)
    adds_stack = cluster.device == "cuda" and cluster.profile is None
    return own + (STACKS[spec.resources.stack].extra_bytes if adds_stack else 0)
