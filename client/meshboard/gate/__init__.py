"""Gate for CI: compare finished jobs with limits and baselines."""

from meshboard.gate.checks import (
    Baseline,
    CheckResult,
    baseline_from_branch,
    baseline_from_job,
    check_limits,
    check_same_baselines,
    check_same_spec,
    explain_excluded,
)
from meshboard.gate.measures import (
    Limit,
    LimitError,
    MeasuredRun,
    MissingValueError,
    format_value,
    get_unit,
    parse_facts,
    parse_job,
    parse_limit,
)

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
