"""Keep the last traced steps of a run, reduced to what the diagnosis needs.

A pipeline idles because of its schedule, and because its stages take different times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean, median
from typing import NamedTuple

from contracts.telemetry.items import TimelineItem
from jobs.core.verdict_schema import MAX_WAITS, Wait
from jobs.runs.diagnosis.collective_timing import (
    Charge,
    PipelineWaits,
    TransferRoute,
    TransferStats,
    charge_waits,
    match_calls,
    sum_transfers,
)
from jobs.runs.diagnosis.planned_run import PlannedRun
from jobs.runs.diagnosis.traced_step import (
    BlockedTimes,
    HostClocks,
    RankStep,
    StepCollector,
    TracedStep,
    compute_own_seconds,
)
from planner.cost.pipeline_simulation import simulate
from planner.facts.layout import get_coordinates
from planner.facts.schedules import splits_backward
from planner.facts.spec import JobSpec, Layout
from planner.facts.stages import compute_head_cost, get_stage_chunks

WINDOW_STEPS = 64
MIN_INTERVAL_S = 0.25  # between steps, so that the window covers at least 16 s
BASELINE_STEPS = 16  # first steps, which show the normal speed of links
RECENT_STEPS = 8  # for the speed of links
MIN_STAGE_EXCESS = 0.25  # of a stage over its share of the model: less comes from uneven layers


class StepSummary(NamedTuple):
    """Summarize a step. `charges`: the mean wait of other ranks, by axis and the rank that caused it."""

    number: int
    ended: float
    step_s: float
    charges: dict[Charge, float]
    came_last: dict[Charge, int]
    calls: dict[Charge, int]
    waiting: dict[str, float]  # time blocked by late ranks, by axis
    inferred: dict[str, float]  # blocked time that the meter counted as compute, by axis
    pipeline_idle: PipelineIdle | None
    own: dict[int, dict[str, float]]  # unblocked seconds, by rank and work
    moving: dict[int, float]  # seconds blocked by transfers, by rank
    experts: dict[int, int]  # bytes of all-to-alls, by rank
    transfers: dict[TransferRoute, TransferStats]

    def get_wait_by_rank(self) -> dict[int, float]:
        """Return the wait that each rank caused on all axes."""
        total: dict[int, float] = {}
        for (_, rank), seconds in self.charges.items():
            total[rank] = total.get(rank, 0.0) + seconds
        return total


def summarize_step(run: PlannedRun, step: TracedStep, clocks: HostClocks) -> StepSummary:
    matched, world_size = match_calls(step, clocks), len(step.ranks)
    spec = run.spec  # None for scripts, whose ranks are all in stage 0
    waits = PipelineWaits(matched, lambda rank: get_coordinates(rank, spec.layout).pp if spec is not None else 0)
    wait_charges = charge_waits(matched, waits)
    charges = wait_charges.mean(world_size)
    pipeline_idle = compute_pipeline_idle(spec, step) if spec is not None else None
    waiting: dict[str, float] = {}
    for call in matched:
        waiting[call.group.axis] = waiting.get(call.group.axis, 0.0) + sum(call.waits.values()) / world_size
    if pipeline_idle is not None:
        waiting["pp"] = max(0.0, waiting.get("pp", 0.0) - pipeline_idle.bubble_s)
        if pipeline_idle.over > MIN_STAGE_EXCESS:
            charges["pp", pipeline_idle.slowest] = (
                charges.get(("pp", pipeline_idle.slowest), 0.0) + pipeline_idle.uneven_s
            )
    return StepSummary(
        number=step.number,
        ended=max(rank_step.began + rank_step.step_s for rank_step in step.ranks.values()),
        step_s=step.step_s,
        charges=charges,
        came_last=wait_charges.came_last,
        calls=wait_charges.calls,
        waiting=waiting,
        inferred={
            axis: sum(rank_step.inferred_s.get(axis, 0.0) for rank_step in step.ranks.values()) / world_size
            for axis in {axis for rank_step in step.ranks.values() for axis in rank_step.inferred_s}
        },
        pipeline_idle=pipeline_idle,
        own={rank: compute_own_seconds(rank_step) for rank, rank_step in step.ranks.items()},
        moving={rank: sum(call.exposed.get(rank, 0.0) for call in matched) for rank in step.ranks},
        experts={
            rank: sum(call.payload_bytes for call in rank_step.calls if call.op == "all_to_all")
            for rank, rank_step in step.ranks.items()
        },
        transfers=sum_transfers(matched),
    )


class StepWindow:
    """Collect traced steps, except warm-up steps."""

    def __init__(self, run: PlannedRun, clocks: HostClocks) -> None:
        self._run, self._clocks = run, clocks
        self._collector = StepCollector(run.world_size, clocks)
        self._steps: deque[StepSummary] = deque(maxlen=WINDOW_STEPS)
        self.sampled = 0
        self.last: TracedStep | None = None
        self.usual: dict[TransferRoute, list[float]] = {}  # seconds per transfer in the baseline steps

    def add(self, item: TimelineItem, node: int, first: int) -> None:
        """Add an item. `first`: the first step after the warm-up."""
        last = self._steps[-1] if self._steps else None
        if item["step"] < first or (last is not None and item["step"] <= last.number):
            return
        step = self._collector.add(item, node)
        if step is None:
            return
        self.last = step
        ended = max(stats.began + stats.step_s for stats in step.ranks.values())
        if last is not None and ended - last.ended < MIN_INTERVAL_S:
            return
        summary = summarize_step(self._run, step, self._clocks)
        self._steps.append(summary)
        self.sampled += 1
        if self.sampled <= BASELINE_STEPS:
            for route, stats in summary.transfers.items():
                self.usual.setdefault(route, []).append(stats.transfer_s / stats.calls)

    @property
    def steps(self) -> list[StepSummary]:
        return list(self._steps)

    def compute_mean(self, get_values: Callable[[StepSummary], dict[str, float]]) -> dict[str, float]:
        """Return the mean over steps, by axis."""
        values = [get_values(step) for step in self._steps]
        return {
            axis: fmean(by_axis.get(axis, 0.0) for by_axis in values)
            for axis in {axis for by_axis in values for axis in by_axis}
        }

    def get_bubble_s(self) -> float | None:
        bubbles = [step.pipeline_idle.bubble_s for step in self._steps if step.pipeline_idle is not None]
        return median(bubbles) if bubbles else None

    def get_transfers(self) -> list[dict[TransferRoute, TransferStats]]:
        return [step.transfers for step in list(self._steps)[-RECENT_STEPS:]]

    def get_waits(self, since: dict[int, int]) -> list[Wait]:
        """Return the largest waits. `since`: the step in which each straggler became one."""
        if not self._steps:
            return []
        total: dict[Charge, float] = {}
        for step in self._steps:
            for key, seconds in step.charges.items():
                total[key] = total.get(key, 0.0) + seconds
        step_s = fmean(step.step_s for step in self._steps)
        largest = sorted(total, key=lambda key: -total[key])[:MAX_WAITS]
        return [self._serialize_wait(key, total[key] / len(self._steps), step_s, since) for key in largest]

    def _serialize_wait(self, key: Charge, seconds: float, step_s: float, since: dict[int, int]) -> Wait:
        axis, rank = key
        calls = sum(step.calls.get(key, 0) for step in self._steps)
        return {
            "axis": axis,
            "rank": rank,
            "host": self._run.get_host(rank),
            "seconds": seconds,
            "share": seconds / step_s if step_s else 0.0,
            "last_in": sum(step.came_last.get(key, 0) for step in self._steps) / calls if calls else 0.0,
            "calls": calls,
            "since_step": since.get(rank, self._steps[0].number),
        }


PIPELINE_WORK = ("forward", "backward", "weights")


class PipelineIdle(NamedTuple):
    """Hold the idle time of one step in seconds."""

    bubble_s: float  # idle time of the schedule if all stages took the mean time
    uneven_s: float  # additional step time because stages differ
    slowest: int  # a rank of the slowest stage
    over: float  # excess of the slowest stage over its share of the model, as a fraction


class WorkSeconds(NamedTuple):
    """Hold compute seconds of a rank's step. `backward` is for inputs only if the schedule splits backward."""

    forward: float
    backward: float
    weights: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.weights


