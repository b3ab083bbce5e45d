"""A step's time by part, and the time of the slowest pipeline stage on one micro-batch. All times are seconds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from contracts.telemetry.vocabulary import Axis
from planner.cost.compute import Halves
from planner.cost.pipes import bubble_ratio
from planner.cost.resolved_plan import ResolvedPlan


class Pace(NamedTuple):
    """The slowest stage on one micro-batch.

    Attributes:
        halves: its compute.
        waits: its exposed waits by axis.
        micro_batch_s: compute and waits together.
        once_s: one micro-batch through all stages.
    """

    halves: Halves
    waits: dict[Axis, float]
    micro_batch_s: float
    once_s: float


class Parts(NamedTuple):
    """Seconds per step of a stage without its idle time, and per micro-batch of its forward and both backwards.

    Attributes:
        exposed_s: communication that compute does not overlap, by axis.
        launch_s: time that the device waits for its host.
        backward_input_s: backward of inputs, with recomputed kernels.
    """

    compute_s: float
    recompute_s: float
    exposed_s: dict[Axis, float]
    launch_s: float
    optimizer_s: float
    forward_s: float
    backward_input_s: float
    backward_weight_s: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.recompute_s + sum(self.exposed_s.values()) + self.launch_s + self.optimizer_s


class Timing(NamedTuple):
    """Seconds of one step of the slowest stage or the mean stage. `Parts` and the bubble add up to `step_s`."""

    step_s: float
    compute_s: float
    recompute_s: float
    exposed_s: dict[Axis, float]
    launch_s: float
    optimizer_s: float
    bubble_s: float
    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    model_flops: int
    hardware_flops: int
    mfu: float
    hfu: float
    tokens_per_s: float

    @property
    def host_share(self) -> float:
        """Share of the step in which the device waits for its host."""
        return self.launch_s / self.step_s


def average_parts(weighed: Iterable[tuple[float, Parts]]) -> Parts:
    """Return the mean of (share, parts). The shares add up to 1."""
    rows = list(weighed)
    plain = [name for name in Parts._fields if name != "exposed_s"]
    seconds = {name: sum(share * getattr(parts, name) for share, parts in rows) for name in plain}
    axes = dict.fromkeys(axis for _, parts in rows for axis in parts.exposed_s)
    exposed = {axis: sum(share * parts.exposed_s.get(axis, 0.0) for share, parts in rows) for axis in axes}
    return Parts(**seconds, exposed_s=exposed)


def correct(timing: Timing, ratio: float) -> Timing:
    """Return the timing with all seconds multiplied by `ratio`."""
    whole = ("model_flops", "hardware_flops", "mfu", "hfu", "tokens_per_s", "exposed_s")
    seconds = {name: value * ratio for name, value in timing._asdict().items() if name not in whole}
    shares = {name: getattr(timing, name) / ratio for name in ("mfu", "hfu", "tokens_per_s")}
    exposed = {axis: value * ratio for axis, value in timing.exposed_s.items()}
    return timing._replace(**seconds, **shares, exposed_s=exposed)


def slow_down(alone: Timing, times: float, *, keeps_exposed: bool) -> Timing:
    """Return the timing with all seconds multiplied by `times`.

    `keeps_exposed`: exposed seconds stay, because runs on these cores measured the links.
    """
    scaled = correct(alone, times)
    if not keeps_exposed:
        return scaled
    step_s = scaled.step_s - (times - 1) * sum(alone.exposed_s.values())
    whole = correct(scaled, step_s / scaled.step_s)
    return scaled._replace(
        step_s=step_s, exposed_s=alone.exposed_s, mfu=whole.mfu, hfu=whole.hfu, tokens_per_s=whole.tokens_per_s
    )


def get_micro_batch_s(stage: tuple[Halves, dict[Axis, float]]) -> float:
    """Return the seconds that a stage computes and waits per micro-batch."""
    halves, waits = stage
    return halves.total_s + halves.launch_s + sum(waits.values())


def expose(seconds: float, hidden: float, halves: Halves) -> float:
    """Return the exposed part of a wait of which compute overlaps a `hidden` share."""
    return seconds - min(hidden * seconds, halves.total_s)


def subtract_seconds(halves: Halves, seconds: float) -> Halves:
    """Return the halves without `seconds`, taken from each in proportion."""
    return Halves(*(part * (1 - seconds / halves.total_s) for part in halves))


def scale(pace: Pace, times: float) -> Pace:
    """Return the pace with all seconds multiplied by `times`."""
    halves = Halves(*(part * times for part in pace.halves))
    waits = {axis: seconds * times for axis, seconds in pace.waits.items()}
    return Pace(halves, waits, pace.micro_batch_s * times, pace.once_s * times)


def compute_bubble(plan: ResolvedPlan, pace: Pace) -> float:
    """Return the idle seconds of the slowest stage while the pipeline fills and drains."""
    if plan.layout.pp == 1:
        return 0.0
    halves = pace.halves
    inputs = halves.backward_input_s + halves.recompute_s
    ratio = bubble_ratio(plan.layout, plan.train.micro_batches, halves.forward_s, inputs, halves.backward_weight_s)
    return (pace.once_s - pace.micro_batch_s) * ratio


def compute_fill_share(plan: ResolvedPlan) -> float:
    """Return the share of a rank's forwards that fill the pipeline, and of backwards that drain it.

    Nothing of the other kind runs next to them (`get_pp_rank_microbatches` in Megatron's schedules.py).
    """
    layout = plan.layout
    chunks = layout.pp - 1
    if layout.virtual_stages > 1:
        chunks = 2 * chunks + (layout.virtual_stages - 1) * layout.pp
    return min(1.0, (chunks + 1) / (plan.train.micro_batches * layout.virtual_stages))


def compute_interleaved_exposure(plan: ResolvedPlan, seconds: float, compute_s: float, *, overlaps_own: bool) -> float:
    """Return the exposed seconds of an interleaved pipeline's gathers or reductions, chunk after chunk.

    One chunk's share is exposed, and any time beyond the fill or drain phase (schedules.py of Megatron).

    Args:
        compute_s: compute of a stage on one micro-batch.
        overlaps_own: a chunk computes while its own weights arrive.
    """
    layout = plan.layout
    chunks, units = layout.virtual_stages, max(1, plan.model.num_layers // layout.pp)
    later = min(layout.pp, plan.train.micro_batches) * (chunks - 1) / chunks * compute_s
    hidden = compute_s / chunks if overlaps_own else 0.0
    return max(seconds / units, seconds / chunks - hidden, seconds - hidden - later)
