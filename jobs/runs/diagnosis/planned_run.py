"""Describe a run before it reports anything: its spec, its plan, its hardware, and the host of each rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, get_args

from pydantic import ValidationError

from contracts.telemetry.items import Axis
from jobs.core.verdict_schema import StepPart, StepParts
from planner.cost.resolved_plan import resolve
from planner.cost.traffic import get_step_traffic
from planner.facts.kinds import get_kind_rules
from planner.facts.layout import Coordinates, get_rank
from planner.facts.spec import JobSpec
from planner.hardware.cluster import Cluster, get_node_span
from planner.hardware.kernel_time import compute_collective_seconds


class HostRanks(NamedTuple):
    """Hold the consecutive ranks that one host runs."""

    host: str
    first_rank: int
    num_ranks: int


class PlannedRun:
    """Describe an attempt. `spec`, `estimate` and `hardware` are those stored with the job.

    Args:
        submitted, ordered: Unix seconds of the board's clock, None if unknown.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        estimate: Mapping[str, Any],
        world_size: int,
        *,
        hardware: Mapping[str, Any] | None = None,
        members: Sequence[HostRanks] = (),
        submitted: float | None = None,
        ordered: float | None = None,
    ) -> None:
        self.estimate, self.world_size, self.members = estimate, world_size, members
        self.submitted, self.ordered = submitted, ordered
        self._spec, self._hardware = spec, hardware

    @cached_property
    def has_steps(self) -> bool:
        """Return True if ranks take training steps together. Benchmarks, calibrations, and dry runs do not."""
        kind = get_kind_rules(self._spec)
        return not kind.shares_one_slot and not kind.measures_host

    @cached_property
    def is_script(self) -> bool:
        """Return True if the program is a user's script, launched here or elsewhere."""
        return not get_kind_rules(self._spec).trains

    @cached_property
    def spec(self) -> JobSpec | None:
        """Return the spec of a run of Meshboard's trainer, or None for scripts and specs of older versions."""
        kind = get_kind_rules(self._spec)
        if not kind.trains or kind.shares_one_slot:
            return None
        try:
            return JobSpec.model_validate(self._spec)
        except ValidationError:
            return None

    @cached_property
    def cluster(self) -> Cluster | None:
        """Return the hardware for which the run was planned."""
        if self._hardware is None:
            return None
        try:
            return Cluster.model_validate(self._hardware, strict=False)
        except ValidationError:  # stored by an older version
            return None

    def get_node(self, rank: int) -> int:
        """Return the node that runs a rank, 0 if it is unknown."""
        for node, member in enumerate(self.members):
            if member.first_rank <= rank < member.first_rank + member.num_ranks:
                return node
        return 0

    def get_host(self, rank: int) -> str:
        """Return the name of the host that runs a rank, "" if it is unknown."""
        return self.members[self.get_node(rank)].host if self.members and rank >= 0 else ""

    def format_rank(self, rank: int) -> str:
        """Return "rank 5", or "rank 5 on host b" if the run has several hosts."""
        return f"rank {rank} on {self.get_host(rank)}" if len(self.members) > 1 else f"rank {rank}"


COMPUTE_PARTS = {"compute", "recompute", "launch"}  # of an estimate: ranks measure their sum
AXES = frozenset(get_args(Axis))


def get_planned_parts(run: PlannedRun) -> StepParts | None:
    """Return the predicted step with its parts, or None without a plan of this version."""
    time: dict[str, Any] = run.estimate.get("time") or {} if run.spec else {}
    if "parts" not in time or "interval" not in time:
        return None
    seconds_by_part = {part["name"]: float(part["seconds"]) for part in time["parts"]}
    compute_s = sum(seconds for name, seconds in seconds_by_part.items() if name in COMPUTE_PARTS)
    parts = [_make_planned_part("compute", "compute", compute_s)]
    parts += [_make_planned_part(name, "exposed", s) for name, s in seconds_by_part.items() if name in AXES]
    single_parts = [name for name in ("bubble", "optimizer") if seconds_by_part.get(name)]
    parts += [_make_planned_part(name, name, seconds_by_part[name]) for name in single_parts]
    if run.cluster is not None and run.spec is not None:
        parts += _predict_hidden(run.spec, run.cluster, seconds_by_part)
    return {"step_s": time["step_s"], "sure": time["interval"]["share"], "steps": 0, "parts": parts}


def _predict_hidden(spec: JobSpec, cluster: Cluster, exposed: dict[str, float]) -> list[StepPart]:
    """Return the predicted time of collectives that overlaps with compute, as the mean over stages."""
    mean_seconds: dict[str, float] = defaultdict(float)
    for stages in resolve(spec).partition.equal_stages:
        for axis, seconds in _predict_collectives(spec, cluster, stages[0]).items():
            mean_seconds[axis] += seconds * len(stages) / spec.layout.pp
    hidden = {axis: seconds - exposed.get(axis, 0.0) for axis, seconds in mean_seconds.items()}
    return [_make_planned_part(axis, "hidden", s) for axis, s in hidden.items() if s > 0.001 * sum(exposed.values())]


def _predict_collectives(spec: JobSpec, cluster: Cluster, stage: int) -> dict[str, float]:
    """Return the seconds of a stage's collectives by axis."""
    seconds_by_axis: dict[str, float] = {}
    for row in get_step_traffic(spec, get_rank(Coordinates(pp=stage), spec.layout)):
        if row.op == "recv" or not row.count:  # the send is counted
            continue
        group = get_node_span(row.group_size, row.stride, cluster.per_node, spec.layout.world_size)
        seconds = row.count * compute_collective_seconds(row.op, row.payload_bytes / row.count, group, cluster)
        seconds_by_axis[row.axis] = seconds_by_axis.get(row.axis, 0.0) + seconds
    return seconds_by_axis


def _make_planned_part(name: str, kind: str, seconds: float) -> StepPart:
    return {"name": name, "kind": kind, "seconds": seconds, "waiting_s": 0.0}  # type: ignore[typeddict-item]