def compute_pipeline_idle(spec: JobSpec, step: TracedStep) -> PipelineIdle | None:
    """Simulate the schedule with measured times. Return None without a pipeline or without traced actions."""
    layout, m = spec.layout, spec.train.micro_batches
    if layout.pp == 1:
        return None
    work_by_rank = {rank: _measure_work(chunk_s) for rank, chunk_s in step.ranks.items()}
    if any(works.total <= 0 for works in work_by_rank.values()):
        return None
    slowest_ranks = [_find_slowest_rank(work_by_rank, layout, stage) for stage in range(layout.pp)]
    totals = tuple(work_by_rank[rank].total for rank in slowest_ranks)
    mean = fmean(totals)
    work_shares = [fmean(work_by_rank[rank][i] / work_by_rank[rank].total for rank in slowest_ranks) for i in range(3)]
    chunk_s = mean / m / layout.virtual_stages
    forward_s, inputs_s, weights_s = (share * chunk_s for share in work_shares)
    if not splits_backward(layout):
        inputs_s, weights_s = inputs_s + weights_s, 0.0

    def simulate_step(factors: Iterable[float]) -> float:
        times = {"forward_s": forward_s, "inputs_s": inputs_s, "weights_s": weights_s}
        return simulate(layout, m, **times, slowdowns=tuple(factors)).step_s

    even = simulate_step([1.0] * layout.pp)
    uneven = simulate_step(total / mean for total in totals)
    model_shares = _get_model_shares(spec)
    over = [total / mean / part for total, part in zip(totals, model_shares, strict=True)]
    slowest = max(range(layout.pp), key=lambda stage: totals[stage])
    return PipelineIdle(even - mean, max(0.0, uneven - even), slowest_ranks[slowest], over[slowest] / median(over) - 1)


