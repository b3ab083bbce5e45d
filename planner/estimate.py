"""Everything the submit page and the API say of a spec before it runs."""

from __future__ import annotations

from typing import TypedDict

from contracts.telemetry import Axis, Op
from planner.collectives import algorithmic_bytes
from planner.layout import Coordinates, rank_of, stage_layers
from planner.memory import held_parameters, memory
from planner.models import parameter_count
from planner.spec import JobSpec
from planner.traffic import step_traffic


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
    stages = [_stage(spec, stage) for stage in range(layout.pp)]
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


def _stage(spec: JobSpec, stage: int) -> StageEstimate:
    layers = stage_layers(spec.model.num_layers, spec.layout.pp)[stage]
    components = memory(spec, stage)
    traffic = [
        TrafficRow(
            op=c.op,
            axis=c.axis,
            group_size=c.group_size,
            count=c.count,
            payload_bytes=c.payload_bytes,
            algorithmic_bytes=algorithmic_bytes(c.op, c.payload_bytes, c.group_size),
        )
        for c in step_traffic(spec, rank_of(Coordinates(stage, 0, 0), spec.layout))
    ]
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
    for stage in stages:
        for dp in range(1, layout.dp):
            first = rank_of(Coordinates(stage["stage"], dp, 0), layout)
            by_axis: dict[str, int] = {}
            for c in step_traffic(spec, first):
                by_axis[c.axis] = by_axis.get(c.axis, 0) + c.payload_bytes
            if by_axis != stage["step_bytes"]:
                found.update({str(first + tp): by_axis for tp in range(layout.tp)})
    return found
