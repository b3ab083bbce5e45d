"""What several runs measured: their mean, and how far noise alone may have put it (Welch's interval).

Both are taken of logarithms. Times, rates and memory are positive and differ by shares, not by amounts: so the mean is
the geometric one, the interval is one of ratios, and neither ever leaves what is positive.

B. L. Welch, "The generalization of 'Student's' problem when several different population variances are involved",
Biometrika 34 (1947): the difference of two means, each with a variance of its own, is as far from its true value as
Student's t with the degrees of freedom that his equation (28) gives. Where one side has a single run, the other's
variance stands for both (Student 1908). Both suppose that runs are independent and about normally distributed, which
medians of a run's steps nearly are; two runs that disturb each other are not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, variance

LEVEL = 0.95  # of the interval; each end is 2.5% by itself
LARGEST_EXPONENT = 300.0  # of e: beyond what any two runs differ by, and a float still holds it
# The 97.5% quantile of Student's t for 1, 2, ... degrees of freedom; beyond the last it only shrinks, to 1.960.
T: tuple[float, ...] = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def mean(values: Sequence[float]) -> float:
    """The geometric one; of what is not all positive, as a loss may be, the usual one."""
    if min(values) == max(values):
        return values[0]  # no rounding of what is the same
    return math.exp(fmean(map(math.log, values))) if min(values) > 0 else fmean(values)


def interval(runs: Sequence[float], baselines: Sequence[float]) -> tuple[float, float] | None:
    """In which noise alone may have put mean(runs), held to mean(baselines) or, without those, to a figure. None where
    nothing is known of the noise: no side has two values, or some are not positive."""
    if min((*runs, *baselines)) <= 0:
        return None
    half = _half_width([math.log(value) for value in runs], [math.log(value) for value in baselines])
    if half is None:
        return None
    factor = math.exp(min(half, LARGEST_EXPONENT))
    return mean(runs) / factor, mean(runs) * factor


def _half_width(runs: Sequence[float], baselines: Sequence[float]) -> float | None:
    """Of the interval of the difference of their means."""
    ours, theirs = _variance(runs), _variance(baselines)
    if not baselines:
        return None if ours is None else _t(len(runs) - 1) * math.sqrt(ours / len(runs))
    if ours is None or theirs is None:
        common = ours if theirs is None else theirs
        if common is None:
            return None
        known = max(len(runs), len(baselines))
        return _t(known - 1) * math.sqrt(common * (1 / len(runs) + 1 / len(baselines)))
    parts = ours / len(runs), theirs / len(baselines)
    if not sum(parts):
        return 0.0
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / (len(runs) - 1) + parts[1] ** 2 / (len(baselines) - 1))
    return _t(freedom) * math.sqrt(sum(parts))


def _variance(values: Sequence[float]) -> float | None:
    return variance(values) if len(values) > 1 else None


def _t(freedom: float) -> float:
    """Rounded to the safe side: to fewer degrees of freedom."""
    return T[min(len(T), max(1, math.floor(freedom))) - 1]
