"""A pipe whose ranks share a machine's cores: what runs at once slows each other down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from planner.cost.pipes.simulate import Timeline


class Stretched(NamedTuple):
    """Seconds of the step, and of them those in which each rank computes."""

    step_s: float
    busy_s: tuple[float, ...]


def stretched(timeline: Timeline, slowdown: Sequence[float]) -> Stretched:
    """The timeline of ranks that had the machine to themselves, when k that compute at once take slowdown[k - 1] times
    as long.

    All that compute at a moment are slowed alike, so no action overtakes another: time itself is stretched.
    """
    marks = sorted((at, change, cell.rank) for cell in timeline.cells for at, change in _ends(cell.start_s, cell.end_s))
    busy, active, step, before = [0.0] * len(timeline.busy_s), set[int](), 0.0, 0.0
    for at, starts, rank in marks:
        took = (at - before) * (slowdown[len(active) - 1] if active else 1.0)
        step += took
        for other in active:
            busy[other] += took
        before = at
        if starts:
            active.add(rank)
        else:
            active.remove(rank)
    return Stretched(step, tuple(busy))


def _ends(start_s: float, end_s: float) -> tuple[tuple[float, bool], tuple[float, bool]]:
    """A rank's next action may start when the one before ends: ends sort before starts."""
    return (start_s, True), (end_s, False)
