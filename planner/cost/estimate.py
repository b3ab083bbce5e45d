"""Everything the submit page, the command line and the API say of a spec before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NotRequired

from typing_extensions import TypedDict

from contracts.telemetry.vocabulary import Axis, Op
from planner.cost.beside import allowance, on
from planner.cost.correction import Interval, interval
from planner.cost.learning import memory_correction, memory_interval
from planner.cost.memory import gradient_bytes, held_parameters, memory
from planner.cost.timing import Timer
from planner.cost.traffic import Collective, depends_on_router, step_traffic
from planner.cost.traffic.data import padded_share
from planner.facts.collectives import compute_algorithmic_bytes
from planner.facts.layout import Coordinates, get_axis_group, get_rank, is_v_turn
from planner.facts.model_shapes import count_active_parameters, count_parameters
from planner.facts.placements import VOCABULARY_MULTIPLE, get_padded_vocab_size, get_zero_shard
from planner.facts.spec import JobSpec
from planner.facts.spec_rules import find_unsupported_fields
from planner.facts.stages import get_local_units, get_stage_layers
from planner.hardware.catalog import CLUSTERS, DEFAULT_CLUSTER
from planner.hardware.cluster import Basis, Cluster, get_filled_per_node, get_node_span

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
    is a share of the dense peak of all ranks."""

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


class ClusterEstimate(TypedDict):
    """Where the ranks stand. `crossing`: which axes meet over the network."""

    name: str
    accelerator: str
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
    rank_bytes: dict[str, dict[str, int]]
    exact_traffic: bool
    cluster: ClusterEstimate
    fits: bool
    tight: NotRequired[bool]
    time: TimeEstimate


def estimate(spec: JobSpec, cluster: Cluster | None = None) -> Estimate:
    """Cost of a valid spec by stage, on `cluster` (by default the one named for the spec's device).

    `rank_bytes` holds, by rank, the ranks whose payload bytes of a step differ from their stage's first rank, by axis:
    ZeRO with sequence parallelism, where the last shard of a tensor may be short.
    """
    layout = spec.layout
    cluster = cluster or default_cluster(spec)
    twins = _twins(spec)
    stages = _stages(spec, twins, cluster)
    peak, room = max(stage["memory_bytes"] for stage in stages), cluster.accelerator.memory_bytes
    sure = memory_interval(cluster, spec, memory_correction(cluster.runs), peak)
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
        rank_bytes=_exceptions(spec, twins, stages, cluster),
        exact_traffic=traffic_kind(spec) == EXACT,
        cluster=_where(spec, cluster),
        fits=peak <= room,
        tight=peak <= room < peak * (1 + sure["share"]),
        time=_time(spec, cluster),
    )
    if aligned := aligned_vocabulary(spec, cluster, made["time"]["step_s"]):
        made["aligned_vocabulary"] = aligned
    return made


