"""A project holds no more slots at once than its quota.

Fair share: what projects used, of which half is forgotten in each half-life, against what was theirs to use.

A job's points: who has more goes first.

priority, as its owner's staff set it
+ so much an hour for waiting, without an end: no stream of higher priority keeps a job out for ever
+ a part between 0 and so much for belonging to a project that used less than its fair share
+ what staff gave it by moving it
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from jobs.queue.scheduling.states import Quota
from planner.facts.validation import format_count


class Quotas:
    """What each project holds while a pass goes through the queue."""

    def __init__(self, quotas: Mapping[str, Quota]) -> None:
        self._quotas = quotas
        self._used = {project: quota.used for project, quota in quotas.items()}
        self._full: set[str] = set()

    def refusal(self, project: str, slots: int) -> str:
        """Why the project's quota does not allow a job of so many slots now; empty where it does."""
        quota = self._quotas.get(project)
        if quota is None or quota.slots is None:
            return ""
        limit = f"Project {project} is limited to {format_count(quota.slots, 'slot')}."
        needs = f"The job needs {format_count(slots, 'slot')}. {limit}"
        if slots > quota.slots:
            return needs
        if project in self._full:
            return f"{needs} Another job of the project is ahead in the queue."
        if self._used[project] + slots <= quota.slots:
            return ""
        self._full.add(project)
        return f"{needs} Other jobs of the project use or reserve {format_count(self._used[project], 'slot')}."

    def take(self, project: str, slots: int) -> None:
        """A job of the project holds so many, or they are kept for it."""
        if project in self._used:
            self._used[project] += slots


LEAST, MOST = 1e-3, 1e3  # of a weight, whatever is stored: one row must not stop the queue


class Use(NamedTuple):
    """Slot-seconds that a project used, and its weight."""

    used: float
    weight: float


def decayed(used: float, slots: int, seconds: float, half_life_s: float) -> float:
    """Slot-seconds after so many seconds in which so many slots were held."""
    kept: float = 0.5 ** (seconds / half_life_s)
    return used * kept + slots * (1 - kept) * half_life_s / math.log(2)


def factors(projects: Mapping[str, Use]) -> dict[str, float]:
    """1 for a project that used nothing, 1/2 for one that used exactly its part, towards 0 the more it used.

    2 to the minus of used part over fair part, as in Slurm's classic fair-share factor.
    """
    weights = {name: min(max(p.weight, LEAST), MOST) for name, p in projects.items()}
    used, weight = sum(p.used for p in projects.values()), sum(weights.values())
    if used <= 0:
        return dict.fromkeys(projects, 1.0)
    return {name: 2.0 ** -((p.used / used) / (weights[name] / weight)) for name, p in projects.items()}


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
