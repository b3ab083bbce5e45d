"""A step's time, told apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from contracts.telemetry.vocabulary import Axis


class Parts(NamedTuple):
    """Seconds of a step that a stage spends on each thing, without what it idles; of one micro-batch its forward and
    both backwards, the first with what recompute repeats.

    `exposed_s` counts of each axis only what compute does not hide, `launch_s` what the device waits for its host.
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
    """Seconds of one step, of the slowest stage or of all in the mean: `Parts`, which with the bubble add up to
    `step_s`."""

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
        """Of the step, that the device waits for its host."""
        return self.launch_s / self.step_s


def mean_parts(weighed: Iterable[tuple[float, Parts]]) -> Parts:
    """Of stages by their share of all; the shares add up to 1."""
    rows = list(weighed)
    plain = [name for name in Parts._fields if name != "exposed_s"]
    seconds = {name: sum(share * getattr(parts, name) for share, parts in rows) for name in plain}
    axes = dict.fromkeys(axis for _, parts in rows for axis in parts.exposed_s)
    exposed = {axis: sum(share * parts.exposed_s.get(axis, 0.0) for share, parts in rows) for axis in axes}
    return Parts(**seconds, exposed_s=exposed)


def corrected(timing: Timing, ratio: float) -> Timing:
    """All seconds times `ratio`, and what follows from them."""
    whole = ("model_flops", "hardware_flops", "mfu", "hfu", "tokens_per_s", "exposed_s")
    seconds = {name: value * ratio for name, value in timing._asdict().items() if name not in whole}
    shares = {name: getattr(timing, name) / ratio for name in ("mfu", "hfu", "tokens_per_s")}
    exposed = {axis: value * ratio for axis, value in timing.exposed_s.items()}
    return timing._replace(**seconds, **shares, exposed_s=exposed)


def crowded(alone: Timing, times: float, *, links_told: bool) -> Timing:
    """All seconds times `times`; with `links_told` but for exposed ones: runs on the same cores told of the links."""
    made = corrected(alone, times)
    if not links_told:
        return made
    step_s = made.step_s - (times - 1) * sum(alone.exposed_s.values())
    whole = corrected(made, step_s / made.step_s)
    return made._replace(
        step_s=step_s, exposed_s=alone.exposed_s, mfu=whole.mfu, hfu=whole.hfu, tokens_per_s=whole.tokens_per_s
    )
