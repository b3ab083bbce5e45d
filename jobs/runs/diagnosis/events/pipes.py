"""What a pipeline idles: by its schedule, and because its stages take unlike time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean, median
from typing import NamedTuple

from jobs.runs.diagnosis.events.step import RankStep, Step, Stood
from planner.cost.pipes import simulate
from planner.facts.layout import get_coordinates
from planner.facts.schedules import splits_backward
from planner.facts.spec import JobSpec, Layout
from planner.facts.stages import compute_head_cost, get_stage_chunks

WORKS = ("forward", "backward", "weights")


class Pipe(NamedTuple):
    """Of one step, seconds. `bubble_s`: what its schedule idles with stages that all take what they take on average;
    `uneven_s`: what the step takes longer because they do not. `stages`: what each computes in the step. `slowest`: the
    rank of the stage that takes most, which bears it, and `over` by which share more than its part of the model."""

    bubble_s: float
    uneven_s: float
    stages: tuple[float, ...]
    slowest: int
    over: float


class Works(NamedTuple):
    """Seconds of a step that a rank computed forward, backward (of inputs, where the schedule tells), of weights."""

    forward: float
    backward: float
    weights: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.weights


def pipe_of(spec: JobSpec, step: Step) -> Pipe | None:
    """Run the schedule on paper with what its actions took. None without a pipeline, or where no actions were told."""
    layout, m = spec.layout, spec.train.micro_batches
    if layout.pp == 1:
        return None
    found = {rank: _works(one) for rank, one in step.ranks.items()}
    if any(works.total <= 0 for works in found.values()):
        return None
    bearers = [_bearer(found, layout, stage) for stage in range(layout.pp)]
    totals = tuple(found[rank].total for rank in bearers)
    mean = fmean(totals)
    shares = [fmean(found[rank][i] / found[rank].total for rank in bearers) for i in range(3)]
    one = mean / m / layout.virtual_stages
    forward_s, inputs_s, weights_s = (share * one for share in shares)
    if not splits_backward(layout):
        inputs_s, weights_s = inputs_s + weights_s, 0.0

    def run(longer: Iterable[float]) -> float:
        return simulate(
            layout, m, forward_s=forward_s, inputs_s=inputs_s, weights_s=weights_s, longer=tuple(longer)
        ).step_s

    even = run([1.0] * layout.pp)
    uneven = run(total / mean for total in totals)
    parts = _parts(spec)
    over = [total / mean / part for total, part in zip(totals, parts, strict=True)]
    slowest = max(range(layout.pp), key=lambda stage: totals[stage])
    return Pipe(even - mean, max(0.0, uneven - even), totals, bearers[slowest], over[slowest] / median(over) - 1)


def _works(one: RankStep) -> Works:
    """From its first action to its last. What it did between them belongs to them: forward, where nothing says more."""
    actions = [span for span in one.spans if span.work in WORKS and span.micro_batch >= 0]
    if not actions:
        return Works(0.0, 0.0, 0.0)
    still, took = Stood(one), dict.fromkeys(WORKS, 0.0)
    for span in actions:
        took[span.work] += still.rest(span.began, span.ended)
    whole = still.rest(min(span.began for span in actions), max(span.ended for span in actions))
    between = max(0.0, whole - sum(took.values()))
    return Works(took["forward"] + between, took["backward"], took["weights"])


def _bearer(found: Mapping[int, Works], layout: Layout, stage: int) -> int:
    """The rank that a stage waits for, in the replica that is fastest: what one replica alone suffers is a rank's."""
    slowest: dict[int, int] = {}
    for rank, works in found.items():
        place = get_coordinates(rank, layout)
        if place.pp == stage and (place.dp not in slowest or works.total > found[slowest[place.dp]].total):
            slowest[place.dp] = rank
    return min(slowest.values(), key=lambda rank: found[rank].total)


def _parts(spec: JobSpec) -> list[float]:
    """What each stage holds of the model, over an even part; the head counts as the layers that it costs."""
    layers = []
    for index in range(spec.layout.pp):
        stage = get_stage_chunks(spec.model, spec.layout, index)
        layers.append(len(stage.layers) + (compute_head_cost(spec.model) if stage.last else 0.0))
    return [of / fmean(layers) for of in layers]
