"""Whether a run stays within limits, against a baseline or by themselves: for CI."""

from meshboard.gate.baselines import Baseline, check_alike, of_branch, of_job, why_aside
from meshboard.gate.figures import figure
from meshboard.gate.judge import Row, judge
from meshboard.gate.limits import Limit, LimitError, parse
from meshboard.gate.measures import Run, UnknownError, run_of, run_of_facts, unit_of
from meshboard.gate.specs import check_same

__all__ = [
    "Baseline",
    "Limit",
    "LimitError",
    "Row",
    "Run",
    "UnknownError",
    "check_alike",
    "check_same",
    "figure",
    "judge",
    "of_branch",
    "of_job",
    "parse",
    "run_of",
    "run_of_facts",
    "unit_of",
    "why_aside",
]
