"""Limits of the gate: `bytes.tp=+0%`, `step_time=+10%`, `peak_memory=2GiB`, `loss@100=+1%`."""

from __future__ import annotations

import math
import re
from typing import Literal, NamedTuple

from meshboard.errors import WrongError
from meshboard.gate.measures import TRAFFIC, get_unit

BYTE_UNITS = {"": 1.0, "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
# Unit of a measure -> description and factors of the units of a limit.
UNITS: dict[str, tuple[str, dict[str, float]]] = {
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
    words, factors = UNITS[get_unit(measure)]
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
