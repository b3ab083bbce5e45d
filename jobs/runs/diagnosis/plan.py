"""The planned step as the parts that are measured too."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, get_args

from contracts.telemetry.vocabulary import Axis
from jobs.core.verdict_schema import StepPart, StepParts
from jobs.runs.diagnosis.run import Run
from planner.cost.resolved_plan import resolve
from planner.cost.traffic import step_traffic
from planner.facts.layout import Coordinates, get_rank
from planner.facts.spec import JobSpec
from planner.hardware.cluster import Cluster, get_node_span
from planner.hardware.kernel_time import compute_collective_seconds

COMPUTE = {"compute", "recompute", "launch"}  # of an estimate's parts: what a rank cannot tell apart
AXES = frozenset(get_args(Axis))


def planned(run: Run) -> StepParts | None:
    """As told at submit. None where there is no plan, or one of an older version."""
    time: dict[str, Any] = run.estimate.get("time") or {} if run.spec else {}
    if "parts" not in time or "interval" not in time:
        return None
    told = {part["name"]: float(part["seconds"]) for part in time["parts"]}
    parts = [_part("compute", "compute", sum(s for name, s in told.items() if name in COMPUTE))]
    parts += [_part(name, "exposed", s) for name, s in told.items() if name in AXES]
    parts += [_part(name, name, told[name]) for name in ("bubble", "optimizer") if told.get(name)]
    if run.cluster is not None and run.spec is not None:
        parts += _hidden(run.spec, run.cluster, told)
    return {"step_s": time["step_s"], "sure": time["interval"]["share"], "steps": 0, "parts": parts}


def _hidden(spec: JobSpec, cluster: Cluster, exposed: dict[str, float]) -> list[StepPart]:
    """What collectives take by the links' speed beyond what is exposed, in the mean of all stages as that is."""
    mean: dict[str, float] = defaultdict(float)
    for stages in resolve(spec).partition.equal_stages:
        for axis, seconds in _collectives(spec, cluster, stages[0]).items():
            mean[axis] += seconds * len(stages) / spec.layout.pp
    found = {axis: seconds - exposed.get(axis, 0.0) for axis, seconds in mean.items()}
    return [_part(axis, "hidden", s) for axis, s in found.items() if s > 0.001 * sum(exposed.values())]


def _collectives(spec: JobSpec, cluster: Cluster, stage: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in step_traffic(spec, get_rank(Coordinates(pp=stage), spec.layout)):
        if row.op == "recv" or not row.count:  # the sender's time is counted
            continue
        group = get_node_span(row.group_size, row.stride, cluster.per_node, spec.layout.world_size)
        seconds = row.count * compute_collective_seconds(row.op, row.payload_bytes / row.count, group, cluster)
        found[row.axis] = found.get(row.axis, 0.0) + seconds
    return found


def _part(name: str, kind: str, seconds: float) -> StepPart:
    return {"name": name, "kind": kind, "seconds": seconds, "waiting_s": 0.0}  # type: ignore[typeddict-item]
