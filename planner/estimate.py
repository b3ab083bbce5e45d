"""Everything the submit page and the API say of a spec before it runs."""

from __future__ import annotations

from itertools import pairwise
from typing import TypedDict

from contracts.telemetry import Axis, Op
from planner.collectives import algorithmic_bytes
from planner.layout import Coordinates, rank_of, stage_layers
from planner.memory import held_parameters, memory
from planner.models import parameter_count
from planner.spec import JobSpec
from planner.traffic import local_units, step_traffic


class TrafficRow(TypedDict):
    """All calls of one op on one axis in one step of one rank."""

    op: Op
    axis: Axis
    group_size: int
    count: int
    payload_bytes: int
    algorithmic_bytes: int


class StageEstimate(TypedDict):
    """One rank of a pipeline stage; the ranks of a stage send alike."""

    stage: int
    layers: list[int]
    parameters: int
    memory: dict[str, int]
    memory_bytes: int
    traffic: list[TrafficRow]
    step_bytes: dict[str, int]


class Estimate(TypedDict):
    """Traffic is exact, memory an estimate. Sizes in bytes."""

    world_size: int
    axes: dict[str, int]
    model_parameters: int
    micro_batch_size: int
    tokens_per_step: int
    stages: list[StageEstimate]
    peak_memory_bytes: int
    rank_bytes: dict[str, dict[str, int]]


def estimate(spec: JobSpec) -> Estimate:
    """Cost of a valid spec by stage.

    `rank_bytes` holds, by rank, the ranks whose payload bytes of a step differ from their stage's first rank, by axis:
    ZeRO with sequence parallelism, where the last shard of a tensor may be short.
    """
    layout = spec.layout
    traffic = {stage: _traffic(spec, Coordinates(stage, 0, 0)) for stage in _unlike_stages(layout.pp)}
    stages = [_stage(spec, stage, traffic[_alike(stage, layout.pp)]) for stage in range(layout.pp)]
    return Estimate(
        world_size=layout.world_size,
        axes={"pp": layout.pp, "dp": layout.dp, "tp": layout.tp},
        model_parameters=parameter_count(spec.model),
        micro_batch_size=spec.micro_batch_size,
        tokens_per_step=spec.train.global_batch * spec.train.seq_len,
        stages=stages,
        peak_memory_bytes=max(stage["memory_bytes"] for stage in stages),
        rank_bytes=_exceptions(spec, stages),
    )


def _alike(stage: int, pp: int) -> int:
    """A stage that sends the same: those between the ends hold equally many layers and nothing else."""
    return stage if stage in (0, pp - 1) else 1


def _unlike_stages(pp: int) -> list[int]:
    return sorted({_alike(stage, pp) for stage in range(pp)})


def _traffic(spec: JobSpec, place: Coordinates) -> list[TrafficRow]:
    return [
        TrafficRow(
            op=c.op,
            axis=c.axis,
            group_size=c.group_size,
            count=c.count,
            payload_bytes=c.payload_bytes,
            algorithmic_bytes=algorithmic_bytes(c.op, c.payload_bytes, c.group_size),
        )
        for c in step_traffic(spec, rank_of(place, spec.layout))
    ]


def _stage(spec: JobSpec, stage: int, traffic: list[TrafficRow]) -> StageEstimate:
    layers = stage_layers(spec.model.num_layers, spec.layout.pp)[stage]
    components = memory(spec, stage)
    return StageEstimate(
        stage=stage,
        layers=[layers.start, layers.stop],
        parameters=held_parameters(spec, stage),
        memory=components,
        memory_bytes=sum(components.values()),
        traffic=traffic,
        step_bytes=_by_axis(traffic),
    )


def _by_axis(traffic: list[TrafficRow]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for row in traffic:
        totals[row["axis"]] = totals.get(row["axis"], 0) + row["payload_bytes"]
    return totals


def _exceptions(spec: JobSpec, stages: list[StageEstimate]) -> dict[str, dict[str, int]]:
    layout = spec.layout
    if not (layout.zero and (layout.sequence_parallel or layout.pp > 1)):
        return {}
    found = {}
    for twin in _unlike_stages(layout.pp):
        usual = stages[twin]["step_bytes"]
        alike = [stage for stage in range(layout.pp) if _alike(stage, layout.pp) == twin]
        for replicas in _alike_replicas(spec, twin):
            by_axis = _by_axis(_traffic(spec, Coordinates(twin, replicas.start, 0)))
            if by_axis == usual:
                continue
            places = (Coordinates(stage, dp, tp) for stage in alike for dp in replicas for tp in range(layout.tp))
            found.update({str(rank_of(place, layout)): by_axis for place in places})
    return found


def _alike_replicas(spec: JobSpec, stage: int) -> list[range]:
    """Runs of dp indices that hold equally many rows of every tensor, and so send alike.

    `shard_rows` gives full shards, then at most one short shard, then empty ones: only their ends can differ.
    """
    dp = spec.layout.dp
    edges = {0, dp}
    for rows in {p.shape[0] for unit in local_units(spec, Coordinates(stage, 0, 0)) for p in unit.parameters}:
        full, rest = divmod(rows, -(-rows // dp))
        edges |= {full, full + (rest > 0)}
    return [range(start, stop) for start, stop in pairwise(sorted(edges))]
