"""Fair share: what projects used, of which half is forgotten in each half-life, against what was theirs to use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

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
