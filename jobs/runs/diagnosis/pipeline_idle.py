"""Compute how long a pipeline idles: because of its schedule, and because its stages take different times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean, median
from typing import NamedTuple

from jobs.runs.diagnosis.traced_step import BlockedTimes, RankStep, TracedStep
from planner.cost.pipeline_simulation import simulate
from planner.facts.layout import get_coordinates
from planner.facts.schedules import splits_backward
from planner.facts.spec import JobSpec, Layout
from planner.facts.stages import compute_head_cost, get_stage_chunks

PIPELINE_WORK = ("forward", "backward", "weights")


class PipelineIdle(NamedTuple):
    """Hold the idle time of one step in seconds.

    Args:
        bubble_s: Idle time of the schedule if all stages took the mean time.
        uneven_s: Additional step time because stages differ.
        stages: Compute time of each stage.
        slowest: A rank of the slowest stage.
        over: Excess of the slowest stage over its share of the model, as a fraction.
    """

    bubble_s: float
    uneven_s: float
    stages: tuple[float, ...]
    slowest: int
    over: float


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
        return simulate(
            layout, m, forward_s=forward_s, inputs_s=inputs_s, weights_s=weights_s, longer=tuple(factors)
        ).step_s

    even = simulate_step([1.0] * layout.pp)
    uneven = simulate_step(total / mean for total in totals)
    model_shares = _get_model_shares(spec)
    over = [total / mean / part for total, part in zip(totals, model_shares, strict=True)]
    slowest = max(range(layout.pp), key=lambda stage: totals[stage])
    return PipelineIdle(
        even - mean, max(0.0, uneven - even), totals, slowest_ranks[slowest], over[slowest] / median(over) - 1
    )


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
