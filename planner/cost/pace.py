"""A pipe's slowest stage on one micro-batch: what it computes, what it waits, what of that shows.

Seconds throughout.
"""

from __future__ import annotations

from typing import NamedTuple

from contracts.telemetry.vocabulary import Axis
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


def in_turns(spec: JobSpec, seconds: float, beside: float, *, own: bool) -> float:
    """What shows of an interleaved pipe's gathers, or sums, one chunk's after the other: all of one, and what is longer
    than its turns with the micro-batches that fill the pipe, or drain it. `beside`: a stage's seconds of one; `own`: a
    chunk computes with what of it has come (schedules.py of Megatron, where a chunk's sums wait for all of it)."""
    layout = spec.layout
    chunks, units = layout.virtual_stages, max(1, spec.model.num_layers // layout.pp)
    later = min(layout.pp, spec.train.micro_batches) * (chunks - 1) / chunks * beside
    hidden = beside / chunks if own else 0.0
    return max(seconds / units, seconds / chunks - hidden, seconds - hidden - later)
