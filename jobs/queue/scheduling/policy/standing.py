"""A job's points: who has more goes first.

priority, as its owner's staff set it
+ so much an hour for waiting, without an end: no stream of higher priority keeps a job out for ever
+ a part between 0 and so much for belonging to a project that used less than its fair share
+ what staff gave it by moving it
"""

from __future__ import annotations

from typing import NamedTuple


class Rates(NamedTuple):
    """Points for an hour of waiting, and for a project that used nothing."""

    per_hour: float
    share: float


class Standing(NamedTuple):
    """The parts of a job's points."""

    priority: float
    waited: float
    share: float
    moved: float

    @property
    def points(self) -> float:
        """Rounded: what is equal but for the last bits of a float goes by age."""
        return round(sum(self), 6)


def standing(priority: int, waited_s: float, share: float, moved: float, rates: Rates) -> Standing:
    """`share`: `policy.share.factor` of its project, 1 for one that used nothing."""
    return Standing(float(priority), rates.per_hour * max(0.0, waited_s) / 3600, rates.share * share, moved)
