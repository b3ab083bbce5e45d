"""Mean of several runs and its confidence interval.

Both use logarithms, because times, rates, and memory are positive and differ by ratios. So the mean is
geometric, and the bounds of the interval are positive.

The interval is that of B. L. Welch, "The generalization of 'Student's' problem when several different population
variances are involved", Biometrika 34 (1947): the difference of two means with different variances follows Student's
t with the degrees of freedom of equation (28). If one side has a single run, the variance of the other side is used
for both (Student 1908). Both assume independent runs with a nearly normal distribution. Medians of the steps of a run
are nearly normal. Runs that slow each other down are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, variance

LEVEL = 0.95  # of the interval, with 2.5% at each end
MAX_EXPONENT = 300.0  # of e, so that a float holds the result
# 97.5% quantile of Student's t for 1, 2, ... degrees of freedom. It falls to 1.960 for more.
T: tuple[float, ...] = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def get_mean(values: Sequence[float]) -> float:
    """Return the geometric mean, or the arithmetic mean if a value is not positive, as a loss may be."""
    if min(values) == max(values):
        return values[0]  # without rounding
    return math.exp(fmean(map(math.log, values))) if min(values) > 0 else fmean(values)


def get_interval(runs: Sequence[float], baselines: Sequence[float]) -> tuple[float, float] | None:
    """Return the interval of the mean of `runs` compared with the mean of `baselines`, or with a constant.

    Returns None if the noise is unknown: no side has two values, or a value is not positive.
    """
    if min((*runs, *baselines)) <= 0:
        return None
    half_width = _get_half_width([math.log(value) for value in runs], [math.log(value) for value in baselines])
    if half_width is None:
        return None
    factor = math.exp(min(half_width, MAX_EXPONENT))
    return get_mean(runs) / factor, get_mean(runs) * factor


def _get_half_width(runs: Sequence[float], baselines: Sequence[float]) -> float | None:
    """Return half the width of the interval of the difference of two means."""
    ours, theirs = _get_variance(runs), _get_variance(baselines)
    if not baselines:
        return None if ours is None else _get_quantile(len(runs) - 1) * math.sqrt(ours / len(runs))
    if ours is None or theirs is None:
        common = ours if theirs is None else theirs
        if common is None:
            return None
        known = max(len(runs), len(baselines))
        return _get_quantile(known - 1) * math.sqrt(common * (1 / len(runs) + 1 / len(baselines)))
    parts = ours / len(runs), theirs / len(baselines)
    if not sum(parts):
        return 0.0
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / (len(runs) - 1) + parts[1] ** 2 / (len(baselines) - 1))
    return _get_quantile(freedom) * math.sqrt(sum(parts))


def _get_variance(values: Sequence[float]) -> float | None:
    return variance(values) if len(values) > 1 else None


def _get_quantile(freedom: float) -> float:
    """Return Student's t for these degrees of freedom, rounded down, which gives a wider interval."""
    return T[min(len(T), max(1, math.floor(freedom))) - 1]
