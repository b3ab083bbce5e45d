"""Score predictions: errors, ranking inside sweeps, and whether a layout fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import mean
from typing import NamedTuple


class ErrorSummary(NamedTuple):
    """Relative errors, in which each source has the same weight. `bias` is signed, the others are absolute."""

    sources: int
    rows: int
    mean: float
    median: float
    bias: float


def summarize_errors(errors: Mapping[str, Sequence[float]]) -> ErrorSummary | None:
    """Return the summary of signed relative errors by source, or None without errors."""
    by_source = [list(each) for each in errors.values() if each]
    if not by_source:
        return None
    return ErrorSummary(
        len(by_source),
        sum(len(each) for each in by_source),
        mean(mean(abs(error) for error in each) for each in by_source),
        compute_quantile({name: [abs(error) for error in each] for name, each in errors.items()}, 0.5),
        mean(mean(each) for each in by_source),
    )


def compute_quantile(values: Mapping[str, Sequence[float]], share: float) -> float:
    """Return the smallest value that bounds a share of the weight, if each source has the same weight."""
    weighed = sorted((value, 1 / len(each)) for each in values.values() for value in each)
    total, reached = sum(weight for _, weight in weighed), 0.0
    for value, weight in weighed:
        reached += weight
        if reached >= share * total - 1e-9:
            return value
    raise ValueError("no values")


def compute_kendall_tau(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return tau-b of (predicted, measured) times of a sweep, or None if all predictions are equal."""
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


class FirstChoice(NamedTuple):
    """First choice of a search. `regret` is its slowdown over the best, or None if it ran out of memory."""

    regret: float | None


def choose_first(offered: Sequence[tuple[float, float | None]], best: float) -> FirstChoice | None:
    """Return the first choice among (predicted, measured) times of layouts that are predicted to fit.

    A measured time of None means out of memory. Among equal predictions the regret is the mean, and a layout that ran
    out of memory is chosen. Returns None for no layouts.
    """
    if not offered:
        return None
    least = min(predicted for predicted, _ in offered)
    chosen = [measured for predicted, measured in offered if predicted == least]
    ran = [measured for measured in chosen if measured is not None]
    return FirstChoice(mean(ran) / best - 1 if len(ran) == len(chosen) else None)


class FitCounts(NamedTuple):
    """Counts of layouts by prediction and result."""

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
    def false_fit_share(self) -> float:
        """Share of all layouts that were predicted to fit but ran out of memory."""
        return self.out_said_fits / self.rows

    @property
    def missed_share(self) -> float | None:
        """Share of layouts that ran out of memory that were predicted to fit, or None if none ran out."""
        out = self.out_said_fits + self.out_said_not
        return self.out_said_fits / out if out else None


def count_fits(said: Sequence[tuple[bool, bool]]) -> FitCounts | None:
    """Count pairs (predicted to fit, ran)."""
    if not said:
        return None
    return FitCounts(
        sum(fits and ran for fits, ran in said),
        sum(not fits and ran for fits, ran in said),
        sum(fits and not ran for fits, ran in said),
        sum(not fits and not ran for fits, ran in said),
    )
