"""Whether a run stays within limits, against a baseline or by themselves: for CI."""

from meshboard.gate.figures import figure
from meshboard.gate.judge import Row, judge
from meshboard.gate.limits import Limit, LimitError, parse
from meshboard.gate.measures import Run, UnknownError, run_of, run_of_facts, unit_of
from meshboard.gate.specs import check_same

__all__ = [
    "Limit",
    "LimitError",
    "Row",
    "Run",
    "UnknownError",
    "check_same",
    "figure",
    "judge",
    "parse",
    "run_of",
    "run_of_facts",
    "unit_of",
]