def aligned_vocabulary(spec: JobSpec, cluster: Cluster, step_s: float) -> AlignedVocabulary | None:
    """The next multiple of 128 x tp, where it spares a hundredth of the step's time on a GPU or more."""
    size, multiple = spec.model.vocab_size, VOCABULARY_MULTIPLE * spec.layout.tp
    larger = -(-size // multiple) * multiple
    if cluster.device == "cpu" or larger == get_padded_vocab_size(size, spec.layout.tp):
        return None
    model = spec.model.model_copy(update={"vocab_size": larger})
    own, aligned = (Timer(cluster).predicted(one).step_s for one in (spec, spec.model_copy(update={"model": model})))
    share = 1 - aligned / own
    return AlignedVocabulary(vocab_size=larger, spares_s=share * step_s) if share >= 0.01 else None


def traffic_kind(spec: JobSpec) -> str:
    """How far to trust bytes and calls, in words."""
    if find_unsupported_fields(spec):
        return "estimated: the trainer does not support this layout"
    if depends_on_router(spec):
        return "exact except ep, which assumes evenly spread tokens"
    return EXACT


def stage_estimates(spec: JobSpec) -> list[StageEstimate]:
    """What `estimate` says of each stage, on the cluster of the spec's device."""
    return _stages(spec, _twins(spec), default_cluster(spec))


def default_cluster(spec: JobSpec) -> Cluster:
    """The named cluster that stands for the spec's device."""
    return CLUSTERS[DEFAULT_CLUSTER[spec.resources.device]]


def rank_memory(spec: JobSpec, stage: int, cluster: Cluster) -> dict[str, int]:
    """`planner.cost.memory.memory`, and the allowance for what the device keeps for itself and for fragmentation."""
    parts = memory(on(cluster, spec), stage)
    parts["allowance"] = allowance(spec, cluster, sum(parts.values()))
    return parts


def _stages(spec: JobSpec, twins: Sequence[int], cluster: Cluster) -> list[StageEstimate]:
    traffic = {twin: _traffic(spec, Coordinates(pp=twin), cluster) for twin in set(twins)}
    return [_stage(spec, stage, traffic[twin], cluster) for stage, twin in enumerate(twins)]


def _twins(spec: JobSpec) -> list[int]:
    """For each stage, the first that holds as much of the model and so sends the same."""
    first: dict[tuple[object, ...], int] = {}
    twins = []
    for index in range(spec.layout.pp):
        stage = get_stage_layers(spec, index).stage
        moe = spec.model.moe.dense_layers if spec.model.moe else 0
        kinds = tuple((len(chunk), sum(i >= moe for i in chunk)) for chunk in stage.chunks)
        key = (kinds, stage.first, stage.last, is_v_turn(spec.layout, index))
        twins.append(first.setdefault(key, index))
    return twins


def _traffic(spec: JobSpec, place: Coordinates, cluster: Cluster) -> list[TrafficRow]:
    return [_row(spec, c, cluster) for c in step_traffic(spec, get_rank(place, spec.layout))]


def _row(spec: JobSpec, c: Collective, cluster: Cluster) -> TrafficRow:
    return TrafficRow(
        op=c.op,
        axis=c.axis,
        group_size=c.group_size,
        stride=c.stride,
        count=c.count,
        payload_bytes=c.payload_bytes,
        algorithmic_bytes=compute_algorithmic_bytes(c.op, c.payload_bytes, c.group_size),
        between_nodes=get_node_span(c.group_size, c.stride, cluster.per_node, spec.layout.world_size).nodes > 1,
    )


def _stage(spec: JobSpec, stage: int, traffic: list[TrafficRow], cluster: Cluster) -> StageEstimate:
    components = rank_memory(spec, stage, cluster)
    return StageEstimate(
        stage=stage,
        layers=[[chunk.start, chunk.stop] for chunk in get_stage_layers(spec, stage).stage.chunks],
        parameters=held_parameters(spec, stage),
        padded_share=padded_share(spec, stage),
        memory=components,
        memory_bytes=sum(components.values()),
        gradients_bytes=gradient_bytes(spec, stage),
        traffic=traffic,
        step_bytes=_by_axis(traffic),
    )


def _by_axis(traffic: list[TrafficRow]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for row in traffic:
        totals[row["axis"]] = totals.get(row["axis"], 0) + row["payload_bytes"]
    return totals


def _where(spec: JobSpec, cluster: Cluster) -> ClusterEstimate:
    layout = spec.layout
    crossing = {}
    for axis in ("tp", "cp", "ep", "dp", "pp"):
        group = get_axis_group(layout, axis)
        if group.size > 1:
            crossing[axis] = get_node_span(group.size, group.stride, cluster.per_node, layout.world_size).nodes > 1
    return ClusterEstimate(
        name=cluster.name,
        accelerator=cluster.accelerator.name,
        per_node=cluster.per_node,
        nodes=-(-layout.world_size // get_filled_per_node(layout.world_size, cluster.per_node)),
        memory_bytes=cluster.accelerator.memory_bytes,
        reserved_bytes=cluster.accelerator.reserved_bytes,
        crossing=crossing,
    )


def _time(spec: JobSpec, cluster: Cluster) -> TimeEstimate:
    timer = Timer(cluster)
    timing, mean = timer.step(spec), timer.over_ranks(spec)
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
        interval=interval(cluster, spec, timer.correction(spec), timing.host_share),
    )


def _exceptions(
    spec: JobSpec, twins: list[int], stages: list[StageEstimate], cluster: Cluster
) -> dict[str, dict[str, int]]:
    layout = spec.layout
    if not layout.zero:
        return {}
    found = {}
    for twin in sorted(set(twins)):
        usual = stages[twin]["step_bytes"]
        alike = [stage for stage in range(layout.pp) if twins[stage] == twin]
        for shards in _alike_shards(spec, twin):
            by_axis = _by_axis(_traffic(spec, _shard_place(spec, twin, shards.start), cluster))
            if by_axis == usual:
                continue
            for replica in range(layout.dp_replicas):
                for index in shards:
                    place = _shard_place(spec, twin, replica * layout.shard_ranks + index)
                    ranks = (place._replace(pp=stage, tp=tp) for stage in alike for tp in range(layout.tp))
                    found.update({str(get_rank(rank, layout)): by_axis for rank in ranks})
    return found


def _shard_place(spec: JobSpec, stage: int, index: int) -> Coordinates:
    dp, cp = divmod(index, spec.layout.cp)
    return Coordinates(pp=stage, dp=dp, cp=cp)


def _alike_shards(spec: JobSpec, stage: int) -> list[range]:
    """Runs of shard indices that hold equally many rows of every tensor, and so send alike.

    A dim has full shards, then at most one short shard, then empty ones: only their ends can differ.
    """
    degree = spec.layout.shard_ranks
    edges = {0, degree}
    for shape in {p.shape for unit in get_local_units(spec, stage) for p in unit.parameters}:
        shard = get_zero_shard(shape, degree)
        if shard:
            full, rest = divmod(shape[shard.dim], shard.rows)
            edges |= {full, full + (rest > 0)}
    return [range(start, stop) for start, stop in pairwise(sorted(edge for edge in edges if edge <= degree))]
