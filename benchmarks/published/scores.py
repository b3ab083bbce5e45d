"""What the table says of predictions: errors, ranking inside sweeps, and whether a layout fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from statistics import mean, median
from typing import NamedTuple


class Errors(NamedTuple):
    """Relative errors of predictions: `bias` with their sign, all others without. `most`: 9 in 10 are no larger."""

    rows: int
    mean: float
    median: float
    most: float
    worst: float
    bias: float
    too_fast: float


def errors(signed: Sequence[float]) -> Errors | None:
    """None without any."""
    if not signed:
        return None
    size = [abs(e) for e in signed]
    below = sum(e < 0 for e in signed) / len(signed)
    most = sorted(size)[math.ceil(0.9 * len(size)) - 1]
    return Errors(len(signed), mean(size), median(size), most, max(signed, key=abs), mean(signed), below)


CERTAIN = 0.9  # that so many of all rows lie within, by those at hand


def sure(off: Sequence[float], share: float = 0.9) -> float:
    """Least of `off` that holds `share` of all rows with a certainty of `CERTAIN`; the worst where none does.

    Rows at hand are drawn from all: k - 1 of n or fewer lie below the true quantile as often as the binomial says.
    """
    n, below = len(off), 0.0
    for k, one in enumerate(sorted(off), 1):
        below += math.comb(n, k - 1) * share ** (k - 1) * (1 - share) ** (n - k + 1)
        if below >= CERTAIN:
            return one
    return max(off)


def kendall(pairs: Sequence[tuple[float, float]]) -> float | None:
    """tau-b of (predicted, measured) times of one sweep; None where no two were predicted apart."""
    agree = different = tied_predicted = tied_measured = 0
    for (p, t), (q, u) in combinations(pairs, 2):
        order = (p - q) * (t - u)
        agree += order > 0
        different += order < 0
        tied_predicted += p == q and t != u
        tied_measured += t == u and p != q
    apart = agree + different
    scale = ((apart + tied_predicted) * (apart + tied_measured)) ** 0.5
    if not apart + tied_predicted:
        return None
    return (agree - different) / scale if scale else 0.0


class Choice(NamedTuple):
    """What a search would have taken first. `regret`: how much slower it was than the best; None where it ran out."""

    regret: float | None


def first_choice(offered: Sequence[tuple[float, float | None]], best: float) -> Choice | None:
    """Of (predicted, measured) times of what is said to fit, None measured of what ran out; None where nothing is.

    Of layouts predicted alike the first choice is any: its regret is their mean, and one that ran out is the choice.
    """
    if not offered:
        return None
    least = min(predicted for predicted, _ in offered)
    chosen = [measured for predicted, measured in offered if predicted == least]
    ran = [measured for measured in chosen if measured is not None]
    return Choice(mean(ran) / best - 1 if len(ran) == len(chosen) else None)


class Fit(NamedTuple):
    """Counts of layouts by what was said and what happened."""

    ran_said_fits: int
    ran_said_not: int
    out_said_fits: int
    out_said_not: int

    @property
    def rows(self) -> int:
        return sum(self)

    @property
    def right(self) -> float:
        return (self.ran_said_fits + self.out_said_not) / self.rows

    @property
    def falsely_fits(self) -> float:
        """Share of all layouts that were said to fit and ran out."""
        return self.out_said_fits / self.rows

    @property
    def missed(self) -> float | None:
        """Share of those that ran out that were said to fit; None where none did."""
        out = self.out_said_fits + self.out_said_not
        return self.out_said_fits / out if out else None


def confusion(said: Sequence[tuple[bool, bool]]) -> Fit | None:
    """Of (said to fit, ran)."""
    if not said:
        return None
    return Fit(
        sum(fits and ran for fits, ran in said),
        sum(not fits and ran for fits, ran in said),
        sum(fits and not ran for fits, ran in said),
        sum(not fits and not ran for fits, ran in said),
    )
