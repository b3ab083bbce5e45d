"""Limits as a command line has them: `bytes.tp=+0%`, `step_time=+10%`, `peak_memory=2GiB`, `loss@100=+1%`."""

from __future__ import annotations

import math
import re
from typing import Literal, NamedTuple

from meshboard.errors import WrongError
from meshboard.gate.measures import TRAFFIC, unit_of

BYTES = {"": 1.0, "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
UNITS: dict[str, tuple[str, dict[str, float]]] = {
    "B": ("in bytes", BYTES),
    "s": ("in seconds", {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}),
    "tokens/s": ("in tokens per second", {"": 1.0, "tokens/s": 1.0}),
    "": ("a number without a unit", {"": 1.0}),
}
LARGEST = 1e30
NUMBER = r"[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
MEASURES = (
    "bytes, bytes.AXIS, bytes.AXIS.OP, calls, calls.AXIS, calls.AXIS.OP, step_time, tokens_per_s, peak_memory, loss, "
    "loss@STEP"
)


class LimitError(WrongError):
    """What was written is no limit; says what one looks like."""


class Limit(NamedTuple):
    """`value` is a share of the baseline's where `relative` (0.1 is ten percent either way), else in the measure's own
    unit. `side` says which way is too far."""

    measure: str
    side: Literal["max", "min"]
    value: float
    relative: bool

    def bound(self, baseline: float) -> float:
        """What the figure may at most, or must at least, be."""
        return baseline + abs(baseline) * self.value if self.relative else self.value

    def holds(self, value: float, baseline: float) -> bool:
        """Equal to the bound is within it, but for what floats make of the same sum."""
        bound = self.bound(baseline)
        if math.isclose(value, bound, rel_tol=1e-12):
            return True
        return value <= bound if self.side == "max" else value >= bound


def parse(text: str, side: Literal["max", "min"]) -> Limit:
    """Raises LimitError."""
    measure, equals, limit = text.partition("=")
    if not equals or not _is_measure(measure):
        raise LimitError(f"{text!r}: Use MEASURE=LIMIT with one of {MEASURES}.")
    if share := re.fullmatch(rf"([+-]?)({NUMBER})%", limit):
        sign = -1 if share[1] == "-" else 1
        if not share[1]:
            raise LimitError(f"{text!r}: Add a sign: +{limit} or -{limit}.")
        return Limit(measure, side, _finite(sign * float(share[2]) / 100, text), relative=True)
    absolute = re.fullmatch(rf"({NUMBER})\s*([A-Za-z/]*)", limit)
    if absolute is None:
        raise LimitError(
            f"{text!r}: The limit is {limit!r}. Use a percentage such as +10%, or a value such as 0.5s or 2GiB."
        )
    number, unit = absolute.groups()
    words, factors = UNITS[unit_of(measure)]
    if unit not in factors:
        known = ", ".join(filter(None, factors))
        raise LimitError(f"{text!r}: The unit is {unit!r}, but {measure} is {words}{f' ({known})' if known else ''}.")
    return Limit(measure, side, _finite(float(number) * factors[unit], text), relative=False)


def _finite(value: float, text: str) -> float:
    """Raises LimitError: nothing is beyond it, or a share of a baseline would not be a number."""
    if abs(value) > LARGEST:
        raise LimitError(f"{text!r}: The limit is {value:.3g}. Use at most {LARGEST:.0e}.")
    return value


def _is_measure(text: str) -> bool:
    return bool(
        TRAFFIC.fullmatch(text)
        or text in ("step_time", "tokens_per_s", "peak_memory", "loss")
        or re.fullmatch(r"loss@[1-9][0-9]{0,11}", text)
    )
