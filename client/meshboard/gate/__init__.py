"""Gate for CI: compare finished jobs with limits and baselines."""

from meshboard.gate.baselines import (
    Baseline,
    baseline_from_branch,
    baseline_from_job,
    check_same_baselines,
    check_same_spec,
    explain_excluded,
)
from meshboard.gate.checks import CheckResult, check_limits
from meshboard.gate.limits import Limit, LimitError, format_value, parse_limit
from meshboard.gate.measures import MeasuredRun, MissingValueError, get_unit, parse_facts, parse_job

__all__ = [
    "Baseline",
    "CheckResult",
    "Limit",
    "LimitError",
    "MeasuredRun",
    "MissingValueError",
    "baseline_from_branch",
    "baseline_from_job",
    "check_limits",
    "check_same_baselines",
    "check_same_spec",
    "explain_excluded",
    "format_value",
    "get_unit",
    "parse_facts",
    "parse_job",
    "parse_limit",
]
