"""A pipe's slowest stage on one micro-batch: what it computes, what it waits, what of that shows.

Seconds throughout.
"""

from __future__ import annotations

from typing import NamedTuple

from contracts.telemetry.words import Axis
from planner.cost.compute import Halves
from planner.cost.pipes import bubble_ratio
from planner.facts.spec import JobSpec


class Pace(NamedTuple):
    """The slowest stage on one micro-batch: its compute, its waits by axis, all together; and all stages in turn."""

    halves: Halves
    waits: dict[Axis, float]
    micro_batch_s: float
    once_s: float


def micro_batch_s(stage: tuple[Halves, dict[Axis, float]]) -> float:
    """Seconds that a stage works on one micro-batch, and waits."""
    halves, waits = stage
    return halves.total_s + halves.launch_s + sum(waits.values())


def unhidden(seconds: float, hidden: float, halves: Halves) -> float:
    """What is left of a wait: nothing hides behind more than there is to compute."""
    return seconds - min(hidden * seconds, halves.total_s)


def less(halves: Halves, seconds: float) -> Halves:
    """So many seconds of a piece were not compute, in every half alike."""
    return Halves(*(part * (1 - seconds / halves.total_s) for part in halves))


def scaled(pace: Pace, times: float) -> Pace:
    """All of it so many times as long."""
    halves = Halves(*(part * times for part in pace.halves))
    waits = {axis: seconds * times for axis, seconds in pace.waits.items()}
    return Pace(halves, waits, pace.micro_batch_s * times, pace.once_s * times)


def bubble(spec: JobSpec, pace: Pace) -> float:
    """Seconds the slowest stage idles while the pipe fills and drains through the others."""
    if spec.layout.pp == 1:
        return 0.0
    halves = pace.halves
    inputs = halves.backward_input_s + halves.recompute_s
    ratio = bubble_ratio(spec.layout, spec.train.micro_batches, halves.forward_s, inputs, halves.backward_weight_s)
    return (pace.once_s - pace.micro_batch_s) * ratio


def filling(spec: JobSpec) -> float:
    """Share of a rank's chunks whose forward fills the pipe and whose backward drains it, with nothing of the other
    kind to run beside (Megatron's schedules.py, `get_pp_rank_microbatches`)."""
    layout = spec.layout
    chunks = layout.pp - 1
    if layout.virtual_stages > 1:
        chunks = 2 * chunks + (layout.virtual_stages - 1) * layout.pp
    return min(1.0, (chunks + 1) / (spec.train.micro_batches * layout.virtual_stages))