def _measure_work(rank_step: RankStep) -> WorkSeconds:
    """Return the work from the first to the last action. Time between actions counts as forward."""
    actions = [span for span in rank_step.spans if span.work in PIPELINE_WORK and span.micro_batch >= 0]
    if not actions:
        return WorkSeconds(0.0, 0.0, 0.0)
    blocked, seconds_by_work = BlockedTimes(rank_step), dict.fromkeys(PIPELINE_WORK, 0.0)
    for span in actions:
        seconds_by_work[span.work] += blocked.get_unblocked_s(span.began, span.ended)
    total_s = blocked.get_unblocked_s(min(span.began for span in actions), max(span.ended for span in actions))
    between_s = max(0.0, total_s - sum(seconds_by_work.values()))
    return WorkSeconds(seconds_by_work["forward"] + between_s, seconds_by_work["backward"], seconds_by_work["weights"])


def _find_slowest_rank(work_by_rank: Mapping[int, WorkSeconds], layout: Layout, stage: int) -> int:
    """Return the slowest rank of a stage in its fastest replica, so that one slow replica does not count."""
    slowest: dict[int, int] = {}
    for rank, works in work_by_rank.items():
        position = get_coordinates(rank, layout)
        if position.pp == stage and (
            position.dp not in slowest or works.total > work_by_rank[slowest[position.dp]].total
        ):
            slowest[position.dp] = rank
    return min(slowest.values(), key=lambda rank: work_by_rank[rank].total)


def _get_model_shares(spec: JobSpec) -> list[float]:
    """Return the layers of each stage relative to the mean. The head counts as the layers that it costs."""
    layers = []
    for index in range(spec.layout.pp):
        stage = get_stage_chunks(spec.model, spec.layout, index)
        layers.append(len(stage.layers) + (compute_head_cost(spec.model) if stage.last else 0.0))
    return [of / fmean(layers) for of in layers]
