"""Measures of a finished job, limits of the gate, and the mean and confidence interval of several runs.

bytes, bytes.AXIS, bytes.AXIS.OP   payload bytes per step of all ranks
calls, calls.AXIS, calls.AXIS.OP   collectives per step of all ranks
step_time                          seconds, median of the steps of rank 0 without the first steps
tokens_per_s                       of the last steps
peak_memory                        bytes, of the rank with the most memory
loss@STEP, loss                    training loss after a step, or after the last step

Limits of the gate: `bytes.tp=+0%`, `step_time=+10%`, `peak_memory=2GiB`, `loss@100=+1%`.

The mean and the interval use logarithms, because times, rates, and memory are positive and differ by ratios. So the
mean is geometric, and the bounds of the interval are positive.

The interval is that of B. L. Welch, "The generalization of 'Student's' problem when several different population
variances are involved", Biometrika 34 (1947): the difference of two means with different variances follows Student's
t with the degrees of freedom of equation (28). If one side has a single run, the variance of the other side is used
for both (Student 1908). Both assume independent runs with a nearly normal distribution. Medians of the steps of a run
are nearly normal. Runs that slow each other down are not independent.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, variance
from typing import Literal, NamedTuple

from meshboard.answers import JobDetail, RunMeasurements, VerdictRow
from meshboard.errors import WrongError

TRAFFIC = re.compile(r"(bytes|calls)(\.[^.]+)?(\.[^.]+)?")
UNITS = {"bytes": "B", "calls": "", "step_time": "s", "tokens_per_s": "tokens/s", "peak_memory": "B", "loss": ""}


class MissingValueError(WrongError):
    """A run has no value of a measure."""


@dataclass(frozen=True)
class RunMeasures:
    """Measurements of a run. A value is None if no rank reported it.

    Args:
        sent: Payload bytes per step by (axis, op).
        calls: Collectives per step by (axis, op).
        plan_difference: Bytes and calls that differ from the prediction, or None without all ranks.
        no_traffic_reason: Reason for which `sent` and `calls` are empty.
        no_peak_reason: Reason for which `peak_memory` is None.
    """

    name: str
    step_time: float | None = None
    tokens_per_s: float | None = None
    peak_memory: float | None = None
    losses: Mapping[int, float] = field(default_factory=dict)
    sent: Mapping[tuple[str, str], float] = field(default_factory=dict)
    calls: Mapping[tuple[str, str], float] = field(default_factory=dict)
    last_step: int | None = None
    plan_difference: tuple[int, int] | None = None
    no_traffic_reason: str = ""
    no_peak_reason: str = ""

    def get_value(self, measure: str) -> float:
        """Return the value of a measure.

        Raises:
            MissingValueError
        """
        if TRAFFIC.fullmatch(measure):
            value: float | None = self._get_traffic_sum(measure)
        elif measure == "loss" or measure.startswith("loss@"):
            value = self._get_loss(measure)
        else:
            values = {"step_time": self.step_time, "tokens_per_s": self.tokens_per_s, "peak_memory": self.peak_memory}
            value = values[measure]
        if value is None:
            raise MissingValueError(
                self.describe_missing(measure, self.no_peak_reason if measure == "peak_memory" else "")
            )
        if not math.isfinite(value):
            raise MissingValueError(f"{measure} of {self.name} is {value}, which is not a finite number.")
        return value

    def describe_missing(self, measure: str, reason: str) -> str:
        """Return the message for a missing value."""
        return f"{self.name} has no {measure}" + (f": {reason}" if reason else "")

    def get_traffic(self, kind: str) -> Mapping[tuple[str, str], float]:
        """Return bytes or calls by axis and op."""
        return self.sent if kind == "bytes" else self.calls

    def _get_traffic_sum(self, measure: str) -> float:
        kind, *key_start = measure.split(".")
        traffic = self.get_traffic(kind)
        if not traffic:
            raise MissingValueError(self.describe_missing(kind, self.no_traffic_reason or "no step was metered"))
        # fsum gives equal sums for every order of the ranks.
        return math.fsum(value for key, value in traffic.items() if list(key)[: len(key_start)] == key_start)

    def _get_loss(self, measure: str) -> float:
        if not self.losses:
            raise MissingValueError(f"{self.name} has no loss")
        last = self.last_step if self.last_step is not None else max(self.losses)
        step = last if measure == "loss" else int(measure.removeprefix("loss@"))
        if step not in self.losses:  # a loss that is not finite is not stored
            near = min(self.losses, key=lambda known: abs(known - step))
            which = f"its last step {step}" if measure == "loss" else f"step {step}"
            raise MissingValueError(f"{self.name} has no loss at {which}. The nearest stored loss is at step {near}.")
        return self.losses[step]


def get_unit(measure: str) -> str:
    """Return the unit of a measure."""
    return UNITS[re.split(r"[.@]", measure)[0]]


def parse_job(job: JobDetail) -> RunMeasures:
    """Return the measurements of a job in the response of `GET /jobs/ID`.

    Raises:
        MissingValueError: The job has not succeeded.
    """
    name = f"job {job.get('id') or job.get('name')}"  # jobs of one spec have equal names
    if job.get("status") != "succeeded":
        raise MissingValueError(f"{name} has the status {job.get('status')}. Use a job that succeeded.")
    summary = (job.get("exit") or {}).get("summary") or {}
    steps = summary.get("ran_steps", summary.get("steps", 0))
    ranks, left_out = job.get("world_size", 1), summary.get("cells_left_out", 0)
    sent, calls = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for cells in (summary.get("cells") or {}).values() if not left_out else ():
        for cell in cells:
            if cell["phase"] == "step":
                sent[cell["axis"], cell["op"]] += cell["payload_bytes"]
                calls[cell["axis"], cell["op"]] += cell["count"]
    peaks = summary.get("peak_bytes") or {}
    lacks_peaks = 0 < len(peaks) < ranks
    return RunMeasures(
        name=name,
        step_time=(summary.get("measured") or {}).get("step_s"),
        tokens_per_s=summary.get("tokens_per_s"),
        peak_memory=max(peaks.values()) if peaks and not lacks_peaks else None,
        losses={point["step"]: point["loss"] for point in summary.get("losses") or []},
        last_step=summary.get("steps"),
        sent={key: value / steps for key, value in sent.items()} if steps else {},
        calls={key: value / steps for key, value in calls.items()} if steps else {},
        plan_difference=_sum_differences(summary.get("verdict") or {}, ranks),
        no_traffic_reason=f"only {max(0, ranks - left_out)} of {ranks} ranks have stored traffic" if left_out else "",
        no_peak_reason=f"only {len(peaks)} of {ranks} ranks have a stored peak" if lacks_peaks else "",
    )


def parse_facts(name: str, facts: RunMeasurements) -> RunMeasures:
    """Return the measurements of a run that the board stores for a baseline."""
    difference = facts["apart"]
    return RunMeasures(
        name=f"baseline {name}",
        step_time=facts["step_s"],
        tokens_per_s=facts["tokens_per_s"],
        peak_memory=facts["peak_bytes"],
        losses={point["step"]: point["loss"] for point in facts["losses"]},
        last_step=facts.get("last_step"),
        sent={(row["axis"], row["op"]): row["bytes"] for row in facts["sent"]},
        calls={(row["axis"], row["op"]): row["calls"] for row in facts["sent"]},
        plan_difference=None if difference is None else (difference["bytes"], difference["calls"]),
        no_traffic_reason=facts.get("no_sent", ""),
        no_peak_reason=facts.get("no_peak", ""),
    )


def _sum_differences(verdicts: Mapping[str, Sequence[VerdictRow]], ranks: int) -> tuple[int, int] | None:
    if len(verdicts) < ranks:
        return None
    rows = [row for rank in verdicts.values() for row in rank]
    return (
        sum(abs(row["measured_bytes"] - row["predicted_bytes"]) for row in rows),
        sum(abs(row["measured_count"] - row["predicted_count"]) for row in rows),
    )


BYTE_UNITS = {"": 1.0, "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
# Unit of a measure -> description and factors of the units of a limit.
LIMIT_UNITS: dict[str, tuple[str, dict[str, float]]] = {
    "B": ("in bytes", BYTE_UNITS),
    "s": ("in seconds", {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}),
    "tokens/s": ("in tokens per second", {"": 1.0, "tokens/s": 1.0}),
    "": ("a number without a unit", {"": 1.0}),
}
MAX_LIMIT = 1e30
MAX_DIGITS = 7  # of a value that is not a whole number
MIN_FIXED_POINT = 1e5  # larger values would have an exponent with six digits
NUMBER = r"[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
MEASURES = (
    "bytes, bytes.AXIS, bytes.AXIS.OP, calls, calls.AXIS, calls.AXIS.OP, step_time, tokens_per_s, peak_memory, loss, "
    "loss@STEP"
)


class LimitError(WrongError):
    """A limit is invalid."""


class Limit(NamedTuple):
    """Limit of a measure.

    Args:
        value: Relative to the baseline if `relative` (0.1 is +10%), else in the unit of the measure.
    """

    measure: str
    side: Literal["max", "min"]
    value: float
    relative: bool

    def get_bound(self, baseline: float) -> float:
        """Return the largest or smallest allowed value of the measure."""
        return baseline + abs(baseline) * self.value if self.relative else self.value

    def is_met_by(self, value: float, baseline: float) -> bool:
        """Return whether a value is within the limit. The bound is within the limit, except for rounding."""
        bound = self.get_bound(baseline)
        if math.isclose(value, bound, rel_tol=1e-12):
            return True
        return value <= bound if self.side == "max" else value >= bound


def parse_limit(text: str, side: Literal["max", "min"]) -> Limit:
    """Parse a limit such as "step_time=+10%".

    Raises:
        LimitError
    """
    measure, equals, limit = text.partition("=")
    if not equals or not _is_measure(measure):
        raise LimitError(f"{text!r}: Use MEASURE=LIMIT with one of {MEASURES}.")
    if share := re.fullmatch(rf"([+-]?)({NUMBER})%", limit):
        if not share[1]:
            raise LimitError(f"{text!r}: Add a sign: +{limit} or -{limit}.")
        sign = -1 if share[1] == "-" else 1
        return Limit(measure, side, _check_size(sign * float(share[2]) / 100, text), relative=True)
    absolute = re.fullmatch(rf"({NUMBER})\s*([A-Za-z/]*)", limit)
    if absolute is None:
        raise LimitError(
            f"{text!r}: The limit is {limit!r}. Use a percentage such as +10%, or a value such as 0.5s or 2GiB."
        )
    number, unit = absolute.groups()
    words, factors = LIMIT_UNITS[get_unit(measure)]
    if unit not in factors:
        known = ", ".join(filter(None, factors))
        raise LimitError(f"{text!r}: The unit is {unit!r}, but {measure} is {words}{f' ({known})' if known else ''}.")
    return Limit(measure, side, _check_size(float(number) * factors[unit], text), relative=False)


def _check_size(value: float, text: str) -> float:
    if abs(value) > MAX_LIMIT:  # a share of a baseline could become infinite
        raise LimitError(f"{text!r}: The limit is {value:.3g}. Use at most {MAX_LIMIT:.0e}.")
    return value


def _is_measure(text: str) -> bool:
    return bool(
        TRAFFIC.fullmatch(text)
        or text in ("step_time", "tokens_per_s", "peak_memory", "loss")
        or re.fullmatch(r"loss@[1-9][0-9]{0,11}", text)
    )


def format_value(value: float | None, unit: str, sign: str = "") -> str:
    """Return a value with its unit. Whole bytes and calls have all digits, because a gate checks the last one.

    Args:
        sign: "+" shows the sign of a change.
    """
    if value is None:
        return "-"
    if unit in ("B", ""):
        # A fraction of a byte comes from a mean.
        is_whole = abs(value) >= 10 ** (MAX_DIGITS - 1) or float(value).is_integer()
        digits = f"{value:{sign},.0f}" if is_whole else f"{value:{sign},.{MAX_DIGITS}g}"
    else:
        digits = f"{value:{sign},.1f}" if abs(value) >= MIN_FIXED_POINT else f"{value:{sign},.6g}"
    return f"{digits} {unit}".rstrip()


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
